from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import suffix_table
from shared.suffix_table import (
    ABSENT,
    COUNT_BITS,
    FRAME_LENGTH,
    HEAD_BITS,
    LENGTHS,
    MAX_COUNT,
    MAX_STRENGTH,
    MAX_TOKEN_ID,
    MIN_COUNT,
    MIN_LINES,
    NEEDED,
    NUM_LEVELS,
    SETTLED,
    WAYS,
    Place,
    SuffixTable,
    level_of,
    place_of,
)
from tests.suffix_words import behind_value, framed_word_of, word_of

Entry = tuple[list[int], int, int]  # context, the token that follows it, count


def table_of(*entries: Entry) -> SuffixTable:
    table = SuffixTable()
    table.put(word_of(*entry) for entry in entries)
    return table


def test_what_follows_the_longest_known_context() -> None:
    text = list(range(10, 18))
    table = table_of((text[-2:], 1, 9), (text[-4:], 2, 2), (text, 3, 5))
    assert table.best(place_of(text)) == (3, MAX_STRENGTH - NUM_LEVELS + level_of(5))
    assert table.best(place_of([0, *text[1:]])) == (2, 2 * NUM_LEVELS + 1)
    assert table.best(place_of([0, 0, 0, 0, 0, 0, *text[-2:]])) == (1, NUM_LEVELS)
    assert table.best(place_of([*text, 0]))[1] == 0


def test_what_was_seen_once_is_not_used_and_takes_no_room() -> None:
    table = table_of(([1, 2], 3, MIN_COUNT - 1))
    assert table.best(place_of([1, 2]))[1] == 0 and table.num_entries == 0


def test_what_is_not_sure_any_more_replaces_what_was() -> None:
    table = table_of(([1, 2], 3, 9), ([1, 2], 4, 1))
    assert table.best(place_of([1, 2]))[1] == 0 and table.num_entries == 1


def test_a_place_knows_the_last_tokens() -> None:
    ids = [random.Random(1).randrange(1 << 32) for _ in range(20)]
    assert place_of(ids) == place_of(ids[-LENGTHS[0] :]) == place_of(ids[:-1]).given(ids[-1])


@given(st.integers(0, 15))
def test_levels_rise_with_counts(count: int) -> None:
    assert level_of(count) == sum(count >= least for least in (2, 4, 8))


entries = st.lists(
    st.tuples(st.lists(st.integers(0, 5), min_size=8, max_size=8), st.integers(0, MAX_TOKEN_ID), st.integers(2, 15)),
    max_size=300,
)


@given(entries, st.sampled_from([2, 4, 8]))
def test_a_table_that_has_room_is_a_dictionary(found: list[Entry], length: int) -> None:
    found = [(context[-length:], token_id, count) for context, token_id, count in found]
    table, want = table_of(*found), {tuple(context): (token_id, count) for context, token_id, count in found}
    assert table.num_entries == len(want)
    rank = MAX_STRENGTH - NUM_LEVELS * (1 + NEEDED.index(length))
    for context, (token_id, count) in want.items():
        assert table.best(place_of(context)) == (token_id, rank + level_of(count))


def numbered(number: int, count: int = 2) -> Entry:
    return [number // 1000, number % 1000], number % MAX_TOKEN_ID, count


def test_it_grows_and_keeps_nearly_all_until_it_is_as_large_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_table, "MAX_LINES", 8 * MIN_LINES)
    table = SuffixTable()
    sizes = set()
    for number in range(4 * MIN_LINES * WAYS):
        table.put([word_of(*numbered(number))])
        sizes.add(table.num_bytes)
    assert sorted(sizes) == [32 * MIN_LINES << n for n in range(4)]
    known = [number for number in range(4 * MIN_LINES * WAYS) if table.best(place_of(numbered(number)[0]))[1]]
    assert len(known) > 0.9 * 4 * MIN_LINES * WAYS
    for number in range(10_000, 20_000):
        table.put([word_of(*numbered(number))])
    assert table.num_bytes == 256 * MIN_LINES and table.num_entries <= 8 * MIN_LINES * WAYS


