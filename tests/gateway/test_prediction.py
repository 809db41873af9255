from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.errors import BadRequest
from services.gateway.openai_schema import ChatCompletionRequest
from services.gateway.prediction import WINDOW, PredictionMatch, predicted_ids
from services.gateway.request_parsing import parse
from shared.protocol import MAX_PREDICTION_TOKENS
from tests.gateway.test_preparation import TOKENIZER

MESSAGES = [{"role": "user", "content": "x"}]


def counts(prediction: bytes, answer: bytes) -> tuple[int, int]:
    match = PredictionMatch(list(prediction))
    for token_id in answer:
        match.push(token_id)
    return match.num_accepted, match.num_rejected


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        (b"", b"abc", (0, 0)),
        (b"abc", b"", (0, 3)),
        (b"abc", b"abc", (3, 0)),
        (b"abc", b"abcdef", (3, 0)),
        (b"abcdef", b"abc", (3, 3)),
        (b"abcdefgh", b"abXefgh", (4, 4)),  # goes on behind `ef`
        (b"abcdefgh", b"Sure: abcdefgh", (8, 0)),
        (b"abcdab", b"abcdcdab", (6, 0)),
        (b"abcdef", b"efabcd", (0, 6)),  # never back
        (b"abc", b"xyz", (0, 3)),
    ],
)
def test_how_much_of_a_prediction_came_true(prediction: bytes, answer: bytes, expected: tuple[int, int]) -> None:
    assert counts(prediction, answer) == expected


@given(st.binary(max_size=30), st.binary(max_size=30))
def test_no_token_counts_twice(prediction: bytes, answer: bytes) -> None:
    accepted, rejected = counts(prediction, answer)
    assert accepted + rejected == len(prediction) and 0 <= accepted <= len(answer)


def test_a_token_is_looked_for_in_a_bounded_part_of_a_prediction() -> None:
    """And a prediction is not read before it is followed: a gateway does this between everything else."""
    read = []

    class Watched(list[int]):
        def __getitem__(self, at: Any) -> Any:
            read.append(at)
            return super().__getitem__(at)

    match = PredictionMatch(Watched(range(100_000)))
    for token_id in (0, 1, 70_000, 70_001, 2, 60, 61, 62):
        match.push(token_id)
    assert match.num_accepted == 4 and len(read) < 8 * 2 * WINDOW


@pytest.mark.parametrize("content", ["ab", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]])
def test_a_prediction_becomes_the_tokens_of_its_text(content: object) -> None:
    request = parse(
        ChatCompletionRequest, {"messages": MESSAGES, "prediction": {"type": "content", "content": content}}
    )
    assert predicted_ids(request.prediction, TOKENIZER, 100) == TOKENIZER.encode("ab", add_special_tokens=False)
    assert predicted_ids(None, TOKENIZER, 100) == ()


@pytest.mark.parametrize("size", [9, 1000, 1_000_000])
def test_of_one_longer_than_the_context_the_rest_is_left_out(size: int) -> None:
    """It is a hint. Nor is all of it made into tokens."""
    request = parse(
        ChatCompletionRequest, {"messages": MESSAGES, "prediction": {"type": "content", "content": "a b " * size}}
    )
    whole = TOKENIZER.encode("a b " * 9, add_special_tokens=False)
    assert predicted_ids(request.prediction, TOKENIZER, 8) == whole[:8]
    assert len(predicted_ids(request.prediction, TOKENIZER, 1 << 30)) <= MAX_PREDICTION_TOKENS


@pytest.mark.parametrize(
    "prediction",
    [{}, {"type": "content"}, {"type": "x", "content": "a"}, {"type": "content", "content": [{"type": "image"}]}],
)
def test_what_is_none_is_refused_by_name(prediction: object) -> None:
    with pytest.raises(BadRequest) as error:
        parse(ChatCompletionRequest, {"messages": MESSAGES, "prediction": prediction})
    assert (error.value.param or "").startswith("prediction")
