"""Response objects: the official client's types accept them, and each choice ends exactly once."""

import json
import math
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from services.gateway import sse
from services.gateway.choice_stream import Delta, TokenLogprob
from services.gateway.responses import ChoiceResult, ResponseBuilder, usage
from tests.gateway.tiny_tokenizers import tiny_tokenizer

TOKENIZER = tiny_tokenizer(["Hi", " there", b"\xf0\x9f"], ["<e>"])
ENTRIES = (
    TokenLogprob(0, -0.25, ((0, -0.25), (1, -1.5)), 0),
    TokenLogprob(2, -math.inf, ((1, math.nan), (2, -math.inf)), 2),
)
DELTAS = [Delta("Hi", 1, ENTRIES[:1]), Delta("", 2, ENTRIES[1:]), Delta(" there", 4, finish_reason="stop")]


def builder(api: Any, **options: Any) -> ResponseBuilder:
    return ResponseBuilder(api, TOKENIZER, id="x-1", model="m", created=7, **options)


def strictly(value: Any) -> Any:
    """Through the wire, with a reader that refuses NaN and infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    return json.loads(sse.dump(value), parse_constant=refuse)


def test_chat_chunks() -> None:
    b = builder("chat", with_logprobs=True, include_usage=True)
    chunks = [strictly(c) for c in [b.opening(0), *(b.chunk(0, d) for d in DELTAS), b.usage_chunk(usage(3, 4, 2))]]
    for c in chunks:
        ChatCompletionChunk.model_validate(c)
        assert (c["object"], c["id"], c["created"], c["model"]) == ("chat.completion.chunk", "x-1", 7, "m")
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["delta"] for c in chunks[1:4]] == [{"content": "Hi"}, {}, {"content": " there"}]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:4]] == [None, None, None, "stop"]
    assert [c["usage"] for c in chunks[:4]] == [None] * 4
    assert chunks[4]["choices"] == []
    assert chunks[4]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def test_a_stream_that_may_call_does_not_begin_with_content() -> None:
    opening = builder("chat", may_call=True).opening(0)
    assert opening is not None and opening["choices"][0]["delta"] == {"role": "assistant"}


def test_without_include_usage_no_chunk_names_usage() -> None:
    for api in ("chat", "completions"):
        assert "usage" not in builder(api).chunk(0, DELTAS[0])


def test_completion_chunks_have_no_opening() -> None:
    b = builder("completions", system_fingerprint="fp")
    assert b.opening(0) is None
    c = strictly(b.chunk(2, DELTAS[2]))
    Completion.model_validate(c)
    assert c["object"] == "text_completion" and c["system_fingerprint"] == "fp"
    assert c["choices"] == [{"index": 2, "text": " there", "logprobs": None, "finish_reason": "stop"}]


def read(data: bytes) -> Any:
    return strictly(json.loads(data))


def put_together(builder: ResponseBuilder) -> ChoiceResult:
    result = ChoiceResult(builder)
    for delta in DELTAS:
        result.add([delta])
    return result


def test_whole_answers_equal_the_stream() -> None:
    b = builder("chat", with_logprobs=True)
    chat = read(b.whole([put_together(b), put_together(b)], usage(1, 8, 0)))
    ChatCompletion.model_validate(chat)
    assert [c["index"] for c in chat["choices"]] == [0, 1] and chat["usage"]["total_tokens"] == 9
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": "Hi there"}
    assert chat["choices"][1]["finish_reason"] == "stop"
    b = builder("completions")
    plain = read(b.whole([put_together(b)], usage(1, 4, 0)))
    Completion.model_validate(plain)
    assert plain["choices"] == [{"index": 0, "text": "Hi there", "logprobs": None, "finish_reason": "stop"}]


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("deltas", [DELTAS, [], DELTAS[2:]])
def test_log_probabilities_are_those_of_the_stream(api: str, deltas: list[Delta]) -> None:
    b = builder(api, with_logprobs=True)
    result = ChoiceResult(b)
    result.add(deltas)
    whole = read(b.whole([result], usage(1, 4, 0)))["choices"][0]["logprobs"]
    expected: dict[str, list[Any]] = {name: [] for name in whole}
    for delta in deltas:
        streamed = strictly(b.chunk(0, delta))["choices"][0]["logprobs"] or {}
        for name, values in streamed.items():
            expected[name] += values
    assert whole == expected
    names = ["content"] if api == "chat" else ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    assert list(whole) == names


def test_non_finite_numbers_log_probabilities_are_clamped() -> None:
    chat = strictly(builder("chat").chunk(0, Delta("", 2, ENTRIES)))["choices"][0]["logprobs"]["content"]
    assert chat[0] == {
        "token": "Hi",
        "logprob": -0.25,
        "bytes": [72, 105],
        "top_logprobs": [
            {"token": "Hi", "logprob": -0.25, "bytes": [72, 105]},
            {"token": " there", "logprob": -1.5, "bytes": list(b" there")},
        ],
    }
    assert chat[1]["token"] == "bytes:\\xf0\\x9f" and chat[1]["bytes"] == [0xF0, 0x9F]
    assert [chat[1]["logprob"], *(t["logprob"] for t in chat[1]["top_logprobs"])] == [-9999.0] * 3
    plain = strictly(builder("completions").chunk(0, Delta("", 2, ENTRIES)))["choices"][0]["logprobs"]
    assert plain == {
        "tokens": ["Hi", "bytes:\\xf0\\x9f"],
        "token_logprobs": [-0.25, -9999.0],
        "top_logprobs": [{"Hi": -0.25, " there": -1.5}, {" there": -9999.0, "bytes:\\xf0\\x9f": -9999.0}],
        "text_offset": [0, 2],
    }


@pytest.mark.parametrize("logprob", [1e-7, 0.0])
def test_a_log_probability_is_never_above_zero(logprob: float) -> None:
    entry = TokenLogprob(0, logprob, (), 0)
    assert builder("chat").chunk(0, Delta("Hi", 1, (entry,)))["choices"][0]["logprobs"]["content"][0]["logprob"] == 0.0


def test_choices_are_ranked_by_the_mean_of_their_tokens() -> None:
    results = [ChoiceResult(builder("completions")) for _ in range(2)]
    for result, logprobs in zip(results, ((-0.5, -0.5, -0.5), (-0.1, -1.0)), strict=True):
        result.add([Delta("x", 1, tuple(TokenLogprob(0, p, (), 0) for p in logprobs))])
    assert [round(result.mean_logprob, 3) for result in results] == [-0.5, -0.55]