def test_in_a_full_line_the_least_sure_gives_way_after_as_many_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_table, "MAX_LINES", MIN_LINES)
    in_line = [n for n in range(4000) if word_of(*numbered(n)) >> HEAD_BITS & MIN_LINES - 1 == 0]
    table = table_of(*(numbered(n, 9) for n in in_line[: WAYS - 1]), numbered(in_line[WAYS - 1], 3))
    for number, known in ((WAYS, False), (WAYS + 1, False), (WAYS + 2, True)):
        table.put([word_of(*numbered(in_line[number]))])
        assert bool(table.best(place_of(numbered(in_line[number])[0]))[1]) is known
    assert not table.best(place_of(numbered(in_line[WAYS - 1])[0]))[1]
    assert all(table.best(place_of(numbered(n)[0]))[1] for n in in_line[: WAYS - 1])


@given(st.lists(st.integers(0, (1 << 64) - 1), max_size=500))
def test_whatever_words_come_every_answer_is_a_token_with_a_strength(words: list[int]) -> None:
    table = SuffixTable()
    table.put(words)
    for word in words:
        token_id, strength = table.best(Place(word, word, word % (SETTLED + 1)))
        assert 0 <= token_id <= MAX_TOKEN_ID and 0 <= strength <= MAX_STRENGTH
    assert table.num_entries <= len(table.words)
    assert sum(1 for w in set(table.words) if w & MAX_COUNT) >= table.num_entries


@pytest.mark.parametrize(
    ("length", "make"), [(2, word_of), (4, word_of), (8, word_of), (FRAME_LENGTH + 1, framed_word_of)]
)
def test_contexts_that_differ_in_one_token_are_spread_over_all_lines(
    length: int, make: Callable[[list[int], int, int], int]
) -> None:
    """Whichever it is, and however many low bits they share: else a few lines would be full, and the others empty."""
    for at in range(length):
        for step in (1, 1 << 8, 1 << 12):
            words = {make([7] * at + [n * step] + [7] * (length - 1 - at), 1, 2) for n in range(256)}
            lines = Counter(word >> HEAD_BITS & MIN_LINES - 1 for word in words)
            assert len(words) == 256 and max(lines.values()) < 20, (at, step)


FRAME = list(range(50, 50 + FRAME_LENGTH))


def test_behind_a_value_the_frame_tells_what_follows_whatever_the_value_was() -> None:
    table = table_of(([1, 2], 9, 15))
    table.put([framed_word_of([*FRAME, 7], 3, 2)])
    for value in ([], [1], [1, 2, 3], [1] * 9):
        place = place_of(FRAME)
        for token_id in [*value, 7]:
            place = place.surprised(token_id)
        assert table.best(place) == (3, NUM_LEVELS + 1)
    assert table.best(place_of([*FRAME, 7]))[1] == 0, "in a prompt nothing is foreseen or not"
    assert table.best(behind_value([0, *FRAME[1:], 7]))[1] == 0
    assert table.best(behind_value([*FRAME, 8]))[1] == 0


def test_a_frame_whose_last_token_came_twice_is_not_one_behind_a_value() -> None:
    table = SuffixTable()
    table.put([framed_word_of([*FRAME, FRAME[-1]], 3, 2)])
    place = place_of([0, *FRAME[:-1]]).surprised(1).foreseen(FRAME[-1])
    assert place.frame == place_of(FRAME).frame and table.best(place)[1] == 0


def test_the_frame_has_what_was_foreseen_alone() -> None:
    place = place_of([0, *FRAME]).surprised(4).surprised(5)
    assert place.frame == place_of(FRAME).frame and place.num_foreseen == 0
    for number, token_id in enumerate(FRAME[:SETTLED], start=1):
        assert [*place.hashes()][NEEDED.index(1)] != ABSENT
        place = place.foreseen(token_id)
        assert place.num_foreseen == min(number, SETTLED)
    assert [*place.hashes()][NEEDED.index(1)] == ABSENT, "the last tokens tell as much"
    assert place.frame == place_of([*FRAME, *FRAME[:SETTLED]]).frame


def test_a_word_says_what_follows() -> None:
    word = word_of([1, 2], 77, 5)
    assert (word >> COUNT_BITS & MAX_TOKEN_ID, word & MAX_COUNT) == (77, 5) and word < 1 << 64
