from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gpu_worker.speculative.ngram import NgramProposer
from services.gpu_worker.speculative.proposer import Proposal


def after(text: list[int] | bytes, most: int = 4, shortest: int = 2, longest: int = 3) -> Proposal:
    proposer = NgramProposer(shortest, longest)
    for token_id in text:
        proposer.follow((token_id,))
    return proposer.propose(most)


@pytest.mark.parametrize(
    ("text", "ids", "strength"),
    [
        (b"", b"", 0),
        (b"abc", b"", 0),
        (b"abcdab", b"cdab", 2),
        (b"xabcdyabcezabc", b"ezab", 3),  # the latest place
        (b"abcdxbceabc", b"dxbc", 3),  # the longest match before the latest
        (b"abaxa", b"", 0),  # one token is too few
        (b"ababab", b"abab", 3),  # goes on as it repeats
    ],
)
def test_what_followed_the_last_tokens_before(text: bytes, ids: bytes, strength: int) -> None:
    got = after(text)
    assert (got.ids, got.strengths[:1]) == (tuple(ids), (strength,) if ids else ())


def test_no_more_than_asked_for() -> None:
    assert after(b"abcdab", most=1).ids == tuple(b"c")
    assert after(b"abcdab", most=0) == Proposal()


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 3), st.integers(0, 2))
def test_as_a_search_through_the_whole_text_finds_it(text: list[int], shortest: int, more: int) -> None:
    got = after(text, 3, shortest, shortest + more)
    for n in range(shortest + more, shortest - 1, -1):
        places = [end for end in range(n, len(text)) if text[end - n : end] == text[-n:]]
        if places:
            assert got.strengths[0] == n and got.ids[0] == text[places[-1]]
            return
    assert got == Proposal()
