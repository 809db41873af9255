"""What the worker says is true: rebuilding the index from its inventory, and references from its running set."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from services.cache_store.holds import Sealed
from shared.block_keys import chain, root_key
from shared.store_calls import InventoryEntry
from shared.wire import pack_ids
from tests.cache_store.numbered import BLOCK_SIZE, SALT, Numbered

PROMPT = list(range(100, 110))


def inventory(block_ids: Sequence[int], ids: Sequence[int]) -> list[InventoryEntry]:
    """As a worker lists the whole blocks of ids that it has in these blocks."""
    packed, width, parent = pack_ids(ids), 4 * BLOCK_SIZE, root_key(SALT, "test")
    listed = []
    for block_id, start, key in zip(
        block_ids, range(0, len(packed), width), chain(parent, packed, BLOCK_SIZE), strict=True
    ):
        listed.append(InventoryEntry(block_id=block_id, key=key, parent_key=parent, ids=packed[start : start + width]))
        parent = key
    return listed


# --- reconcile -------------------------------------------------------------------------------------------------------


def test_references_become_exactly_those_of_the_running_set(calls: Numbered) -> None:
    kept = calls.ensure("kept", PROMPT).block_ids
    calls.ensure("gone", PROMPT, wait_for_leader=False)
    spares = calls.grant(3)
    calls.reconcile([("kept", 1, SALT, (*kept, spares[0])), ("unknown", 4, SALT, (15, 14))], spares[1:])
    assert calls.table("kept") == (*kept, spares[0])
    assert calls.table("unknown", 4) == (15, 14) and calls.table("gone") == ()
    assert calls.grant(0) == spares[1:]
    assert calls.num_free == 16 - 4 - 2 - 2


def test_the_same_report_again_changes_nothing(calls: Numbered) -> None:
    table = calls.ensure("a", PROMPT).block_ids
    calls.seal_all("a", PROMPT)
    for _ in range(2):
        calls.reconcile([("a", 1, SALT, table)], [])
        assert calls.num_free == 13 and calls.match(PROMPT) == 8


def test_an_empty_report_frees_everything_and_keeps_the_hits(calls: Numbered) -> None:
    calls.ensure("a", PROMPT)
    calls.seal_all("a", PROMPT)
    calls.grant(4)
    calls.reconcile([])
    assert calls.num_free == 16 and calls.match(PROMPT) == 8


def test_a_block_in_a_table_and_among_the_spares_belongs_to_the_table(calls: Numbered) -> None:
    calls.reconcile([("a", 1, SALT, (1, 2))], [2, 3, 3])
    assert calls.grant(0) == (3,) and calls.num_free == 13


def test_sealing_goes_on_where_it_was(calls: Numbered) -> None:
    table = calls.ensure("a", PROMPT).block_ids
    calls.seal("a", 0, PROMPT)
    calls.reconcile([("a", 1, SALT, table)])
    assert calls.seal("a", 1, PROMPT) == Sealed(True)
    assert calls.match(PROMPT) == 8


def test_seals_may_be_repeated_from_the_first_block_on_also_of_shared_ones(calls: Numbered) -> None:
    a = calls.ensure("a", PROMPT).block_ids
    calls.seal_all("a", PROMPT)
    b = calls.ensure("b", [*PROMPT[:8], 7, 8, 9]).block_ids
    calls.reconcile([("a", 1, SALT, a), ("b", 1, SALT, b)])
    for sid in ("a", "b"):
        assert [calls.seal(sid, i, PROMPT) for i in (0, 1)] == [Sealed(True)] * 2
    assert calls.manager.counts.seals == 2


def test_a_replaced_block_that_the_worker_still_uses_is_replaced_again(calls: Numbered) -> None:
    a = calls.ensure("a", PROMPT).block_ids
    b = calls.ensure("b", PROMPT, wait_for_leader=False).block_ids
    calls.seal("a", 0, PROMPT)
    calls.seal("b", 0, PROMPT)
    calls.reconcile([("a", 1, SALT, a), ("b", 1, SALT, b)])
    assert calls.table("b") == b
    assert calls.seal("b", 0, PROMPT) == Sealed(True, twin=a[0])


def test_a_running_block_that_was_another_prefix_is_not_found_as_that(calls: Numbered) -> None:
    table = calls.compute("x", PROMPT)
    calls.reconcile([("a", 1, SALT, (table[1], table[0]))])
    assert calls.match(PROMPT) == 0


def test_nobody_waits_for_a_leader_of_before(calls: Numbered) -> None:
    table = calls.ensure("a", PROMPT).block_ids
    calls.reconcile([("a", 1, SALT, table)])
    assert calls.ensure("b", PROMPT).status == "ok"


def test_calls_from_before_the_report_change_nothing(calls: Numbered) -> None:
    table = calls.ensure("a", PROMPT).block_ids
    (spare,) = calls.grant(1)
    before = calls.last
    calls.reconcile([("a", 1, SALT, table)], [spare])
    assert not calls.take("a", 3, spare, at=before)
    assert not calls.seal("a", 0, PROMPT, at=before).accepted
    assert calls.ensure("b", PROMPT, at=before).status == "stale"
    assert calls.grant(5, at=before) == (spare,)
    calls.release("a", at=before)
    calls.reclaim([spare], at=before)
    assert calls.table("a") == table and calls.grant(0) == (spare,) and calls.num_free == 12


def test_a_new_scheduler_numbers_its_calls_anew(calls: Numbered) -> None:
    calls.ensure("a", PROMPT, at=50)
    calls.grant(1, at=51)
    calls.release("a", at=52)
    calls.reconcile([], at=1)
    assert calls.ensure("a", PROMPT, at=2).status == "ok"
    assert len(calls.grant(2, at=3)) == 2


def test_a_sequence_in_the_report_keeps_its_table_when_it_is_ensured(calls: Numbered) -> None:
    table = calls.compute("x", PROMPT)
    calls.reconcile([("a", 1, SALT, table)])
    again = calls.ensure("a", PROMPT[:8])
    assert (again.block_ids, again.cached_length) == (table, 4)


@pytest.mark.parametrize(
    ("running", "spares"),
    [
        ([("a", 1, SALT, (1, 16))], ()),
        ([("a", 1, SALT, (-1,))], ()),
        ([("a", 1, SALT, (1, 1))], ()),
        ([("a", 1, SALT, (1,)), ("a", 2, SALT, (2,))], ()),
        ([], (16,)),
    ],
)
def test_a_report_that_cannot_be_is_refused_whole(
    calls: Numbered, running: list[tuple[str, int, bytes, tuple[int, ...]]], spares: tuple[int, ...]
) -> None:
    table = calls.ensure("a", PROMPT).block_ids
    with pytest.raises(ValueError, match=r"twice|does not have"):
        calls.reconcile(running, spares)
    assert calls.table("a") == table and calls.num_free == 13


# --- rebuild ---------------------------------------------------------------------------------------------------------


def test_a_rebuilt_pool_finds_what_the_worker_has(calls: Numbered) -> None:
    listed = inventory([7, 3], PROMPT[:8])
    assert calls.manager.rebuild([*listed, listed[0].model_copy(update={"key": bytes(32)})]) == 1
    calls.reconcile([])
    assert calls.num_free == 16
    a = calls.ensure("a", PROMPT)
    assert a.cached_length == 8 and a.block_ids[:2] == (7, 3)


def test_a_rebuilt_index_evicts_tails_first(make_calls: Callable[[int], Numbered]) -> None:
    calls = make_calls(4)
    calls.manager.rebuild(inventory([0, 1, 2], list(range(12))))
    calls.reconcile([])
    calls.ensure("a", [9] * 5)
    assert calls.match(list(range(13))) == 8


def test_a_rebuilt_index_is_not_believed_about_running_and_spare_blocks(calls: Numbered) -> None:
    """They may be listed as what they held before they were given out, and be written at any moment."""
    first, tail = PROMPT[:4], [1, 2, 3, 4]
    calls.manager.rebuild(inventory([7, 3], first + tail) + inventory([5], tail) + inventory([6], first[::-1]))
    calls.reconcile([("a", 1, SALT, (7, 3))], [5])
    assert calls.match([*first, *tail, 0]) == 0 and calls.match([*tail, 0]) == 0
    assert calls.match([*first[::-1], 0]) == 4, "a block that nobody has"


def test_the_seals_that_follow_bring_running_blocks_back(calls: Numbered) -> None:
    calls.manager.rebuild(inventory([7, 3], PROMPT[:8]))
    calls.reconcile([("a", 1, SALT, (7, 3, 0))])
    calls.seal_all("a", PROMPT)
    assert calls.ensure("b", PROMPT).block_ids[:2] == (7, 3)


def test_blocks_shared_before_a_rebuild_stay_shared(calls: Numbered) -> None:
    calls.manager.rebuild(inventory([7], PROMPT[:4]))
    calls.reconcile([("a", 1, SALT, (7, 1)), ("b", 1, SALT, (7, 2))])
    assert calls.manager.pool.num_refs(7) == 2
    assert [calls.seal(sid, 0, PROMPT) for sid in ("b", "a")] == [Sealed(True)] * 2
    calls.release("b")
    assert calls.ensure("c", PROMPT[:5]).block_ids[0] == 7


def test_shared_blocks_that_are_never_sealed_again_are_freed_with_their_last_holder(calls: Numbered) -> None:
    calls.manager.rebuild([])
    calls.reconcile([("a", 1, SALT, (7, 1)), ("b", 1, SALT, (7, 2))])
    calls.release("a")
    assert calls.num_free == 14
    calls.release("b")
    assert calls.num_free == 16 and calls.manager.unproven == set()


def test_a_later_report_trusts_the_index_again(calls: Numbered) -> None:
    calls.manager.rebuild(inventory([7], PROMPT[:4]))
    calls.reconcile([])
    table = calls.ensure("a", PROMPT).block_ids
    calls.reconcile([("a", 1, SALT, table)])
    assert calls.match(PROMPT) == 4
