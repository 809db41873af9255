"""The pieces of an echo are the echo, whatever the prompt's tokens are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.echo import echo_pieces
from tests.gateway.tiny_tokenizers import tiny_tokenizer

PIECES = [b"a", b" b", "é".encode(), b"\xf0\x9f", b"\xa6", b"\x8a", b"\xff", b"", b" "]
PLAIN = tiny_tokenizer(PIECES, ["<s>", "<e>"])
WITH_BOS = tiny_tokenizer(PIECES, ["<s>", "<e>"], bos="<s>")
BOS = len(PIECES)


@given(st.lists(st.integers(0, BOS + 1), min_size=1, max_size=12))
def test_joined_they_are_the_echo(ids: list[int]) -> None:
    for tokenizer in (PLAIN, WITH_BOS):
        pieces = echo_pieces(tokenizer, ids)
        assert len(pieces) == len(ids) and "".join(pieces) == tokenizer.echo_text(ids)


@pytest.mark.parametrize(
    ("ids", "pieces"),
    [
        ([BOS, 0, 1], ["", "a", " b"]),
        ([0, BOS], ["a", "<s>"]),
        ([3, 4, 5, 0], ["", "", "🦊", "a"]),
        ([0, 3], ["a", "\ufffd"]),
    ],
)
def test_a_bos_that_was_added_is_not_shown_and_a_character_is_its_last_token_s(
    ids: list[int], pieces: list[str]
) -> None:
    assert echo_pieces(WITH_BOS, ids) == pieces
