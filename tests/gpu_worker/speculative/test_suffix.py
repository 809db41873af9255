from __future__ import annotations

import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gpu_worker.speculative.proposer import KIND, Proposal
from services.gpu_worker.speculative.suffix import (
    CHANGED,
    COUNTED,
    FORESEEN,
    LEFT,
    MAX_LENGTH,
    NEW,
    SURE_CHANGE,
    SuffixProposer,
    expected_of_match,
)


def after(text: list[int] | bytes, most: int = 4) -> Proposal:
    proposer = SuffixProposer()
    for token_id in text:
        proposer.follow((token_id,))
    return proposer.propose(most)


def kinds_of(proposal: Proposal) -> list[int]:
    return [strength // KIND * KIND for strength in proposal.strengths]


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
    assert (got.ids, [s % KIND for s in got.strengths[:1]]) == (tuple(ids), [strength] if ids else [])


def test_a_copy_is_followed_to_its_end() -> None:
    original = random.Random(1).sample(range(10_000), 200)
    proposer = SuffixProposer()
    for token_id in original:
        proposer.follow((token_id,))
    for at, token_id in enumerate(original):
        if at:
            proposal = proposer.propose(8)
            assert [s % KIND for s in proposal.strengths] == [min(at + i, MAX_LENGTH) for i in range(8)]
            assert proposal.ids == tuple((original + original)[at : at + 8])
        proposer.follow((token_id,))


def test_how_a_token_came_is_told() -> None:
    """The first record is new, and what is equal in the second was foreseen there; its value, at which a match was
    left, is another in the third, too."""
    got = after(b"<name: A>\n<name: K>\n<name", 6)
    assert (got.ids, kinds_of(got)) == (tuple(b": K>\n<"), [FORESEEN] * 2 + [LEFT] + [FORESEEN] * 3)
    assert kinds_of(after(b"abcdefabc")) == [NEW] * 4


def test_a_change_that_repeats_is_proposed_and_what_followed_it_last() -> None:
    prompt = b"Anna (1) Paul (7) Lisa (3) Olga (5)."
    answer = b"Anna,1;Paul,7;Li"
    got = after(prompt + answer, 6)
    assert (got.ids, kinds_of(got)[2]) == (tuple(b"sa,7;L"), CHANGED)  # " " became "," twice
    once = after(prompt + b"Anna,1;Pa")
    assert once.ids == tuple(b"ul (")  # which is no rule yet
    broken = after(prompt + b"Anna,1;Paul,2;Lisa (3) Ol")
    assert broken.ids == tuple(b"ga (")  # nor any more


def test_numbers_count_up() -> None:
    """After a number that was one more than that before it, the next one, and what followed."""
    got = after(b"1. red\n2. green\n3. blue\n", 3)
    assert bytes(got.ids) == b"4. " and kinds_of(got)[0] == COUNTED and got.strengths[0] % KIND == 1
    got = after(b"a1z;a2y;a3x;a4w;a", 2)
    assert bytes(got.ids) == b"5w" and got.strengths[0] == COUNTED + 3
    assert bytes(after(b"a1z;a2y;a2x;a", 2).ids) == b"2x"  # which it no longer does


def test_a_list_that_is_copied_is_not_counted_on() -> None:
    """Which the first number tells that had been counted."""
    proposer = SuffixProposer()
    proposer.follow(b"1: A end\n2: K end\n3: D end\n4: T end\n|1: A end\n2: K end\n3")
    assert bytes(proposer.propose(9).ids) == b": D end\n4"


def test_counting_is_learnt_as_a_guess_and_goes_on_behind_it() -> None:
    proposer = SuffixProposer()
    proposer.follow(b"n: 1, is x;n: 2, is y;n: ")
    before = proposer._length
    assert proposer.follow(b"3")[0] == (COUNTED + 1, True)
    assert bytes(proposer.propose(5).ids) == b", is " and proposer._length == before + 1
    proposer.follow(b", is z;n: ")
    assert proposer.follow(b"3")[0] == (COUNTED + 2, False)
    assert bytes(proposer.propose(5).ids) == b", is "


def test_a_prediction_that_counts_is_expected_as_it_is() -> None:
    proposer = SuffixProposer()
    predicted = b"1. red\n2. green\n3. blue\n4. teal\n5. gold\n"
    proposer.follow(predicted)
    proposer.expect(len(predicted))
    assert bytes(proposer.propose(len(predicted)).ids) == predicted


def test_neighbours_by_chance_are_not_counted() -> None:
    """Where nothing spoke for what was expected."""
    proposer = SuffixProposer()
    proposer.follow(b"the cat sat on|the cat S")
    assert (proposer._length, proposer._text[proposer._source]) == (0, ord("a"))
    proposer.follow(b"b")
    assert proposer._kinds[-1] < COUNTED


def test_counts_of_any_length_have_strengths() -> None:
    text = [token for n in range(700) for token in (2000, 2001, 2002, n)]
    got = after([*text, 2000, 2001, 2002], 1)
    assert got.ids == (700,) and COUNTED + MAX_LENGTH <= got.strengths[0] < COUNTED + KIND


@given(st.lists(st.integers(0, 5), max_size=60))
def test_no_token_is_proposed_beyond_those_that_were_seen(text: list[int]) -> None:
    """It need not be one."""
    assert max(after(text).ids, default=-1) <= max(text, default=-1)


def test_a_change_goes_on_where_it_led_before() -> None:
    """Though what was drawn behind the value is found nowhere with the value before it."""
    proposer = SuffixProposer()
    proposer.follow(b"Anna (1) Paul (7) Lisa (3) Olga (5).Anna,1;Paul,7;")
    assert proposer.follow(b"Lisa,")[-1] == (CHANGED + 2, True)
    assert proposer.propose(1).ids == (ord("7"),)


def test_places_that_were_foreseen_are_trusted_more_before_anything_is_known() -> None:
    for length in range(1, MAX_LENGTH):
        left, new, foreseen = (expected_of_match(kind + length) for kind in (LEFT, NEW, FORESEEN))
        assert new < foreseen and left < foreseen and expected_of_match(FORESEEN + length + 1) > foreseen
    assert expected_of_match(CHANGED + 2) > 0.5


@given(st.lists(st.integers(0, 3).map(lambda n: 2 * n), max_size=60))
def test_a_match_is_one(text: list[int]) -> None:
    """Whatever is proposed with a strength followed so many equal tokens somewhere; but for what is so by a change."""
    proposer, is_changed = SuffixProposer(), False
    for token_id in text:
        proposer.follow((token_id,))
        is_changed = is_changed or any(times >= SURE_CHANGE for _, times in proposer._changes.values())
    got = proposer.propose(1)
    if got.ids and got.strengths[0] % KIND and not is_changed:
        strength = got.strengths[0] % KIND
        tail = text[-strength:]
        ends = [e for e in range(strength, len(text)) if text[e - strength : e] == tail]
        assert got.ids[0] in {text[e] for e in ends}


def test_memory_grows_by_a_constant_a_token() -> None:
    proposer = SuffixProposer()
    rng = random.Random(2)
    for _ in range(20_000):
        proposer.follow((rng.randrange(50_000),))
    tables = (*proposer._ends, proposer._changes)
    num_bytes = sum(sys.getsizeof(table) + sum(map(sys.getsizeof, table)) for table in tables)
    assert num_bytes / 20_000 < 600
