"""Characters come out when they are whole, and all pieces joined are the one-shot decoding."""

import itertools
from collections.abc import Iterator

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
        ([b"\xf0", b"\x9f", b"\xa6", b"\x8a", b" ok"], ["", "", "", "🦊", " ok"]),  # each byte a token
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


def splits(data: bytes) -> Iterator[list[bytes]]:
    """Every way to cut the bytes into tokens."""
    for cuts in itertools.product((False, True), repeat=len(data) - 1):
        edges = [0, *(i for i, cut in enumerate(cuts, 1) if cut), len(data)]
        yield [data[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("text", ["a🦊b", "é漢", "🦊🙂", "\U0010ffff"])
def test_utf8_stream_every_way_to_cut_characters_into_tokens_and_to_end_inside_one(text: str) -> None:
    for pieces in splits(text.encode()):
        tokenizer = tiny_tokenizer(pieces)
        for end in range(len(pieces) + 1):
            detokenizer = Detokenizer(tokenizer)
            shown = [detokenizer.push(i) for i in range(end)]
            assert "\ufffd" not in "".join(shown), "every byte so far may still become a character"
            data = b"".join(pieces[:end])
            assert text.startswith("".join(shown))
            assert "".join(shown) + detokenizer.flush() == data.decode("utf-8", "replace")
