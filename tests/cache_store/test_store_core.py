"""Terms, readiness and answers of a store, message by message."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.cache_store.store_core import StoreCore
from shared.store_calls import (
    Ensure,
    Grant,
    Granted,
    Match,
    Matched,
    Reconcile,
    Reconciled,
    StoreCall,
    Table,
    Update,
    Updated,
)
from shared.wire import Message, ProtocolError, pack_ids
from shared.worker_protocol import Cancel, Taken
from tests.cache_store.caller import LOCATED, PROMPT, SALT, Caller, open_store, page, sealed_block, seals


@pytest.fixture
def core() -> Iterator[StoreCore]:
    """A store whose pool `w` has been listed (as empty) and not reconciled."""
    core = open_store()
    core.handle(page())
    yield core
    core.check_invariants()


@pytest.fixture
def caller(core: StoreCore) -> Caller:
    caller = Caller(core)
    assert caller.reconcile().status == "ok"
    return caller


# --- readiness -------------------------------------------------------------------------------------------------------


def calls_of_every_kind(caller: Caller) -> list[StoreCall]:
    return [
        caller.message(Ensure, sid="a", epoch=1, salt=SALT, ids=pack_ids(PROMPT)),
        caller.message(Grant, num_blocks=2),
        caller.message(Update, released=(("a", 1),)),
        caller.message(Reconcile, running=(), spare_block_ids=()),
    ]


def test_a_pool_leased_elsewhere_answers_not_ready_with_term_0() -> None:
    caller = Caller(StoreCore("store"))
    for call in calls_of_every_kind(caller):
        answer = caller.send(call)
        assert (answer.status, answer.pool_term) == ("not_ready", 0)
    assert caller.match() == Matched(call=caller.number, worker="w", pool_term=0, cached_length=0)


@pytest.mark.parametrize("pool_term", [6, 8])
def test_another_pool_term_is_answered_with_the_present_one(pool_term: int) -> None:
    core = open_store(pool_term=7)
    core.handle(page(pool_term=7))
    Caller(core, pool_term=7).reconcile()
    caller = Caller(core, pool_term=pool_term)
    for call in calls_of_every_kind(caller):
        answer = caller.send(call)
        assert (answer.status, answer.pool_term) == ("not_ready", 7)
    assert core.pools["w"].manager.num_free == 16


def test_a_pool_is_not_ready_before_the_last_page_of_the_inventory() -> None:
    core = open_store()
    core.handle(page(sealed_block(3), last=False))
    caller = Caller(core)
    for call in calls_of_every_kind(caller):
        assert caller.send(call).status == "not_ready"
    core.handle(page())
    assert caller.reconcile() == Reconciled(
        call=caller.number, worker="w", pool_term=1, status="ok", num_free=16, num_blocks=16
    )
    assert caller.ensure("a").cached_length == 4


def test_a_pool_is_not_ready_before_it_is_reconciled(core: StoreCore) -> None:
    caller = Caller(core)
    for call in calls_of_every_kind(caller)[:3]:
        assert caller.send(call).status == "not_ready"


def test_a_higher_run_term_must_reconcile_first(core: StoreCore, caller: Caller) -> None:
    other = Caller(core, run_term=2)
    for call in calls_of_every_kind(other)[:3]:
        assert other.send(call).status == "not_ready"
    assert caller.ensure("a").status == "ok", "asking is not taking over"


def test_a_lower_run_term_is_stale_for_ever(core: StoreCore, caller: Caller) -> None:
    caller.ensure("a")
    Caller(core, run_term=2).reconcile()
    for call in calls_of_every_kind(caller):
        assert caller.send(call).status == "stale"
    assert core.pools["w"].manager.num_free == 16


def test_a_run_term_that_was_replaced_before_the_store_came_is_stale() -> None:
    core = open_store(min_run_term=5)
    core.handle(page())
    assert Caller(core, run_term=4).reconcile().status == "stale"
    assert Caller(core, run_term=5).reconcile().status == "ok"


def test_inventory_of_another_term_or_after_the_last_page_is_ignored() -> None:
    core = open_store(pool_term=2)
    core.handle(page(sealed_block(3), pool_term=1))
    assert core.pools["w"].state == "inventory"
    core.handle(page(pool_term=2))
    core.handle(page(sealed_block(3), pool_term=2))
    core.handle(page(sealed_block(3), pool_term=2).model_copy(update={"worker": "other"}))
    assert core.pools["w"].state == "reconcile"
    assert Caller(core, pool_term=2).match().cached_length == 0


def test_wrong_entries_of_an_inventory_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    core = open_store()
    core.handle(page(sealed_block(3), sealed_block(99), sealed_block(4).model_copy(update={"ids": pack_ids([1] * 4)})))
    assert Caller(core).match().cached_length == 4
    assert "2 of 3 blocks in the inventory of w are wrong" in caplog.text


# --- leases of pools -------------------------------------------------------------------------------------------------


def test_a_pool_opened_again_under_its_term_is_left_as_it_is(core: StoreCore, caller: Caller) -> None:
    table = caller.ensure("a").block_ids
    assert not core.open_pool("w", 1, 16, 4, "variant")
    assert not core.open_pool("w", 0, 16, 4, "variant")
    assert caller.ensure("a").block_ids == table
    assert open_store().open_pool("w", 1, 16, 4, "variant"), "not listed yet: the worker may have missed the question"


def test_a_pool_under_a_new_term_starts_anew(core: StoreCore, caller: Caller) -> None:
    caller.ensure("a")
    assert core.open_pool("w", 2, 8, 4, "variant")
    answer = caller.ensure("a")
    assert (answer.status, answer.pool_term) == ("not_ready", 2)
    assert core.pools["w"].manager.num_free == 8


def test_a_closed_pool_is_forgotten(core: StoreCore, caller: Caller) -> None:
    caller.ensure("a")
    core.close_pool("w")
    core.close_pool("w")
    assert caller.ensure("a").pool_term == 0 and not core.pools


def test_pools_are_kept_apart(core: StoreCore, caller: Caller) -> None:
    core.open_pool("v", 1, 16, 4, "variant")
    core.handle(page().model_copy(update={"worker": "v"}))
    other = Caller(core, run_term=9)
    other.send(other.message(Reconcile, worker="v", running=(), spare_block_ids=()))
    caller.update(seals=seals(caller.ensure("a").block_ids))
    assert caller.match().cached_length == 8
    assert other.send(other.message(Match, worker="v", salt=SALT, ids=pack_ids(PROMPT))).cached_length == 0


# --- answers ---------------------------------------------------------------------------------------------------------


def test_ensure_is_answered_with_a_table(caller: Caller) -> None:
    assert caller.ensure("a", epoch=3) == Table(
        call=caller.number, worker="w", pool_term=1, sid="a", epoch=3, status="ok", block_ids=(0, 1, 2), num_free=13
    )
    wait = caller.ensure("b")
    assert (wait.status, wait.leader, wait.leader_index, wait.num_free) == ("wait", "a", 1, 13)
    assert caller.ensure("b", wait_for_leader=False, keep_free=11).status == "full"
    full = caller.ensure("c", ids=tuple(range(64)))
    assert (full.status, full.num_needed, full.num_free) == ("full", 17, 13)
    assert caller.ensure("a", epoch=2).status == "stale"
    caller.update(seals=seals(caller.ensure("a", epoch=3).block_ids, epoch=3))
    assert caller.ensure("b", use_cached=False).cached_length == 0


def test_grant_is_answered_with_the_whole_grant(caller: Caller) -> None:
    first = caller.grant(2)
    assert first == Granted(
        call=caller.number, worker="w", pool_term=1, status="ok", spare_block_ids=(0, 1), num_free=14
    )
    assert caller.grant(3).spare_block_ids == (0, 1, 2)


def test_an_update_applies_taken_seals_dropped_released_reclaimed(caller: Caller) -> None:
    table = caller.ensure("a", ids=PROMPT[:3]).block_ids
    spares = caller.grant(3).spare_block_ids
    taken = tuple(Taken(sid="a", epoch=1, index=1 + i, block_id=spares[i]) for i in range(2))
    answer = caller.update(taken=taken, seals=seals((*table, *spares)), released=(("a", 1),), reclaimed=(spares[2],))
    assert answer == Updated(call=caller.number, worker="w", pool_term=1, status="ok", num_free=16)
    assert caller.match().cached_length == 8


def test_a_remap_is_answered_again_until_it_is_dropped(caller: Caller) -> None:
    a = caller.ensure("a").block_ids
    b = caller.ensure("b", wait_for_leader=False).block_ids
    caller.update(seals=seals(a))
    remaps = (("b", 1, 0, b[0], a[0]), ("b", 1, 1, b[1], a[1]))
    assert caller.update(seals=seals(b, sid="b")).remaps == remaps
    answer = caller.update(seals=seals(b, sid="b"))
    assert (answer.remaps, answer.num_free) == (remaps, 10)
    assert caller.update(dropped=(("b", 1, b[0]), ("b", 1, b[1]))).num_free == 12


def test_no_remap_is_answered_for_a_sequence_released_with_its_seals(caller: Caller) -> None:
    a = caller.ensure("a").block_ids
    b = caller.ensure("b", wait_for_leader=False).block_ids
    caller.update(seals=seals(a))
    answer = caller.update(seals=seals(b, sid="b"), released=(("b", 1),))
    assert (answer.remaps, answer.num_free) == ((), 13)


def test_match_answers_under_any_term_and_hides_what_is_not_known(core: StoreCore) -> None:
    stranger = Caller(core, run_term=0, pool_term=0)
    assert stranger.match() == Matched(call=1, worker="w", pool_term=1, cached_length=0, num_free=0)
    caller = Caller(core, run_term=3)
    caller.reconcile()
    caller.update(seals=seals(caller.ensure("a").block_ids))
    answer = stranger.match()
    assert (answer.cached_length, answer.num_free) == (8, 13)


# --- late and repeated calls -----------------------------------------------------------------------------------------


def test_a_repeated_reconcile_that_later_calls_overtook_changes_nothing(caller: Caller) -> None:
    late = caller.message(Reconcile, running=(), spare_block_ids=())
    caller.send(late)
    table = caller.ensure("a").block_ids
    assert caller.send(late).status == "ok"
    assert caller.ensure("a").block_ids == table


def test_a_reconcile_that_comes_after_later_calls_must_be_made_anew(caller: Caller) -> None:
    late = caller.message(Reconcile, running=(), spare_block_ids=())
    table = caller.ensure("a").block_ids
    assert caller.send(late).status == "not_ready"
    assert caller.ensure("a").block_ids == table


def test_a_scheduler_may_reconcile_again_under_its_term(caller: Caller) -> None:
    caller.ensure("a")
    assert caller.reconcile(("b", 1, SALT, (5, 6))).num_free == 14
    assert caller.update(released=(("a", 1), ("b", 1))).num_free == 16


def test_a_late_reconcile_of_a_lower_term_changes_nothing(core: StoreCore, caller: Caller) -> None:
    late = caller.message(Reconcile, running=(("x", 1, SALT, (1, 2)),), spare_block_ids=())
    other = Caller(core, run_term=2)
    other.reconcile()
    other.ensure("a")
    assert caller.send(late).status == "stale"
    assert other.update().num_free == 13


def test_an_ensure_after_its_release_holds_nothing(caller: Caller) -> None:
    late = caller.message(Ensure, sid="a", epoch=1, salt=SALT, ids=pack_ids(PROMPT))
    assert caller.send(late).status == "ok"
    assert caller.update(released=(("a", 1),)).num_free == 16
    assert caller.send(late).status == "stale"
    assert caller.update().num_free == 16


# --- nonsense --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [b"", b"12345"])
@pytest.mark.parametrize("kind", [Ensure, Match])
def test_ids_that_are_no_prompt_are_refused(caller: Caller, kind: type[StoreCall], ids: bytes) -> None:
    fields = {"sid": "a", "epoch": 1} if kind is Ensure else {}
    with pytest.raises(ProtocolError, match="not the ids of a prompt"):
        caller.send(caller.message(kind, salt=SALT, ids=ids, **fields))


def test_a_running_set_that_cannot_be_is_refused_and_the_next_one_is_not(caller: Caller) -> None:
    with pytest.raises(ProtocolError, match="does not have"):
        caller.reconcile(("a", 1, SALT, (99,)))
    assert caller.reconcile(("a", 1, SALT, (9,))).num_free == 15


def test_messages_for_others_are_refused(core: StoreCore) -> None:
    for message in (Cancel(sid="a", epoch=1), Message(), StoreCall(**LOCATED, call=1, run_term=1, pool_term=1)):
        with pytest.raises(ProtocolError):
            core.handle(message)
        with pytest.raises(ProtocolError):
            StoreCore("empty").handle(message)
