"""The strict JSON reader: what it refuses, what it accepts, and that hostile bodies cost little."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway import json_reader
from services.gateway.errors import BadRequest
from tests.helpers import bounded_work

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(json_values, st.booleans())
def test_reads_what_python_writes(value: object, ascii_only: bool) -> None:
    assert json_reader.loads(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a":1} x', "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b'{"a":NaN}', "NaN is not a JSON number"),
        (b'{"a":Infinity}', "Infinity is not a JSON number"),
        (b'{"a":-Infinity}', "-Infinity is not a JSON number"),
        (b'{"a":1e999}', "too large"),
        (b'{"a":-1e999}', "too large"),
        (b'{"a":' + b"9" * 5000 + b"}", "too large"),
        (b'{"a":1,"a":2}', "the key a appears twice"),
        (b'{"b":{"a":1,"c":2,"a":1}}', "the key a appears twice"),
        (b'{"a":"\xff"}', "not valid UTF-8"),
        (b'{"a":"\xed\xa0\xbd"}', "not valid UTF-8"),  # a surrogate as raw bytes
        (b"[" * 65 + b"]" * 65, "deeper than 64"),
        (b'{"a":' * 200_000, "deeper than 64"),
        (b"[" * 200_000, "deeper than 64"),
    ],
)
def test_refuses(body: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as e:
        json_reader.loads(body)
    assert e.value.status == 400


@pytest.mark.parametrize("item", [b"[]", b"{}", b'{"a":1}'])
def test_refuses_more_lists_and_objects_than_memory_is_meant_for(item: bytes) -> None:
    most = json_reader.MAX_CONTAINERS - 1
    assert len(json_reader.loads(b"[" + b",".join([item] * most) + b"]")) == most
    with pytest.raises(BadRequest, match="more than 65536 lists and objects"):
        json_reader.loads(b"[" + b",".join([item] * (most + 1)) + b"]")


def test_accepts_the_greatest_depth_and_brackets_in_strings() -> None:
    json_reader.loads(b"[" * 64 + b"]" * 64)
    text = '[[{"\\"\\\\' * 50
    assert json_reader.loads(json.dumps({"a": text}).encode()) == {"a": text}
    siblings = [[1]] * 500
    assert json_reader.loads(json.dumps(siblings).encode()) == siblings


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (rb'{"messages":[{"role":"user","content":"x \ud83d y"}]}', "messages[0].content"),
        (rb'{"messages":[{"role":"user","content":"x \uD83D"}]}', "messages[0].content"),
        (rb'{"stop":["a","\udc00"]}', "stop[1]"),
        (rb'{"user":"\ud83d"}', "user"),
        (rb'{"cache_salt":"\udfff\ud83d"}', "cache_salt"),
        (rb'{"tools":[{"function":{"name":"\ud83d"}}]}', "tools[0].function.name"),
        (rb'{"logit_bias":{"\ud83d":1}}', "logit_bias"),
    ],
)
def test_names_the_field_with_an_unpaired_surrogate(body: bytes, path: str) -> None:
    """Case 6: the string could not be encoded later, deep in the tokenizer."""
    with pytest.raises(BadRequest) as e:
        json_reader.loads(body)
    assert e.value.param == path and path in e.value.message
    assert "\\ud" not in e.value.message.lower()


def test_accepts_a_paired_surrogate_and_an_escaped_backslash() -> None:
    assert json_reader.loads(rb'{"a":"\ud83e\udd8a"}') == {"a": "\U0001f98a"}
    assert json_reader.loads(rb'{"a":"\\ud83d"}') == {"a": "\\ud83d"}


@pytest.mark.parametrize(
    "body",
    [
        b'"' + b'\\"' * 500_000,  # an unterminated string of escaped quotes
        b"[" * 100 + b'"\\' * 500_000,
        b"[" + b"[]," * 300_000 + b"[]]",
        b'["' + b"[{" * 500_000 + b'"]',
    ],
)
def test_hostile_bodies_cost_linear_time(body: bytes) -> None:
    with bounded_work(3), contextlib.suppress(BadRequest):  # a quadratic scan takes minutes
        json_reader.loads(body)
