"""The shapes of all answers, for `/openapi.json`: answers are built as plain dicts, and tests hold the two together.

*Pure.* No field is left out and none is added, so that a client may be made from these.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorFields(Shape):
    """code is a name where there is one, else the status."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class Error(Shape):
    """OpenAI's shape of an error, on every path and for every status."""

    error: ErrorFields


class PromptTokensDetails(Shape):
    cached_tokens: int


class CompletionTokensDetails(Shape):
    """reasoning_tokens: of thoughts, with the marks around them. The others are those of `prediction`: which came where
    they were expected, and which did not."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Answer(Shape):
    id: str
    created: int
    model: str
    system_fingerprint: str | None


FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class TopLogprob(Shape):
    token: str
    logprob: float = Field(le=0)
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    content: list[ChatLogprob]


class CalledFunction(Shape):
    name: str
    arguments: str


class ToolCall(Shape):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Shape):
    """content is null where there is nothing but calls; the two names of reasoning hold the same."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class PromptLogprob(Shape):
    """rank is the token's among all, 1 the likeliest."""

    logprob: float = Field(le=0)
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id, the token itself first; null for the first token


class ChatChoice(Shape):
    index: int
    message: AssistantMessage
    token_ids: list[int] | None = None
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletion(Answer):
    object: Literal["chat.completion"]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(Shape):
    name: str | None = None
    arguments: str


class ToolCallDelta(Shape):
    """id, type and name come once, before the arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(Shape):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Shape):
    index: int
    delta: ChatDelta
    token_ids: list[int] | None = None
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatCompletionChunk(Answer):
    """One event of a streamed answer. usage is there only if asked for, and not null only in the last chunk."""

    object: Literal["chat.completion.chunk"]
    prompt_token_ids: list[int] | None = None
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionLogprobs(Shape):
    """null for the first token of a prompt that is echoed."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Shape):
    index: int
    text: str
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class Completion(Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(Shape):
    index: int
    text: str
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class CompletionChunk(Answer):
    """One event of a streamed answer. usage is there only if asked for, and not null only in the last chunk."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


class AnyCompletion(RootModel[ChatCompletion | Completion]):
    """What a call's own route would have answered."""


class AnyChunk(RootModel[ChatCompletionChunk | CompletionChunk]):
    """An event as the call's own route would have sent it."""


class Cancelled(Shape):
    """The request has ended, if it had not before."""

    id: str
    object: Literal["stream"]
    cancelled: Literal[True]


class Model(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None


class ModelList(Shape):
    object: Literal["list"]
    data: list[Model]


class Tokens(Shape):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Text(Shape):
    prompt: str


class Status(Shape):
    status: str


class Worker(Shape):
    variant: str
    device: str
    max_model_len: int
    num_blocks: int
    block_size: int


class Version(Shape):
    version: str
    protocol: int
    model: str
    system_fingerprint: str | None
    alive: dict[str, int]
    workers: list[Worker]


class Index(Shape):
    model: str
    status: str
    links: list[str]
