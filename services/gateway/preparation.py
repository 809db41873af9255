"""From a checked request to what is admitted: token ids, resolved sampling and text parameters. *Pure.*

Everything that depends on the model is checked and resolved here, so that nothing is queued that cannot run: ids lie
in the vocabulary, the prompt and at least one token, if any is wanted, fit the context and the pool, "as many as fit"
is a number, a missing seed is drawn. Tokenizing a long prompt takes milliseconds: call this outside the event loop for
large bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from services.gateway import asked
from services.gateway.chat_messages import parse_messages
from services.gateway.chat_template import Message
from services.gateway.errors import BadRequest
from services.gateway.forms import Form
from services.gateway.infill import check_goes_with, infill_of
from services.gateway.openai_schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Request,
    TokenizeRequest,
)
from services.gateway.prediction import predicted_ids
from services.gateway.token_limits import checked_ids, logit_bias, word_limits
from services.gateway.tokenization import Tokenizer
from shared.protocol import Constraint, SamplingParams, TextParams, log_start

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for the older endpoint


@dataclass(frozen=True, slots=True)
class Limits:
    """max_model_len: tokens of prompt and output together; pool_tokens: what the largest pool holds when empty.
    max_choices bounds all sequences of one request, over its prompts."""

    max_model_len: int
    pool_tokens: int
    max_choices: int = 16

    @property
    def max_tokens(self) -> int:
        return min(self.max_model_len, self.pool_tokens)

    @property
    def holder(self) -> str:
        """What sets max_tokens, for an error's sentence."""
        return "the model's context" if self.max_model_len <= self.pool_tokens else "the KV cache of a worker"


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """One prompt and its choices: everything of a `RequestSpec` but identity and salt."""

    ids: list[int]
    sampling: SamplingParams
    text: TextParams
    num_choices: int
    prediction: Sequence[int] = ()
    priority: int = 0

    @property
    def log_start(self) -> int:
        return log_start(self.sampling, len(self.ids))


def build_specs(
    request: ChatCompletionRequest | CompletionRequest,
    tokenizer: Tokenizer,
    limits: Limits,
    *,
    draw_seed: Callable[[], int],
    now: datetime,
    fingerprint: str | None = None,
    chat_text: str = "",
    form: Form | None = None,
) -> list[PreparedPrompt]:
    """One entry a prompt, in order; choice c of entry i has index i * num_choices + c in the response.

    draw_seed gives 64 random bits for each prompt of a request without a seed. chat_text: the messages of a chat, as
    the model's template renders them. form: what the answer is to be, its grammar compiled.
    """
    form = form or Form()
    num_choices = asked.num_choices(request)
    _check_together(request, limits)
    if isinstance(request, ChatCompletionRequest):
        prompts, param = [chat_prompt(chat_text, tokenizer, limits)], "messages"
    else:
        prompts, param = completion_prompts(request.prompt, tokenizer, limits, request.suffix or ""), "prompt"
    if len(prompts) * num_choices > limits.max_choices:
        field = "prompt" if num_choices == 1 else "n" if num_choices == request.n else "best_of"
        raise BadRequest(f"{field} asks for more than {limits.max_choices} choices in one request", param=field)
    asked.check_prompt_logprobs(request, prompts)
    prediction = request.prediction if isinstance(request, ChatCompletionRequest) else None
    predicted = predicted_ids(prediction, tokenizer, limits.max_tokens)
    text = form.text_params(_text_params(request, now, fingerprint or ""), chat_text)
    constraint = word_limits(request, tokenizer, form.constraint(tokenizer, chat_text))
    return [
        PreparedPrompt(
            ids,
            _sampling(request, ids, tokenizer, limits, draw_seed, param, constraint),
            text,
            num_choices,
            predicted,
            request.priority or 0,
        )
        for ids in prompts
    ]


