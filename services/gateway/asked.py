"""What a request asks for in numbers: choices, temperature, log-probabilities of its answer and its prompt. *Pure.*"""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.errors import BadRequest
from services.gateway.openai_schema import ChatCompletionRequest, CompletionRequest

GREEDY_BELOW = 1e-5
LEAST_TEMPERATURE = 0.01
MAX_PROMPT_LOGPROBS = 1 << 18  # of a call's prompts; alternatives count

AnyRequest = ChatCompletionRequest | CompletionRequest


def num_choices(request: AnyRequest) -> int:
    """To generate; not all may be shown."""
    return (isinstance(request, CompletionRequest) and request.best_of) or request.n or 1


def is_selected(request: AnyRequest) -> bool:
    return num_choices(request) > (request.n or 1)


def temperature(request: AnyRequest) -> float:
    if request.temperature is None:
        return 1.0
    return 0.0 if request.temperature < GREEDY_BELOW else max(request.temperature, LEAST_TEMPERATURE)


def num_logprobs(request: AnyRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return 0 if request.logprobs is None and is_selected(request) else request.logprobs
    return (request.top_logprobs or 0) if request.logprobs else None


def num_prompt_logprobs(request: AnyRequest) -> int | None:
    """For an echo, which has what the drawn tokens have, or by name."""
    echoed = request.logprobs if isinstance(request, CompletionRequest) and request.echo else None
    return max((n for n in (echoed, request.prompt_logprobs) if n is not None), default=None)


def check_prompt_logprobs(request: AnyRequest, prompts: Sequence[Sequence[int]]) -> None:
    """Each is a row of logits, and all of an answer that is not streamed is held until its end."""
    num = num_prompt_logprobs(request)
    if num is None:
        return
    param = "prompt_logprobs" if request.prompt_logprobs is not None else "logprobs"
    total = num_choices(request) * sum(map(len, prompts)) * (num + 1)
    if total > MAX_PROMPT_LOGPROBS:
        raise BadRequest(
            f"{param} asks for {total} log-probabilities of prompts, over all choices; at most {MAX_PROMPT_LOGPROBS}",
            param=param,
        )
