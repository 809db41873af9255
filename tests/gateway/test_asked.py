from __future__ import annotations

from typing import Any

import pytest

from services.gateway import asked
from services.gateway.errors import BadRequest
from services.gateway.openai_schema import ChatCompletionRequest, CompletionRequest
from services.gateway.request_parsing import parse


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, {"prompt": "x"} | fields)


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse(ChatCompletionRequest, {"messages": [{"role": "user", "content": "x"}]} | fields)


@pytest.mark.parametrize(
    ("request_", "num"),
    [
        (completion(echo=True, logprobs=3), 3),
        (completion(echo=True, logprobs=0), 0),
        (completion(echo=True), None),
        (completion(logprobs=3), None),
        (completion(prompt_logprobs=0), 0),
        (completion(prompt_logprobs=2, echo=True, logprobs=5), 5),
        (completion(prompt_logprobs=7, echo=True, logprobs=5), 7),
        (completion(echo=True, best_of=2), None),
        (chat(prompt_logprobs=4, logprobs=True, top_logprobs=9), 4),
        (chat(logprobs=True), None),
    ],
)
def test_whose_alternatives_a_prompt_s_tokens_have(request_: asked.AnyRequest, num: int | None) -> None:
    assert asked.num_prompt_logprobs(request_) == num


def test_there_is_a_bound_over_all_prompts_and_choices_of_a_call() -> None:
    prompts = [[0] * 2048] * 8
    asked.check_prompt_logprobs(completion(echo=True, logprobs=1, n=4), prompts)
    for request, param in [
        (completion(echo=True, logprobs=1, n=9), "logprobs"),
        (completion(echo=True, logprobs=17), "logprobs"),
        (completion(prompt_logprobs=20), "prompt_logprobs"),
    ]:
        with pytest.raises(BadRequest) as e:
            asked.check_prompt_logprobs(request, prompts)
        assert e.value.param == param and str(asked.MAX_PROMPT_LOGPROBS) in e.value.message
    asked.check_prompt_logprobs(completion(logprobs=20, n=16), prompts)
