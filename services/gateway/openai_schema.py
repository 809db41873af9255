"""The fields of OpenAI's requests that this server understands: types, ranges, bounds. *Pure.*

Types are strict: a boolean or a text is no number; a number with a zero fraction is an integer, since JSON has one
kind of number. Null means the default. Fields that change what is asked for and are not supported are refused by
name where they say something (`UNSUPPORTED`); fields that are unknown are ignored, as vLLM does. What depends on the
model (ids, lengths, messages) is checked in `preparation.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, WithJsonSchema
from pydantic.config import JsonDict

from services.gateway.chat_messages import MESSAGE_SCHEMA
from services.gateway.openai_parts import ResponseFormat, StructuredOutputs, Switch, ToolChoice, Tools, or_empty
from services.gateway.prediction import Prediction
from shared.protocol import MAX_CHOICES, MAX_PRIORITY

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 64
MAX_BIASES = 300
MAX_MESSAGES = 4096
MAX_LOGPROBS = 20
MAX_TOKENS = 1 << 24
MAX_TIMEOUT_S = 86400
# what clients send and nothing here depends on, also where unknown fields are refused
IGNORED = ("metadata", "service_tier", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
MAX_ALLOWED_IDS = 4096
MAX_BAD_WORDS = 64


def _integral(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_total(value: Any) -> Any:
    return {"total": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


Int = Annotated[int, BeforeValidator(_integral)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopTexts = Annotated[list[StopText], Field(max_length=MAX_STOPS)]
Stops = Annotated[StopTexts, BeforeValidator(_as_list), or_empty([], StopText | StopTexts)]
TokenId = Annotated[Int, Field(ge=0, lt=1 << 32)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)]
Bias = Annotated[float, Field(ge=-100, le=100)]
SwitchedOn = Annotated[bool, or_empty(True, bool)]
TemplateValues = Annotated[dict[str, Any], Field(max_length=16)]
Seconds = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]
Label = Annotated[str, Field(max_length=1024)]
Message = Annotated[dict[str, Any], WithJsonSchema(MESSAGE_SCHEMA)]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]

# What `preparation.py` checks, since it depends on the model.
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_TEXTS = {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": {"type": "string"}}
_LISTS = {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": _IDS}
Prompt = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, _IDS, _TEXTS, _LISTS]})]
_BIASES = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_BIASES,
        },
        {"type": "null"},
    ]
}


def _only(given: str, other: str) -> JsonDict:
    """In words of JSON Schema: the one field and not the other."""
    return {"properties": {given: {"not": {"type": "null"}}, other: {"type": "null"}}, "required": [given]}


class Request(BaseModel):
    """Base of all. UNSUPPORTED: fields that are refused unless their value is one of these (null always is)."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        documented = handler.resolve_ref_schema(handler(schema))
        for name, neutral in cls.UNSUPPORTED.items():
            # 1 and 1.0 are one number there
            values = [v for i, v in enumerate(neutral) if v not in neutral[:i] or isinstance(v, bool)]
            documented["properties"][name] = {"enum": [None, *values], "description": "not supported"}
        return documented

    model: Annotated[str, Field(max_length=256)] | None = None


class Timeouts(BaseModel):
    """Seconds from admission, but of inter_token; a client can only shorten what the server allows."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)
    queue: Seconds | None = None
    first_token: Seconds | None = None
    inter_token: Seconds | None = None
    total: Seconds | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    include_usage: Switch = False
    continuous_usage_stats: Switch = False


class Speculative(BaseModel):
    """How much is guessed ahead; a request can only lower what the server does. fleet: also from other answers of its
    API key and cache_salt, and from its answer for those."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    num_speculative_tokens: Annotated[Int, Field(ge=0, le=MAX_TOKENS)] | None = None
    fleet: SwitchedOn = True