def conversation(request: Request, tokenizer: Tokenizer) -> list[Message] | None:
    """The messages of a request as the model's template takes them; None where it has none."""
    if isinstance(request, TokenizeRequest) and (request.prompt is None) == (request.messages is None):
        raise BadRequest("give either prompt or messages", param="prompt")
    if not isinstance(request, ChatCompletionRequest | TokenizeRequest) or request.messages is None:
        return None
    if request.continue_final_message and request.add_generation_prompt:
        raise BadRequest(
            "continue_final_message together with add_generation_prompt is not possible", param="continue_final_message"
        )
    if tokenizer.chat_template is None:
        raise BadRequest("the model has no chat template; use /v1/completions", param="messages")
    return parse_messages(request.messages)


def chat_prompt(text: str, tokenizer: Tokenizer, limits: Limits | None = None) -> list[int]:
    """The template has written the special tokens, BOS too, so that none is added. limits None: any length."""
    if limits is not None:
        _check_length(text, tokenizer, limits, "messages")
    return tokenizer.encode(text, add_special_tokens=False)


def completion_prompts(prompt: Any, tokenizer: Tokenizer, limits: Limits, suffix: str = "") -> list[list[int]]:
    """A text, texts, token ids, or lists of them. A text gets BOS if the model wants it; ids are taken as they are.
    suffix: what follows on the answer."""
    infill = infill_of(tokenizer) if suffix else None
    _check_length(suffix, tokenizer, limits, "suffix")

    def encoded(text: str, path: str) -> list[int]:
        _check_length(text, tokenizer, limits, path)
        return infill.prompt_ids(text, suffix, tokenizer) if infill else tokenizer.encode_prompt(text)

    if isinstance(prompt, str):
        return [encoded(prompt, "prompt")]
    if not isinstance(prompt, list) or not prompt:
        raise BadRequest("prompt must be a text, texts, token ids, or lists of token ids", param="prompt")
    if not isinstance(prompt[0], str | list):
        return [checked_ids(prompt, tokenizer.vocab_size, "prompt")]
    if len(prompt) > limits.max_choices:
        raise BadRequest(f"prompt has more than {limits.max_choices} entries", param="prompt")
    prompts = []
    for i, item in enumerate(prompt):
        if type(item) is not type(prompt[0]):
            raise BadRequest(f"prompt[{i}] is not of the same kind as prompt[0]", param=f"prompt[{i}]")
        if isinstance(item, str):
            prompts.append(encoded(item, f"prompt[{i}]"))
        else:
            prompts.append(checked_ids(item, tokenizer.vocab_size, f"prompt[{i}]"))
    return prompts


def tokenize(request: TokenizeRequest, tokenizer: Tokenizer, chat_text: str = "") -> list[int]:
    """The ids that the same prompt or messages would have in a request; chat_text as in `build_specs`."""
    if request.messages is not None:
        ids = chat_prompt(chat_text, tokenizer)
        return tokenizer.surrounded(ids) if request.add_special_tokens else ids
    assert request.prompt is not None
    if request.add_special_tokens is False:
        return tokenizer.encode(request.prompt, add_special_tokens=False)
    return tokenizer.encode_prompt(request.prompt)


