"""Seals, and how two that computed the same end with one block."""

from __future__ import annotations

import pytest

from services.cache_store import prefix_index
from services.cache_store.holds import Sealed
from shared.block_keys import chain
from shared.wire import pack_ids
from tests.cache_store.numbered import Numbered

PROMPT = list(range(100, 110))  # two whole blocks of 4 and two tokens


# --- seals -----------------------------------------------------------------------------------------------------------


def test_a_repeated_seal_changes_nothing(calls: Numbered) -> None:
    calls.ensure("a", PROMPT)
    assert calls.seal("a", 0, PROMPT) == calls.seal("a", 0, PROMPT) == Sealed(True)
    assert calls.manager.counts.seals == 1
    assert calls.seal("a", 1, PROMPT).accepted and calls.seal("a", 0, PROMPT).accepted


def test_a_seal_is_refused_unless_that_sequence_and_epoch_hold_that_block_there_now(calls: Numbered) -> None:
    first, second, third = calls.ensure("a", PROMPT, epoch=2).block_ids
    free_block = next(b for b in range(16) if b not in (first, second, third))
    assert not calls.seal("a", 0, PROMPT, first, epoch=1).accepted, "another epoch"
    assert not calls.seal("b", 0, PROMPT, first, epoch=2).accepted, "another sequence"
    assert not calls.seal("a", 0, PROMPT, second, epoch=2).accepted, "another index"
    assert not calls.seal("a", 0, PROMPT, free_block, epoch=2).accepted, "a block it does not have"
    assert not calls.seal("a", -3, [1] * 16, first, epoch=2).accepted, "no index"
    assert not calls.seal("a", 3, [1] * 16, free_block, epoch=2).accepted, "an index past the table"
    calls.release("a", epoch=2)
    assert not calls.seal("a", 0, PROMPT, first, epoch=2).accepted, "released"
    assert calls.manager.counts.refused_seals == 7
    assert len(calls.manager.index) == 0


def test_a_seal_of_an_earlier_life_is_refused(calls: Numbered) -> None:
    block_id = calls.ensure("a", PROMPT).block_ids[0]
    late = calls.last + 1
    calls.release("a", at=late + 1)
    calls.last = late + 1
    assert calls.ensure("a", PROMPT).block_ids[0] == block_id
    assert not calls.seal("a", 0, PROMPT, block_id, at=late).accepted


def test_a_block_is_sealed_only_whole_and_after_the_ones_before_it(calls: Numbered) -> None:
    calls.ensure("a", PROMPT)
    assert not calls.seal("a", 1, PROMPT).accepted
    assert not calls.seal("a", 0, PROMPT[:3]).accepted
    assert calls.seal("a", 0, PROMPT).accepted and calls.seal("a", 1, PROMPT).accepted
    assert not calls.seal("a", 2, PROMPT).accepted, "two tokens of four"


def test_a_sealed_block_is_not_sealed_as_something_else(calls: Numbered) -> None:
    calls.ensure("a", PROMPT)
    calls.seal("a", 0, PROMPT)
    assert not calls.seal("a", 0, [9, 9, 9, 9]).accepted
    assert calls.match(PROMPT) == 4 and calls.match([9, 9, 9, 9, 9]) == 0


def test_equal_keys_of_other_tokens_are_never_shared(calls: Numbered, monkeypatch: pytest.MonkeyPatch) -> None:
    def colliding(root: bytes, packed_ids: bytes, block_size: int) -> list[bytes]:
        """Takes token 1 for token 100."""
        return chain(root, packed_ids.replace(pack_ids([1]), pack_ids([100])), block_size)

    monkeypatch.setattr("services.cache_store.block_manager.chain", colliding)
    monkeypatch.setattr(prefix_index, "chain", colliding)
    other = [1, *PROMPT[1:]]
    calls.compute("a", PROMPT)
    b = calls.ensure("b", other)
    assert b.cached_length == 0
    assert not calls.seal("b", 0, other).accepted
    assert not calls.seal("b", 1, other).accepted, "its keys would lead others to it from a wrong beginning"
    assert calls.manager.counts.collisions == 1
    assert calls.match(PROMPT) == 8


# --- remap: two that computed the same end with one block ------------------------------------------------------------


def twins(calls: Numbered) -> tuple[int, int]:
    """Two sequences with an equal first block, sealed by both; a's block and b's old one."""
    a = calls.ensure("a", PROMPT).block_ids[0]
    b = calls.ensure("b", PROMPT, wait_for_leader=False).block_ids[0]
    calls.seal("a", 0, PROMPT)
    assert calls.seal("b", 0, PROMPT) == Sealed(True, twin=a)
    return a, b


def test_the_second_of_two_equal_blocks_is_replaced_by_the_first(calls: Numbered) -> None:
    a, _ = twins(calls)
    assert calls.table("b")[0] == a
    assert calls.manager.counts.remaps == 1


def test_the_replaced_block_is_held_until_the_remap_is_planned(calls: Numbered) -> None:
    _, old = twins(calls)
    free = calls.num_free
    assert calls.manager.pool.num_refs(old) == 1
    calls.drop("b", old)
    assert (calls.manager.pool.num_refs(old), calls.num_free) == (0, free + 1)
    calls.drop("b", old)
    assert calls.num_free == free + 1


def test_a_repeated_seal_gives_the_same_remap_until_it_is_dropped(calls: Numbered) -> None:
    a, old = twins(calls)
    assert calls.seal("b", 0, PROMPT, old) == Sealed(True, twin=a)
    calls.drop("b", old)
    assert not calls.seal("b", 0, PROMPT, old).accepted
    assert calls.seal("b", 0, PROMPT, a) == Sealed(True), "as the worker names it after the Remap"


def test_a_drop_older_than_the_remap_is_ignored(calls: Numbered) -> None:
    _, old = twins(calls)
    calls.drop("b", old, at=calls.last)
    assert calls.manager.pool.num_refs(old) == 1


def test_a_drop_older_than_the_last_answer_with_the_remap_is_ignored(calls: Numbered) -> None:
    _, old = twins(calls)
    late = calls.last + 1
    calls.seal("b", 0, PROMPT, old, at=late + 1)
    calls.drop("b", old, at=late)
    assert calls.manager.pool.num_refs(old) == 1


def test_a_drop_of_what_is_not_retired_is_ignored(calls: Numbered) -> None:
    a, old = twins(calls)
    calls.drop("b", a)
    calls.drop("b", old, epoch=2)
    calls.drop("c", old)
    assert calls.manager.pool.num_refs(a) == 2 and calls.manager.pool.num_refs(old) == 1


def test_a_release_frees_replaced_blocks_too(calls: Numbered) -> None:
    twins(calls)
    calls.release("b")
    calls.release("a")
    assert calls.num_free == 16


def test_blocks_after_a_replaced_one_are_sealed_under_its_key(calls: Numbered) -> None:
    twins(calls)
    assert calls.seal("b", 1, PROMPT) == Sealed(True)
    assert calls.match(PROMPT) == 8
    assert calls.seal("a", 1, PROMPT).twin == calls.table("b")[1]
