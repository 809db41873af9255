"""Entries of a suffix table, made by hand."""

from __future__ import annotations

from shared.suffix_table import COUNT_BITS, HEAD_BITS, LENGTHS, hashes, window_of


def word_of(context: list[int], token_id: int, count: int) -> int:
    """That this token follows a context of 2, 4 or 8 tokens."""
    hashed = hashes(window_of(context))[LENGTHS.index(len(context))]
    return hashed << HEAD_BITS | token_id << COUNT_BITS | count