def detokenize(request: DetokenizeRequest, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(checked_ids(request.tokens, tokenizer.vocab_size, "tokens"))


def _check_together(request: ChatCompletionRequest | CompletionRequest, limits: Limits) -> None:
    """Fields that are right each by itself and not together."""
    if (request.n or 1) > limits.max_choices:
        raise BadRequest(f"n must be at most {limits.max_choices}", param="n")
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options is only allowed with stream", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise BadRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    if isinstance(request, ChatCompletionRequest):
        if request.top_logprobs and not request.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        return
    if request.best_of is not None and request.best_of < (request.n or 1):
        raise BadRequest("best_of must be at least n", param="best_of")
    if request.suffix:
        check_goes_with(request.prompt, request.echo)
    if asked.is_selected(request) and request.stream:
        raise BadRequest("best_of beyond n cannot be streamed", param="best_of")


def _sampling(
    request: ChatCompletionRequest | CompletionRequest,
    ids: list[int],
    tokenizer: Tokenizer,
    limits: Limits,
    draw_seed: Callable[[], int],
    param: str,
    constraint: Constraint | None,
) -> SamplingParams:
    max_tokens = _max_tokens(request, len(ids), limits, param)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise BadRequest(f"min_tokens must be at most max_tokens, which is {max_tokens} here", param="min_tokens")
    stop_ids = checked_ids(request.stop_token_ids, tokenizer.vocab_size, "stop_token_ids")
    if not request.ignore_eos:
        stop_ids += tokenizer.eos_token_ids
        if isinstance(request, CompletionRequest) and request.suffix:
            stop_ids += infill_of(tokenizer).end_ids
    if constraint is not None and constraint.grammar and not stop_ids:
        raise BadRequest("ignore_eos together with structured output is not supported", param="ignore_eos")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=asked.temperature(request),
        top_p=_or(request.top_p, 1.0),
        top_k=min(max(request.top_k or 0, 0), tokenizer.vocab_size),
        min_p=_or(request.min_p, 0.0),
        seed=(draw_seed() if request.seed is None else request.seed) & ((1 << 64) - 1),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        logit_bias=logit_bias(request.logit_bias, tokenizer.vocab_size),
        stop_token_ids=tuple(dict.fromkeys(stop_ids)),
        ignore_eos=request.ignore_eos,
        logprobs=asked.num_logprobs(request),
        prompt_logprobs=asked.num_prompt_logprobs(request),
        constraint=constraint,
        num_speculative_tokens=request.speculative.num_speculative_tokens if request.speculative else None,
        fleet=request.speculative is None or request.speculative.fleet,
    )


def _max_tokens(request: ChatCompletionRequest | CompletionRequest, num_prompt: int, limits: Limits, param: str) -> int:
    """How many tokens may come: what was asked for, as far as context and pool reach."""
    wanted = request.max_tokens
    if isinstance(request, ChatCompletionRequest):
        wanted = _or(request.max_completion_tokens, wanted)
    elif wanted is None:
        wanted = DEFAULT_COMPLETION_TOKENS
    if num_prompt == 0:
        raise BadRequest(f"{param} has no tokens", param=param)
    room = limits.max_tokens - num_prompt
    if room < (0 if wanted == 0 else 1):
        raise _too_long(f"{num_prompt} tokens", limits, param)
    return room if wanted is None else min(wanted, room)


def _check_length(text: str, tokenizer: Tokenizer, limits: Limits, param: str) -> None:
    """Refuse a text that cannot fit however it is cut into tokens, before seconds are spent on cutting it."""
    if len(text) > 16 * limits.max_tokens and len(text) > tokenizer.max_token_chars * limits.max_tokens:
        raise _too_long(f"{len(text)} characters", limits, param)


def _too_long(size: str, limits: Limits, param: str) -> BadRequest:
    return BadRequest(
        f"{param} has {size}, but {limits.holder} holds {limits.max_tokens} tokens of prompt and output together",
        param=param,
        code="context_length_exceeded",
    )


def _text_params(request: ChatCompletionRequest | CompletionRequest, now: datetime, fingerprint: str) -> TextParams:
    return TextParams(
        api="chat" if isinstance(request, ChatCompletionRequest) else "completions",
        stop=tuple(dict.fromkeys(request.stop)),
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        echo=isinstance(request, CompletionRequest) and request.echo,
        stream=request.stream,
        include_usage=request.stream_options is not None and request.stream_options.include_usage,
        continuous_usage=request.stream_options is not None and request.stream_options.continuous_usage_stats,
        num_shown=(request.n or 1) if asked.is_selected(request) else None,
        hides_logprobs=asked.is_selected(request) and request.logprobs is None,
        prompt_logprobs=request.prompt_logprobs,
        return_token_ids=request.return_token_ids,
        return_tokens_as_token_ids=request.return_tokens_as_token_ids,
        created=int(now.timestamp()),
        system_fingerprint=fingerprint,
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
