"""Every field of every request: types, ranges, bounds, and the sentence a client gets."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from services.gateway.errors import BadRequest, error_body
from services.gateway.openai_schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    Request,
    TokenizeRequest,
)
from services.gateway.request_parsing import parse

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}
BASES: list[tuple[type[GenerationRequest], dict[str, Any]]] = [
    (ChatCompletionRequest, CHAT),
    (CompletionRequest, COMPLETION),
]
HUGE = "x" * 10_000_000


def refused(cls: type[Request], body: Any) -> BadRequest:
    with pytest.raises(BadRequest) as e:
        parse(cls, body)
    text = json.dumps(error_body(e.value))
    # S17: no class names, no library, no input
    assert not re.search(r"pydantic|Request|Error\b|Traceback|0x[0-9a-f]{6}|/work|xxxx", text.replace("Bad", ""))
    assert len(text) < 500
    return e.value


@pytest.mark.parametrize(("cls", "base"), BASES)
@pytest.mark.parametrize(
    ("field", "good"),
    [
        ("n", [1, 128, 2.0]),
        ("max_tokens", [1, 64.0, 1 << 24]),
        ("min_tokens", [0, 5]),
        ("temperature", [0, 1, 0.7, 2, 2.0]),
        ("top_p", [1, 0.1]),
        ("top_k", [-1, 0, 40]),
        ("min_p", [0, 1, 0.05]),
        ("seed", [0, -5, (1 << 63) - 1, -(1 << 63)]),
        ("frequency_penalty", [-2, 0.0, 2]),
        ("presence_penalty", [-2, 0.0, 2]),
        ("repetition_penalty", [1, 1.1, 0.5]),
        ("stop", ["x", ["x"], ["x"] * 16, [], "y" * 256]),
        ("stop_token_ids", [[], [1, 2.0]]),
        ("logit_bias", [{}, {"1": -100}, {"1": 5.5}]),
        ("stream", [True, False]),
        ("stream_options", [{}, {"include_usage": True}, {"include_usage": None, "new": 1}]),
        ("include_stop_str_in_output", [True]),
        ("ignore_eos", [True]),
        ("skip_special_tokens", [False]),
        ("user", ["", "someone"]),
        ("cache_salt", ["s"]),
        ("model", ["m"]),
    ],
)
def test_accepts(cls: type[GenerationRequest], base: dict[str, Any], field: str, good: list[Any]) -> None:
    default = getattr(parse(cls, base), field)
    assert getattr(parse(cls, base | {field: None}), field) == (None if field == "model" else default)
    for value in good:
        parse(cls, base | {field: value})


WRONG_INT = ["1", True, 1.5, [1], {}, 1e300, 1 << 64, -(1 << 64)]
WRONG_NUMBER = ["1", True, [1], {}, 1e300, -1e300, 10**400]
WRONG_BOOL = [0, 1, "true", [], {}]


@pytest.mark.parametrize(("cls", "base"), BASES)
@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("n", [*WRONG_INT, 0, -1]),
        ("max_tokens", [*WRONG_INT, -1, (1 << 24) + 1]),
        ("min_tokens", [*WRONG_INT, -5, 100_000_000]),
        ("temperature", [*WRONG_NUMBER, -0.1, 2.1]),
        ("top_p", [*WRONG_NUMBER, 0, -0.1, 1.1]),
        ("top_k", [*WRONG_INT, -2, 1 << 31]),
        ("min_p", [*WRONG_NUMBER, -0.1, 1.1]),
        ("seed", [*WRONG_INT, 1 << 63]),
        ("frequency_penalty", [*WRONG_NUMBER, -2.1, 2.1]),
        ("presence_penalty", [*WRONG_NUMBER, -2.1, 2.1]),
        ("repetition_penalty", [*WRONG_NUMBER, 0, -1, 1e-9]),
        ("stop", [1, True, {}, "", HUGE, ["x"] * 17, [""], ["y" * 257], [None], [["x"]]]),
        ("stop_token_ids", ["1", 1, ["1"], [True], [-1], [1.5], [1 << 40], [0] * 65]),
        ("logit_bias", [[], "x", {"1": "x"}, {"1": 1000}, {"1": True}, {"1": None}, {str(i): 1 for i in range(301)}]),
        ("stream", WRONG_BOOL),
        ("stream_options", [True, [], "x", {"include_usage": 1}]),
        ("include_stop_str_in_output", WRONG_BOOL),
        ("ignore_eos", WRONG_BOOL),
        ("skip_special_tokens", WRONG_BOOL),
        ("user", [1, HUGE, []]),
        ("cache_salt", [1, "", HUGE]),
        ("model", [1, HUGE, []]),
    ],
)
def test_refuses_naming_the_field(
    cls: type[GenerationRequest], base: dict[str, Any], field: str, bad: list[Any]
) -> None:
    for value in bad:
        error = refused(cls, base | {field: value})
        assert error.status == 400 and error.param is not None and error.param.startswith(field)
        assert error.message.startswith(error.param)


@pytest.mark.parametrize(
    ("cls", "body", "param", "message"),
    [
        (ChatCompletionRequest, {}, "messages", "messages is missing"),
        (ChatCompletionRequest, {"messages": []}, "messages", "messages must have at least 1 entry"),
        (ChatCompletionRequest, {"messages": "x"}, "messages", "messages must be a list"),
        (ChatCompletionRequest, {"messages": ["x"]}, "messages[0]", "messages[0] must be an object"),
        (ChatCompletionRequest, CHAT | {"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1"),
        (ChatCompletionRequest, CHAT | {"max_completion_tokens": 0}, "max_completion_tokens", None),
        (ChatCompletionRequest, CHAT | {"best_of": 2}, "best_of", None),
        (ChatCompletionRequest, CHAT | {"suffix": "x"}, "suffix", None),
        (ChatCompletionRequest, CHAT | {"logprobs": 5}, "logprobs", "logprobs must be true or false"),
        (ChatCompletionRequest, CHAT | {"top_logprobs": 21}, "top_logprobs", "top_logprobs must be at most 20"),
        (CompletionRequest, {"prompt": "x"} | {"max_completion_tokens": 3}, "max_completion_tokens", None),
        (CompletionRequest, {"prompt": "x"} | {"top_logprobs": 3}, "top_logprobs", None),
        (CompletionRequest, {"prompt": "x"} | {"tools": [{"type": "function"}]}, "tools", None),
        (CompletionRequest, {"prompt": "x"} | {"tool_choice": "auto"}, "tool_choice", None),
        (CompletionRequest, {"prompt": "x"} | {"reasoning_effort": "low"}, "reasoning_effort", None),
        (CompletionRequest, {}, "prompt", "prompt is missing"),
        (CompletionRequest, COMPLETION | {"logprobs": True}, "logprobs", "logprobs must be an integer"),
        (CompletionRequest, COMPLETION | {"logprobs": 21}, "logprobs", None),
        (CompletionRequest, COMPLETION | {"echo": 1}, "echo", None),
        (CompletionRequest, COMPLETION | {"best_of": 0}, "best_of", None),
        (
            CompletionRequest,
            COMPLETION | {"logit_bias": {"5": 1000}},
            "logit_bias.5",
            "logit_bias.5 must be at most 100.0",
        ),
        (TokenizeRequest, {"prompt": 1}, "prompt", None),
        (TokenizeRequest, {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens", None),
        (DetokenizeRequest, {}, "tokens", None),
        (DetokenizeRequest, {"tokens": "x"}, "tokens", None),
    ],
)
def test_refuses_with_this_sentence(cls: type[Request], body: Any, param: str, message: str | None) -> None:
    error = refused(cls, body)
    assert error.param == param
    if message is not None:
        assert error.message == message


@pytest.mark.parametrize("body", [None, [], "x", 1, True])
def test_the_body_must_be_an_object(body: Any) -> None:
    assert refused(ChatCompletionRequest, body).message == "the body must be a JSON object"


@pytest.mark.parametrize("cls", [ChatCompletionRequest, CompletionRequest, TokenizeRequest])
def test_what_is_not_supported_is_refused_by_name_and_neutral_values_are_not(cls: type[Request]) -> None:
    base: dict[str, Any] = CHAT | COMPLETION if cls is not TokenizeRequest else {"prompt": "x"}
    for field, neutral in cls.UNSUPPORTED.items():
        for value in (None, *neutral):
            parse(cls, base | {field: value})
        error = refused(cls, base | {field: {"something": "else"}})
        assert (error.param, error.code) == (field, "unsupported_parameter")


def test_neutral_means_the_same_type_too() -> None:
    assert refused(CompletionRequest, COMPLETION | {"use_beam_search": 0}).param == "use_beam_search"
    assert refused(CompletionRequest, COMPLETION | {"priority": False}).param == "priority"


def test_fields_that_ask_for_nothing_are_ignored() -> None:
    ignored = {
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "new_field": [1],
    }
    parse(ChatCompletionRequest, CHAT | ignored)
    parse(CompletionRequest, COMPLETION | ignored)


def test_a_field_name_in_an_error_is_cut_and_printable() -> None:
    key = "\x1b[31m" + "k" * 500
    error = refused(CompletionRequest, COMPLETION | {"logit_bias": {key: 1000}})
    assert "\x1b" not in error.message and len(error.message) < 150


def test_unknown_fields_are_refused_where_that_is_wanted() -> None:
    body = {"prompt": "x", "metadata": {"a": "b"}, "service_tier": "auto", "logit_bias": None, "suffix": None}
    assert parse(CompletionRequest, body | {"unknown": 1}).prompt == parse(CompletionRequest, body, strict=True).prompt
    with pytest.raises(BadRequest) as caught:
        parse(CompletionRequest, body | {"tempratur": 1}, strict=True)
    assert (caught.value.param, caught.value.code) == ("tempratur", "unknown_parameter")
