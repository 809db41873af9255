from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.cache_store.fleet_learner import FleetLearner
from shared import suffix_table
from shared.suffix_table import LENGTHS, MAX_STRENGTH, MAX_TOKEN_ID, MIN_LINES, NUM_LEVELS, SuffixTable, place_of


def text(seed: int, size: int = 60, vocabulary: int = 50_000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocabulary) for _ in range(size)]


def drafts(table: SuffixTable, ids: list[int], count: int) -> list[int]:
    place, found = place_of(ids), list[int]()
    while len(found) < count:
        token_id, strength = table.best(place)
        if not strength:
            break
        found.append(token_id)
        place = place.foreseen(token_id)
    return found


def test_what_was_seen_twice_is_known_to_its_end() -> None:
    learner, answer = FleetLearner(), text(1, 20)
    learner.learn(answer)
    assert drafts(learner, answer[:2], 99) == []
    learner.learn(answer)
    assert drafts(learner, answer[:2], 99) == answer[2:]
    assert learner.best(place_of(answer[:8])) == (answer[8], MAX_STRENGTH - NUM_LEVELS + 1)


def test_the_end_of_the_prompt_leads_to_the_first_token() -> None:
    learner, answer, prompt = FleetLearner(), text(1), text(2)
    for _ in range(2):
        learner.learn(answer, place_of(prompt), len(prompt))
    assert drafts(learner, prompt, 5) == answer[:5]


def test_before_the_first_tokens_nothing_is_made_up() -> None:
    """Else an answer without a prompt before it would be known after zeros."""
    learner = FleetLearner()
    for _ in range(2):
        learner.learn([5, 6, 7])
    assert learner.num_entries == 1 and learner.best(place_of([0, 5]))[1] == 0


def test_an_answer_in_pieces_is_learnt_as_a_whole() -> None:
    whole, pieces, answer = FleetLearner(), FleetLearner(), text(3)
    for _ in range(3):
        whole.learn(answer)
        place = pieces.learn(answer[:7])
        pieces.learn(answer[7:], place, 7)
    assert pieces.words == whole.words


def test_what_differs_from_case_to_case_is_not_guessed_and_what_follows_it_is() -> None:
    """A form with one field: three tokens of a value that is another each time."""
    learner, before, behind = FleetLearner(), text(4, 20), text(5, 20)
    for seed in range(30):
        learner.learn([*before, *text(100 + seed, 3), *behind])
    assert drafts(learner, before, 9) == []
    assert drafts(learner, [*text(999, 3), *behind[:2]], 99) == behind[2:]


def test_what_has_changed_is_learnt_anew() -> None:
    learner, old, new = FleetLearner(), text(6), text(7)
    for _ in range(50):
        learner.learn(old)
    changed = [*old[:30], *new]
    for _ in range(10):
        learner.learn(changed)
    assert drafts(learner, old[:10], 99) == changed[10:]


@pytest.mark.parametrize(("share", "is_known"), [(0.85, True), (0.5, False)])
def test_the_likelier_of_two_is_known_where_it_is_likely_enough(share: float, is_known: bool) -> None:
    learner, rng = FleetLearner(), random.Random(8)
    right = 0
    for _ in range(300):
        learner.learn([1, 2, 3 if rng.random() < share else 4])
        right += learner.best(place_of([1, 2])) > (3, 1) and learner.best(place_of([1, 2]))[0] == 3
    assert (right > 240) is is_known


def test_tokens_that_do_not_fit_are_left_out() -> None:
    learner = FleetLearner()
    for _ in range(2):
        learner.learn([1, 2, MAX_TOKEN_ID + 1, 3, 4])
    assert drafts(learner, [1, 2], 9) == []
    assert learner.best(place_of([2, MAX_TOKEN_ID + 1]))[0] == 3


def copy_of(learner: FleetLearner, most_lines: int = 1 << 20) -> SuffixTable:
    table, version = SuffixTable(), 0
    while version < learner.version:
        words, version = learner.changes_since(version, most_lines)
        table.put(words)
    return table


@settings(max_examples=40)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=10), st.booleans()), max_size=15), st.integers(1, 7))
def test_a_copy_that_follows_knows_what_the_learner_knows(answers: list[tuple[list[int], bool]], most: int) -> None:
    """Whenever it asks, and however little it is told at a time."""
    learner, table, version = FleetLearner(), SuffixTable(), 0
    for each in (learner, table):  # so that no line is full
        each._grow()
        each._grow()
    for answer, is_told in answers:
        learner.learn(answer)
        if is_told:
            words, version = learner.changes_since(version, most)
            table.put(words)
    while version < learner.version:
        words, version = learner.changes_since(version, most)
        table.put(words)
    for length in LENGTHS:
        for answer, _ in answers:
            for at in range(length, len(answer)):
                place = place_of(answer[at - length : at])
                assert table.best(place) == learner.best(place)


def test_a_copy_of_one_that_has_grown() -> None:
    learner = FleetLearner()
    for seed in range(40):
        learner.learn(text(seed))
        learner.learn(text(seed))
    assert learner.num_lines > MIN_LINES
    table = copy_of(learner, 50)
    known = [drafts(table, text(seed)[:8], 60) == text(seed)[8:] for seed in range(40)]
    assert sum(known) > 35


def test_what_is_told_is_bounded_and_the_rest_comes_next() -> None:
    learner = FleetLearner()
    for seed in range(40):
        learner.learn(text(seed))
        learner.learn(text(seed))
    words, version = learner.changes_since(0, 100)
    assert 0 < len(words) < 4 * (100 + 3 * 60) and 0 < version < learner.version


def test_what_is_seen_once_is_told_to_nobody() -> None:
    learner = FleetLearner()
    for seed in range(40):
        learner.learn(text(seed))
    words, version = learner.changes_since(0, 1 << 20)
    assert not words and version == learner.version


def test_what_is_told_again_and_again_is_no_news() -> None:
    learner, answer = FleetLearner(), text(9)
    for _ in range(20):
        learner.learn(answer)
    version = learner.version
    for _ in range(20):
        learner.learn(answer)
    assert not learner.changes_since(version, 1 << 20)[0]


def distinct(learner: FleetLearner, first: int, count: int, size: int) -> None:
    for number in range(first, first + count):
        learner.learn([number // 1000 + 2000, number % 1000, *range(3000, 3000 + size)])


def test_memory_is_bounded_however_many_answers_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what all have in common stays known."""
    monkeypatch.setattr(suffix_table, "MAX_LINES", 2 * MIN_LINES)
    learner, sizes = FleetLearner(), []
    for first in range(0, 20_000, 1000):
        distinct(learner, first, 1000, 5)
        sizes.append(learner.num_bytes)
    assert set(sizes) == {80 * MIN_LINES}
    assert drafts(learner, [3000, 3001], 9) == [3002, 3003, 3004]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_memory_is_bounded_under_a_million_different_answers() -> None:
    learner, sizes = FleetLearner(), []
    for first in range(0, 1_000_000, 100_000):
        distinct(learner, first, 100_000, 5)
        sizes.append(learner.num_bytes)
    assert len(set(sizes[2:])) == 1 and sizes[-1] == 40 * suffix_table.MAX_LINES
    assert drafts(learner, [3000, 3001], 9) == [3002, 3003, 3004]


def test_contexts_are_of_these_lengths() -> None:
    learner, answer = FleetLearner(), text(10, 9)
    learner.learn(answer)
    assert learner.num_entries == sum(len(answer) - length for length in LENGTHS)
