"""Entries of a suffix table, made by hand."""

from __future__ import annotations

from shared.suffix_table import COUNT_BITS, FRAME_LENGTH, HEAD_BITS, LENGTHS, Place, place_of

KINDS = dict(zip(LENGTHS, (0, 1, 3), strict=True))  # in the order of hashes, by length
FRAME_KIND = 2


def word_of(context: list[int], token_id: int, count: int) -> int:
    """That this token follows a context of 2, 4 or 8 tokens."""
    return _word(place_of(context), KINDS[len(context)], token_id, count)


def framed_word_of(context: list[int], token_id: int, count: int) -> int:
    """That it follows the last token of a value, behind the others, which were foreseen."""
    return _word(behind_value(context), FRAME_KIND, token_id, count)


def behind_value(context: list[int]) -> Place:
    *frame, last = context
    assert len(frame) == FRAME_LENGTH
    return place_of(frame).surprised(last)


def _word(place: Place, kind: int, token_id: int, count: int) -> int:
    hashed = [*place.hashes()][kind]
    return hashed << HEAD_BITS | token_id << COUNT_BITS | count
