from __future__ import annotations

import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gpu_worker.speculative.proposer import Proposal
from services.gpu_worker.speculative.suffix import MAX_LENGTH, SuffixProposer


def after(text: list[int] | bytes, most: int = 4) -> Proposal:
    proposer = SuffixProposer()
    for token_id in text:
        proposer.follow((token_id,))
    return proposer.propose(most)


@pytest.mark.parametrize(
    ("text", "ids", "strength"),
    [
        (b"", b"", 0),
        (b"abcd", b"", 0),
        (b"abcda", b"bcda", 1),
        (b"abcdabc", b"dabc", 3),
        (b"1abcd2bcx3abc", b"d2bc", 3),  # the longest, though another is later
        (b"abx1aby2ab", b"y2ab", 2),  # of equal ones the latest
        (b"aaaa", b"aaaa", 3),  # goes on as it repeats
        (b"the old town here|the old TOWN", b"", 0),
        (b"the cat sat on|the cat S", b"at o", 0),  # one token differed, and the text goes on behind it
        (b"name:Bo,city:X,age:5;name:Al,", b"city", 1),  # a form with another value, not what came after "," last
    ],
)
def test_what_followed_the_longest_match(text: bytes, ids: bytes, strength: int) -> None:
    got = after(text)
    assert (got.ids, got.strengths[:1]) == (tuple(ids), (strength,) if ids else ())


def test_a_copy_is_followed_to_its_end() -> None:
    original = random.Random(1).sample(range(10_000), 200)
    proposer = SuffixProposer()
    for token_id in original:
        proposer.follow((token_id,))
    for at, token_id in enumerate(original):
        if at:
            proposal = proposer.propose(8)
            assert proposal.strengths == tuple(min(at + i, MAX_LENGTH) for i in range(8))
            assert proposal.ids == tuple((original + original)[at : at + 8])
        proposer.follow((token_id,))


@given(st.lists(st.integers(0, 3), max_size=60))
def test_a_match_is_one(text: list[int]) -> None:
    """Whatever is proposed with a strength followed so many equal tokens somewhere."""
    got = after(text, 1)
    if got.ids and got.strengths[0]:
        (strength,) = got.strengths
        tail = text[-strength:]
        ends = [e for e in range(strength, len(text)) if text[e - strength : e] == tail]
        assert got.ids[0] in {text[e] for e in ends}


def test_memory_grows_by_a_constant_a_token() -> None:
    proposer = SuffixProposer()
    rng = random.Random(2)
    for _ in range(20_000):
        proposer.follow((rng.randrange(50_000),))
    num_bytes = sum(sys.getsizeof(ends) + sum(map(sys.getsizeof, ends)) for ends in proposer._ends)
    assert num_bytes / 20_000 < 600
