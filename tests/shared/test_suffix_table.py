from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import suffix_table
from shared.suffix_table import (
    COUNT_BITS,
    HEAD_BITS,
    LENGTHS,
    MAX_COUNT,
    MAX_STRENGTH,
    MAX_TOKEN_ID,
    MIN_COUNT,
    MIN_LINES,
    NUM_LEVELS,
    WAYS,
    SuffixTable,
    after,
    level_of,
    window_of,
)
from tests.suffix_words import word_of

Entry = tuple[list[int], int, int]  # context, the token that follows it, count


def table_of(*entries: Entry) -> SuffixTable:
    table = SuffixTable()
    table.put(word_of(*entry) for entry in entries)
    return table


def test_what_follows_the_longest_known_context() -> None:
    text = list(range(10, 18))
    table = table_of((text[-2:], 1, 9), (text[-4:], 2, 2), (text, 3, 5))
    assert table.best(window_of(text)) == (3, MAX_STRENGTH - NUM_LEVELS + level_of(5))
    assert table.best(window_of([0, *text[1:]])) == (2, NUM_LEVELS + 1)
    assert table.best(window_of([0, 0, 0, 0, 0, 0, *text[-2:]])) == (1, NUM_LEVELS)
    assert table.best(window_of([*text, 0]))[1] == 0


def test_what_was_seen_once_is_not_used_and_takes_no_room() -> None:
    table = table_of(([1, 2], 3, MIN_COUNT - 1))
    assert table.best(window_of([1, 2]))[1] == 0 and table.num_entries == 0


def test_what_is_not_sure_any_more_replaces_what_was() -> None:
    table = table_of(([1, 2], 3, 9), ([1, 2], 4, 1))
    assert table.best(window_of([1, 2]))[1] == 0 and table.num_entries == 1


def test_a_window_has_the_last_tokens() -> None:
    ids = [random.Random(1).randrange(1 << 32) for _ in range(20)]
    assert window_of(ids) == window_of(ids[-LENGTHS[0] :]) == after(window_of(ids[:-1]), ids[-1])


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
    rank = NUM_LEVELS * (len(LENGTHS) - 1 - LENGTHS.index(length))
    for context, (token_id, count) in want.items():
        assert table.best(window_of(context)) == (token_id, rank + level_of(count))


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
    known = [number for number in range(4 * MIN_LINES * WAYS) if table.best(window_of(numbered(number)[0]))[1]]
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
        assert bool(table.best(window_of(numbered(in_line[number])[0]))[1]) is known
    assert not table.best(window_of(numbered(in_line[WAYS - 1])[0]))[1]
    assert all(table.best(window_of(numbered(n)[0]))[1] for n in in_line[: WAYS - 1])


@given(st.lists(st.integers(0, (1 << 64) - 1), max_size=500))
def test_whatever_words_come_every_answer_is_a_token_with_a_strength(words: list[int]) -> None:
    table = SuffixTable()
    table.put(words)
    for word in words:
        token_id, strength = table.best(word)
        assert 0 <= token_id <= MAX_TOKEN_ID and 0 <= strength <= MAX_STRENGTH
    assert table.num_entries <= len(table.words)
    assert sum(1 for w in set(table.words) if w & MAX_COUNT) >= table.num_entries


def test_a_word_says_what_follows() -> None:
    word = word_of([1, 2], 77, 5)
    assert (word >> COUNT_BITS & MAX_TOKEN_ID, word & MAX_COUNT) == (77, 5) and word < 1 << 64