class GenerationRequest(Request):
    """What chat and completions share. Names, defaults and meanings are OpenAI's, beyond those vLLM's.

    temperature is 0 to 2 as OpenAI has it; below 0.01 it is 0.01 (as vLLM: the division would overflow), below
    0.00001 it is 0, greedy. top_k: -1 or 0 is off. seed: any 64-bit integer.
    """

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "logprob_token_ids": (),
        "logits_processors": (),
        "use_beam_search": (False,),
        "length_penalty": (1.0, 1),
        "early_stopping": (False,),
        "truncate_prompt_tokens": (),
        "kv_transfer_params": (),
        "vllm_xargs": (),
        "repetition_detection": (),
        # other servers' samplers, grammars and adapters: names that their clients send
        **dict.fromkeys(
            ("min_new_tokens", "mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range"), (0, 0.0)
        ),
        **dict.fromkeys(("typical_p", "repeat_penalty"), (1.0, 1)),
        **dict.fromkeys(("ebnf", "regex", "grammar", "json_schema", "custom_logit_processor"), ()),
        **dict.fromkeys(("lora_path", "adapter_id", "lora"), ()),
    }
    n: Annotated[Int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[Int, Field(ge=0, le=MAX_TOKENS)] | None = None
    min_tokens: Annotated[Int, Field(ge=0, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[Int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stops = []
    stop_token_ids: Annotated[TokenIds, or_empty([], TokenIds)] = []
    include_stop_str_in_output: Switch = False
    ignore_eos: Switch = False
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[
        dict[str, Bias], Field(max_length=MAX_BIASES), or_empty({}, dict), WithJsonSchema(_BIASES)
    ] = {}
    skip_special_tokens: SwitchedOn = True
    stream: Switch = False
    stream_options: StreamOptions | None = None
    timeout: Annotated[
        Timeouts | None, BeforeValidator(_as_total, json_schema_input_type=Seconds | Timeouts | None)
    ] = None
    user: Label | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_IDS)] | None = None
    bad_words: Annotated[Annotated[list[StopText], Field(max_length=MAX_BAD_WORDS)], or_empty([], list[StopText])] = []
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    speculative: Speculative | None = None
    priority: Annotated[Int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    prompt_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: Switch = False
    return_tokens_as_token_ids: Switch = False


class ChatCompletionRequest(GenerationRequest):
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationRequest.UNSUPPORTED,
        "functions": ([],),
        "verbosity": ("medium",),
        "function_call": ("none",),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "chat_template": (),
        "documents": ([],),
        "add_special_tokens": (False,),
        "mm_processor_kwargs": (),
        "echo": (False,),
        "best_of": (1,),
        "suffix": ("",),
    }
    messages: Messages
    max_completion_tokens: Annotated[Int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_tokens: Annotated[Int, Field(ge=1, le=MAX_TOKENS)] | None = None  # deprecated by OpenAI, used by many
    logprobs: Switch = False
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prediction: Prediction | None = None
    tools: Tools = []
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Switch = False
    chat_template_kwargs: TemplateValues | None = None
    reasoning_effort: Annotated[str, Field(min_length=1, max_length=16)] | None = None
    include_reasoning: SwitchedOn = True
    thinking_token_budget: Annotated[Int, Field(ge=0, le=MAX_TOKENS)] | None = None


class CompletionRequest(GenerationRequest):
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationRequest.UNSUPPORTED,
        "thinking_token_budget": (),
        "prompt_embeds": (),
        "add_special_tokens": (True,),
        # a chat's, which say something of an answer
        "max_completion_tokens": (),
        "top_logprobs": (0,),
        **dict.fromkeys(("tools", "functions"), ([],)),
        **dict.fromkeys(("tool_choice", "reasoning_effort"), ("none",)),
        "chat_template_kwargs": ({},),
    }
    prompt: Prompt
    suffix: str | None = None
    best_of: Annotated[Int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: Switch = False
    logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class TokenizeRequest(Request):
    """vLLM's: a prompt, or messages. add_special_tokens is true for a prompt and false for messages by default."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "chat_template": (),
        "mm_processor_kwargs": (),
    }
    model_config = ConfigDict(json_schema_extra={"oneOf": [_only("prompt", "messages"), _only("messages", "prompt")]})
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Switch = False
    tools: Tools = []
    chat_template_kwargs: TemplateValues | None = None
    return_token_strs: Switch = False


class DetokenizeRequest(Request):
    tokens: Annotated[list[Any], WithJsonSchema(_IDS | {"minItems": 0})]
