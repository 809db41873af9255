"""Events as bytes and the ids by which a client takes up a stream."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway import sse
from services.gateway.sse import Place


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=20) | st.none() | st.integers(), max_size=4))
def test_an_event_is_one_line_of_json(value: dict[str, object]) -> None:
    data = sse.event(value)
    assert data.startswith(b"data: ") and data.endswith(b"\n\n") and data.count(b"\n") == 2 and b"\r" not in data
    assert json.loads(data[6:]) == value == json.loads(sse.dump(value))


def test_event_with_an_id_and_the_end() -> None:
    assert sse.event({"a": "é"}, "r:1") == 'id: r:1\ndata: {"a":"é"}\n\n'.encode()
    assert sse.done() == b"data: [DONE]\n\n"
    assert sse.done(sse.end_id("r")) == b"id: r:end\ndata: [DONE]\n\n"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_does_not_have_are_an_error(value: float) -> None:
    with pytest.raises(ValueError):
        sse.dump({"a": value})


@given(st.lists(st.builds(Place, st.integers(0, 10**9 - 1), st.booleans()), min_size=1, max_size=128))
def test_event_ids_round_trip(places: list[Place]) -> None:
    assert sse.parse_event_id(sse.event_id("0a-B_9", places)) == ("0a-B_9", tuple(places))


def test_the_end_has_an_id_of_its_own() -> None:
    assert sse.parse_event_id(sse.end_id("r")) == ("r", None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "r",
        "r:",
        ":1",
        "r:--1",
        "r:-1-",
        "r:1,",
        "r:,1",
        "r:1e5",
        "r:1x",
        "r:9999999999",
        "r:١",
        "r:1\n",
        "a b:1",
        "r:" + "1," * 128 + "1",
    ],
)
def test_other_texts_are_no_event_ids(text: str) -> None:
    assert sse.parse_event_id(text) is None
