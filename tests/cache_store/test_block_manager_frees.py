"""Releases, eviction, and blocks that the worker may take by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cache_store.numbered import Numbered

PROMPT = list(range(100, 110))  # two whole blocks of 4 and two tokens


# --- release and eviction --------------------------------------------------------------------------------------------


def test_a_release_is_idempotent_and_names_one_epoch(calls: Numbered) -> None:
    calls.ensure("a", PROMPT, epoch=2)
    calls.release("a", epoch=3)
    assert calls.table("a", 2) != ()
    calls.release("a", epoch=2)
    calls.release("a", epoch=2)
    assert calls.num_free == 16


def test_a_shared_block_stays_with_its_other_holders(calls: Numbered) -> None:
    calls.ensure("a", PROMPT)
    calls.seal_all("a", PROMPT)
    shared = calls.ensure("b", PROMPT).block_ids[:2]
    calls.release("a")
    assert [calls.manager.pool.num_refs(b) for b in shared] == [1, 1]
    assert calls.num_free == 13


def test_unsealed_blocks_are_given_out_before_any_hit_is_lost(calls: Numbered) -> None:
    calls.compute("x", PROMPT)
    calls.ensure("a", list(range(48)), use_cached=False)
    assert calls.match(PROMPT) == 8 and calls.manager.counts.evictions == 0
    calls.ensure("b", list(range(7)), use_cached=False)
    assert calls.manager.counts.evictions == 1


def test_the_tail_of_a_prefix_is_evicted_before_its_beginning(make_calls: Callable[[int], Numbered]) -> None:
    calls = make_calls(4)
    calls.compute("x", list(range(16))[:14])
    calls.ensure("a", [50, 51, 52, 53, 54])
    assert calls.match(list(range(16))) == 8


def test_the_longest_unused_prefix_is_evicted_first(make_calls: Callable[[int], Numbered]) -> None:
    calls = make_calls(4)
    calls.compute("x", [1, 2, 3, 4])
    calls.compute("y", [5, 6, 7, 8])
    calls.ensure("x2", [1, 2, 3, 4, 9])
    calls.release("x2")
    calls.ensure("a", [9] * 11)
    assert (calls.match([1, 2, 3, 4, 9]), calls.match([5, 6, 7, 8, 9])) == (4, 0)


def test_an_evicted_block_is_not_found_any_more(make_calls: Callable[[int], Numbered]) -> None:
    calls = make_calls(3)
    calls.compute("x", PROMPT)
    calls.ensure("a", [1] * 11, use_cached=False)
    assert calls.match(PROMPT) == 0 and len(calls.manager.index) == 0


# --- the spare grant -------------------------------------------------------------------------------------------------


def test_a_grant_is_topped_up_and_never_cut(calls: Numbered) -> None:
    spares = calls.grant(3)
    assert len(set(spares)) == 3 and calls.num_free == 13
    assert calls.grant(5)[:3] == spares
    assert len(calls.grant(2)) == 5


def test_a_grant_gets_what_is_there(make_calls: Callable[[int], Numbered]) -> None:
    calls = make_calls(3)
    assert len(calls.grant(8)) == 3 and calls.num_free == 0
    assert calls.ensure("a", [1]).status == "full"


def test_a_repeated_or_late_grant_allocates_nothing(calls: Numbered) -> None:
    calls.ensure("a", [1])
    spare, *rest = calls.grant(3)
    at = calls.last
    calls.take("a", 1, spare)
    assert calls.grant(3, at=at) == calls.grant(9, at=at - 1) == tuple(rest)
    assert len(calls.grant(3)) == 3


def test_a_taken_block_becomes_the_sequences_next(calls: Numbered) -> None:
    table = calls.ensure("a", PROMPT).block_ids
    spare, other = calls.grant(2)
    assert calls.take("a", 3, spare) and calls.take("a", 3, spare)
    assert calls.table("a") == (*table, spare)
    assert calls.grant(0) == (other,)
    calls.seal_all("a", list(range(16)))
    calls.release("a")
    assert calls.num_free == 15


def test_a_take_is_refused_where_the_block_is_not_spare_or_not_the_next(calls: Numbered) -> None:
    table = calls.ensure("a", PROMPT).block_ids
    other = calls.ensure("b", [1]).block_ids[0]
    spare, another = calls.grant(2)
    assert not calls.take("a", 3, other), "another's"
    assert not calls.take("a", 4, spare), "a gap"
    assert not calls.take("a", 2, spare), "there is one already"
    assert not calls.take("a", -1, spare)
    assert not calls.take("a", 3, spare, epoch=2)
    assert not calls.take("c", 0, spare)
    assert calls.table("a") == table and set(calls.grant(0)) == {spare, another}
    assert calls.manager.counts.refused_takes == 6


def test_a_late_take_does_not_take_a_block_again(calls: Numbered) -> None:
    calls.ensure("b", PROMPT[:5])
    calls.ensure("a", [1, 2, 3])
    (spare,) = calls.grant(1)
    calls.take("a", 1, spare)
    late = calls.last
    calls.release("a")
    calls.ensure("a", [1, 2, 3])
    while spare not in calls.grant(1):
        calls.take("b", len(calls.table("b")), calls.grant(0)[0])
    assert not calls.take("a", 1, spare, at=late)
    assert calls.grant(0) == (spare,)


def test_reclaimed_spares_are_free_and_taken_ones_stay(calls: Numbered) -> None:
    calls.ensure("a", [1, 2, 3])
    first, second = calls.grant(2)
    calls.take("a", 1, first)
    calls.reclaim([first, second, 15])
    assert calls.grant(0) == () and calls.table("a")[1] == first
    assert calls.num_free == 14


def test_a_late_reclaim_leaves_blocks_that_were_granted_again(calls: Numbered) -> None:
    spares = calls.grant(2)
    late = calls.last + 1
    calls.last = late
    assert calls.grant(2) == spares
    calls.reclaim(spares, at=late)
    assert calls.grant(0) == spares


# --- the checks themselves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["reference", "table", "index", "spare", "leader", "chain"])
def test_a_contradiction_is_noticed(damage: str) -> None:
    calls = Numbered(16)
    a = calls.ensure("a", PROMPT).block_ids
    calls.ensure("b", [1, 2, 3, 4, 5])
    calls.grant(1)
    calls.seal("a", 0, PROMPT)
    manager = calls.manager
    manager.check_invariants()
    if damage == "reference":
        manager.pool.add_ref(a[2])
    elif damage == "table":
        manager.holds["b"].block_ids[1] = a[2]
    elif damage == "index":
        manager.index.remove(a[0])
    elif damage == "spare":
        manager.spares[next(b for b in range(16) if not manager.pool.num_refs(b))] = 1
    elif damage == "leader":
        manager.leaders.lead("gone", [bytes(32)], 0)
    else:
        manager.holds["b"].keys.append(manager.holds["a"].keys[0])
    with pytest.raises(AssertionError):
        manager.check_invariants()


def test_a_take_that_comes_after_its_sequence_has_ended_frees_the_block(calls: Numbered) -> None:
    calls.ensure("a", PROMPT)
    (spare,) = calls.grant(1)
    late = calls.next(None)
    calls.release("a")
    assert not calls.take("a", 3, spare, at=late)
    assert calls.num_free == 16 and not calls.manager.spares


def test_a_take_that_comes_late_frees_no_block_that_was_granted_again(calls: Numbered) -> None:
    calls.ensure("a", PROMPT)
    (spare,) = calls.grant(1)
    late = calls.next(None)
    calls.release("a")
    assert calls.grant(1) == (spare,)
    calls.take("a", 3, spare, at=late)
    assert list(calls.manager.spares) == [spare]


def test_a_take_of_a_sequence_that_is_not_known_changes_nothing(calls: Numbered) -> None:
    (spare,) = calls.grant(1)
    assert not calls.take("a", 3, spare)
    assert list(calls.manager.spares) == [spare]
