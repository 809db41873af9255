"""Characters come out when they are whole, and all pieces joined are the one-shot decoding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.detokenizer import Detokenizer
from tests.gateway.tiny_tokenizers import tiny_tokenizer

# Pieces of characters, whole ones, bytes that can never be UTF-8.
BYTES = st.binary(min_size=1, max_size=3) | st.sampled_from(
    [
        b"a",
        b" b",
        "é".encode(),
        "漢".encode(),
        "🦊".encode(),
        b"\xf0",
        b"\x9f",
        b"\xa6\x8a",
        b"\xe6\xbc",
        b"\xed\xa0",
        b"\xff",
    ]
)


@given(st.lists(BYTES, max_size=12))
def test_joined_pieces_are_the_one_shot_decoding(pieces: list[bytes]) -> None:
    tokenizer = tiny_tokenizer(pieces)
    detokenizer = Detokenizer(tokenizer)
    out = [detokenizer.push(i) for i in range(len(pieces))]
    whole = b"".join(pieces).decode("utf-8", "replace")
    assert "".join(out) + detokenizer.flush() == whole == tokenizer.decode(range(len(pieces)))
    for i in range(len(pieces)):  # and never more than is certain
        assert whole.startswith("".join(out[: i + 1]))


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"\xf0", b"\x9f", b"\xa6", b"\x8a", b" ok"], ["", "", "", "🦊", " ok"]),  # case 18
        ([b"\xe6\xbc", b"\xa2"], ["", "漢"]),
        ([b"\xf0\x9f", b"a"], ["", "\ufffda"]),
        ([b"\xff", b"a"], ["\ufffd", "a"]),
    ],
)
def test_holds_an_incomplete_character(pieces: list[bytes], expected: list[str]) -> None:
    detokenizer = Detokenizer(tiny_tokenizer(pieces))
    assert [detokenizer.push(i) for i in range(len(pieces))] == expected
    assert detokenizer.flush() == ""


def test_flush_shows_a_truncated_character_once() -> None:
    detokenizer = Detokenizer(tiny_tokenizer([b"\xf0", b"\x9f", b"\xa6"]))
    assert [detokenizer.push(i) for i in range(3)] == ["", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
