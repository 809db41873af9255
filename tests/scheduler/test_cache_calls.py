"""Calls to stores: numbered, repeated until answered, forgotten with their pool."""

from __future__ import annotations

from typing import Any

from services.scheduler.cache_client import REPEAT_AFTER_S, CacheCalls
from shared.store_calls import Ensure, Grant, Match, Reconcile, StoreCall


def sent(calls: CacheCalls, kind: type[StoreCall] = Grant, worker: str = "w", now: float = 0.0, **fields: Any) -> int:
    defaults: dict[type[StoreCall], dict[str, Any]] = {
        Grant: {"num_blocks": 1}, Reconcile: {"running": (), "spare_block_ids": ()},
        Match: {"salt": b"", "ids": b""}, Ensure: {"salt": b"", "ids": b""},
    }  # fmt: skip
    number = calls.new_id()
    head = {"call": number, "reply_to": calls.reply_to, "worker": worker, "run_term": 1, "pool_term": 1}
    calls.sent("c", kind(**head | defaults[kind] | fields), now)
    return number


def test_numbers_rise() -> None:
    calls = CacheCalls("inbox:s")
    assert [sent(calls, kind) for kind in (Grant, Reconcile, Match)] == [1, 2, 3] and len(calls) == 3


def test_an_answer_is_taken_once() -> None:
    calls = CacheCalls("inbox:s")
    number = sent(calls)
    first = calls.answered(number)
    assert isinstance(first, Grant) and first.call == number
    assert calls.answered(number) is None and calls.answered(99) is None and len(calls) == 0


def test_calls_are_repeated_at_a_distance() -> None:
    calls = CacheCalls("inbox:s")
    sent(calls, now=10.0)
    assert calls.overdue(10.0 + REPEAT_AFTER_S / 2) == []
    later = 10.0 + 1.5 * REPEAT_AFTER_S
    assert [p.message.call for p in calls.overdue(later)] == [1]
    assert calls.overdue(later + REPEAT_AFTER_S / 2) == []
    assert [p.message.call for p in calls.overdue(later + 1.5 * REPEAT_AFTER_S)] == [1]


def test_a_reconcile_is_never_repeated() -> None:
    calls = CacheCalls("inbox:s")
    sent(calls, Reconcile)
    assert calls.overdue(1e9) == [] and len(calls) == 1


def test_what_a_worker_waits_for_is_forgotten_with_it() -> None:
    calls = CacheCalls("inbox:s")
    mine, other = sent(calls, worker="w"), sent(calls, worker="v")
    calls.forget("w")
    assert calls.answered(mine) is None and calls.answered(other) is not None


def test_what_may_free_blocks() -> None:
    calls = CacheCalls("inbox:s")
    sent(calls, Match)
    assert not calls.pending("w")
    sent(calls, Grant)
    assert calls.pending("w") and not calls.pending("v")


def test_a_place_that_is_given_up_is_not_asked_for_again() -> None:
    calls = CacheCalls("inbox:s")
    dropped, kept = sent(calls, Ensure, sid="r.0", epoch=1), sent(calls, Ensure, sid="r.0", epoch=2)
    calls.drop("r.0", 1)
    assert calls.answered(dropped) is None and calls.answered(kept) is not None
