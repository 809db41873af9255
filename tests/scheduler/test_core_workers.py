"""The core, event by event: taking over workers, what their reports mean, and where blocks run out."""

from __future__ import annotations

import pytest

from services.scheduler.actions import Assign, CheckPlaced, Expel, Finish, KeepDead, Plan, Requeue
from services.scheduler.cache_client import REPEAT_AFTER_S
from services.scheduler.pressure import STARVED_TIMEOUT_S
from services.scheduler.worker_view import ASK_AGAIN_S, SILENCE_S, Phase
from shared.store_calls import Ensure, Grant, Reconcile, Update
from shared.worker_protocol import Extend, Preempt, Reclaim, Remap, Report, Seal, Taken, TakeOver
from tests.scheduler.hand import Hand, calls, changes, member, only, row

SEAL = Seal(sid="a.0", epoch=1, index=0, block_id=7, ids=(1, 2, 3, 4))
TAKEN = Taken(sid="a.0", epoch=1, index=3, block_id=50)


# --- taking over -----------------------------------------------------------------------------------------------------


def taking_over() -> Hand:
    h = Hand()
    h.core.gain_worker(member(), term=4)
    h.core.set_store("w", "c", 5)
    return h


def test_the_first_message_of_a_term_is_a_take_over() -> None:
    h = taking_over()
    (plan,) = h.decide()
    assert isinstance(plan, Plan) and (plan.worker, plan.term) == ("w", 4)
    assert plan.changes == (TakeOver(term=4, inbox="s", ask=1),)


def test_the_stores_references_are_set_to_what_the_worker_shows() -> None:
    h = taking_over()
    h.decide()
    shown = row("a.0", epoch=2).model_copy(update={"block_ids": (7, 8), "salt": bytes(32)})
    h.core.on_message(h.running_state("w", shown, spare_block_ids=(50,), seals=(SEAL,)), h.now)
    actions = h.decide()
    assert only(actions, CheckPlaced) == [CheckPlaced("w", frozenset({("a.0", 2)}))]
    (reconcile,) = calls(actions, Reconcile)
    assert (reconcile.run_term, reconcile.pool_term) == (4, 5)
    assert reconcile.running == (("a.0", 2, bytes(32), (7, 8)),) and reconcile.spare_block_ids == (50,)
    (update,) = calls(actions, Update)
    assert update.seals == (SEAL,) and update.call > reconcile.call
    h.queue()
    assert h.until_quiet() == []  # nothing is placed before the store has answered
    h.answer(reconcile, num_free=90)
    assert h.view().phase is Phase.READY and h.view().spares == {50} and h.view().num_free == 90
    assert len(calls(h.until_quiet(), Ensure)) == 1


def test_nothing_is_asked_before_there_is_a_store() -> None:
    h = Hand()
    h.core.gain_worker(member(), term=4)
    assert h.decide() == []


def test_a_take_over_is_asked_again() -> None:
    h = taking_over()
    h.decide()
    assert h.decide() == []
    h.now += ASK_AGAIN_S
    assert changes(h.decide()) == [TakeOver(term=4, inbox="s", ask=2)]
    h.core.on_message(h.running_state("w", ask=1), h.now)  # nothing was planned since: as good as the second answer
    assert len(calls(h.decide(), Reconcile)) == 1


def test_a_reconcile_is_not_repeated() -> None:
    """An update after it would be undone: the worker's present state is asked for instead."""
    h = taking_over()
    h.decide()
    h.core.on_message(h.running_state("w"), h.now)
    (reconcile,) = calls(h.decide(), Reconcile)
    h.now += REPEAT_AFTER_S
    assert calls(h.decide(), Reconcile) == []
    h.now += ASK_AGAIN_S
    actions = h.decide()
    assert calls(actions, Reconcile) == [] and changes(actions) == [TakeOver(term=4, inbox="s", ask=2)]
    h.answer(reconcile)  # too late: another one will be sent
    assert h.view().phase is Phase.TAKING_OVER


def test_a_state_that_is_older_than_what_was_planned_does_not_count() -> None:
    """The take-over had been asked twice; the second answer is late, and a sequence was admitted after it."""
    h = taking_over()
    h.decide()
    h.now += ASK_AGAIN_S
    h.decide()
    h.core.on_message(h.running_state("w", ask=1), h.now)
    h.answer(calls(h.decide(), Reconcile)[0], num_free=100)
    h.run("a.0")
    h.core.set_store("w", "c2", 6)
    h.decide()
    h.core.on_message(h.running_state("w", ask=2), h.now)
    assert only(h.decide(), CheckPlaced) == []
    h.core.on_message(h.running_state("w", row("a.0"), ask=3), h.now)
    assert only(h.decide(), CheckPlaced) == [CheckPlaced("w", frozenset({("a.0", 1)}))]


def test_what_only_a_second_answer_says_is_not_lost() -> None:
    """The worker took a spare block between its answers, and told so by the second alone."""
    h = taking_over()
    h.decide()
    h.now += ASK_AGAIN_S
    h.decide()
    h.core.on_message(h.running_state("w", spare_block_ids=(50,), ask=1), h.now)
    h.answer(calls(h.decide(), Reconcile)[0], num_free=100)
    h.core.on_message(h.running_state("w", ask=2), h.now)
    assert h.view().phase is Phase.TAKING_OVER
    assert changes(h.decide()) == [TakeOver(term=4, inbox="s", ask=3)]
    h.core.on_message(h.running_state("w", ask=3), h.now)
    assert [c.spare_block_ids for c in calls(h.decide(), Reconcile)] == [()]


def told(num_taken: int) -> Hand:
    """A worker that is ready, runs a sequence and has told of so many blocks that were taken."""
    h = taking_over()
    h.decide()
    h.core.on_message(h.running_state("w", row("a.0"), num_taken=num_taken), h.now)
    h.answer(calls(h.decide(), Reconcile)[0], num_free=100)
    h.decide()
    return h


def test_what_was_taken_is_told_to_the_store_once() -> None:
    """A report that is repeated because its reply was lost: the block may have been given back by then, and lent anew,
    and the store would take it from the worker."""
    h, next_one = told(7), Taken(sid="a.0", epoch=1, index=4, block_id=51)
    h.report(row("a.0"), taken=(TAKEN,), taken_from=7)
    assert [u.taken for u in calls(h.decide(), Update)] == [(TAKEN,)]
    h.report(row("a.0"), taken=(TAKEN,), taken_from=7)
    assert not calls(h.decide(), Update)
    h.report(row("a.0"), taken=(TAKEN, next_one), taken_from=7)
    assert [u.taken for u in calls(h.decide(), Update)] == [(next_one,)]
    h.report(row("a.0"), ended=(("a.0", 1, "stop"),), taken_from=9)
    assert [u.taken for u in calls(h.decide(), Update)] == [()] and h.view().phase is Phase.READY


def test_a_worker_of_which_a_report_was_lost_is_asked_anew() -> None:
    h = told(7)
    h.report(row("a.0"), taken=(TAKEN,), taken_from=8)
    assert only(changes(h.decide()), TakeOver) and h.view().phase is Phase.TAKING_OVER


def test_a_worker_of_an_older_version_does_not_number_what_it_takes() -> None:
    for num_taken, taken_from in ((-1, 3), (7, -1)):
        h = told(num_taken)
        h.report(row("a.0"), taken=(TAKEN,), taken_from=taken_from)
        assert [u.taken for u in calls(h.decide(), Update)] == [(TAKEN,)] and h.view().phase is Phase.READY


def test_slow_answers_come_to_an_end() -> None:
    """A worker that takes 3 s to answer each question."""
    h = taking_over()
    answers: list[tuple[float, int]] = []
    for _ in range(400):
        actions = h.decide()
        answers += [(h.now + 3, c.ask) for c in changes(actions) if isinstance(c, TakeOver)]
        for reconcile in calls(actions, Reconcile):
            h.answer(reconcile, num_free=100)
        if answers and answers[0][0] <= h.now:
            h.core.on_message(h.running_state("w", ask=answers.pop(0)[1]), h.now)
        h.now += 0.1
    assert h.view().phase is Phase.READY and not answers


def test_a_worker_of_an_older_version_numbers_no_answers() -> None:
    h = taking_over()
    h.decide()
    h.core.on_message(h.running_state("w", ask=0), h.now)
    assert len(calls(h.decide(), Reconcile)) == 1


@pytest.mark.parametrize("wrong", [{"term": 3}, {"term": 5}])
def test_a_state_of_another_term_does_not_count(wrong: dict[str, int]) -> None:
    h = taking_over()
    h.decide()
    h.core.on_message(h.running_state("w", **wrong), h.now)
    assert h.decide() == []


def test_a_store_that_is_not_ready_is_reconciled_later() -> None:
    h = taking_over()
    h.decide()
    h.core.on_message(h.running_state("w"), h.now)
    h.answer(calls(h.decide(), Reconcile)[0], status="not_ready")
    assert h.view().phase is Phase.TAKING_OVER and h.decide() == []
    h.now += ASK_AGAIN_S
    assert changes(h.decide()) == [TakeOver(term=4, inbox="s", ask=2)]


def test_what_was_known_of_a_sequence_is_kept() -> None:
    h = Hand()
    h.run("a.0", priority=7, arrival_ms=5)
    h.core.set_store("w", "c2", 6)
    h.make_ready("w", row("a.0", epoch=1), row("b.0", epoch=1))
    running = h.view().running
    assert (running["a.0"].priority, running["a.0"].arrival_ms) == (7, 5) and set(running) == {"a.0", "b.0"}


def test_headers_of_what_a_worker_shows_are_dropped() -> None:
    h = taking_over()
    h.queue("a.0", epoch=1)
    h.queue("b.0", epoch=2)
    h.make_ready("w", row("a.0", epoch=2), row("b.0", epoch=2))
    assert set(h.core.queue) == {"b.0"}  # queued again since


def test_an_old_header_on_its_way_to_another_worker_is_given_up_there() -> None:
    h = Hand("w1", "w2", prefix_caching=False)
    ensure = h.ensure("a.0")
    other = "w2" if ensure.worker == "w1" else "w1"
    h.core.set_store(other, "c2", 6)
    h.make_ready(other, row("a.0", epoch=1))
    assert not h.view(ensure.worker).placing and "a.0" not in h.core.queue
    assert [(u.worker, u.released) for u in h.pending(Update)] == [(ensure.worker, (("a.0", 1),))]


def test_the_same_store_is_no_news() -> None:
    h = Hand()
    h.core.set_store("w", "c", 5)
    assert h.view().phase is Phase.READY
    h.core.set_store("other", "c", 5)


# --- reports ---------------------------------------------------------------------------------------------------------


def test_what_a_report_says_goes_to_the_store_in_one_update() -> None:
    h = Hand()
    h.run("a.0")
    h.report(seals=(SEAL,), taken=(TAKEN,), ended=(("a.0", 1, "stop"),))
    (update,) = calls(h.decide(), Update)
    assert (update.taken, update.seals, update.released) == ((TAKEN,), (SEAL,), (("a.0", 1),))
    assert not h.view().running


def test_a_report_with_nothing_for_the_store_is_not_passed_on() -> None:
    h = Hand()
    h.run("a.0", 10)
    h.answer_updates(h.until_quiet())
    h.report(row("a.0", num_tokens=12, starved=True), speed=7.0)
    assert calls(h.decide(), Update) == []
    running = h.view().running["a.0"]
    assert (running.num_tokens, running.starved, h.view().tokens_per_second) == (12, True, 7.0)


@pytest.mark.parametrize("term", [2, 4])
def test_a_report_of_another_term_is_ignored(term: int) -> None:
    h = Hand()
    h.run("a.0")
    h.until_quiet()
    h.report(term=term, ended=(("a.0", 1, "refused"),), seals=(SEAL,))
    assert h.decide() == [] and set(h.view().running) == {"a.0"}


def test_a_report_of_another_epoch_does_not_end_this_one() -> None:
    h = Hand()
    h.run("a.0", epoch=1)
    h.report(row("a.0", epoch=1, num_tokens=99), ended=(("a.0", 1, "stale"),))
    assert h.view().running["a.0"].num_tokens == 10
    assert calls(h.decide(), Update)[0].released == (("a.0", 1),)


def test_before_the_running_set_is_known_reports_say_nothing() -> None:
    h = Hand()
    h.run("a.0")
    h.core.set_store("w", "c2", 6)
    h.report(ended=(("a.0", 1, "refused"),), seals=(SEAL,))
    actions = h.decide()
    assert calls(actions, Update) == [] and only(actions, Requeue) == []


@pytest.mark.parametrize("reason", ["refused", "preempted"])
def test_what_ended_only_there_is_queued_again(reason: str) -> None:
    h = Hand()
    h.run("a.0")
    h.until_quiet()
    h.report(ended=(("a.0", 1, reason),))
    actions = h.decide()
    assert only(actions, Requeue) == [Requeue("a.0", 1)] and calls(actions, Update)[0].released == (("a.0", 1),)


def test_a_refusal_makes_worker_and_store_agree_anew() -> None:
    """They disagree on who holds what: the same blocks would be given, and refused, again and again."""
    h = Hand()
    h.run("a.0")
    h.until_quiet()
    h.report(ended=(("a.0", 1, "refused"),))
    h.queue("a.0", epoch=1)
    actions = h.until_quiet()
    assert [type(c) for c in changes(actions)] == [TakeOver] and calls(actions, Ensure) == []
    h.make_ready()
    assert [e.epoch for e in calls(h.until_quiet(), Ensure)] == [2]


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled", "error", "stale"])
def test_what_ended_for_good_is_not(reason: str) -> None:
    h = Hand()
    h.run("a.0")
    h.report(ended=(("a.0", 1, reason),))
    assert only(h.decide(), Requeue) == []


def test_what_failed_alone_is_kept_for_people() -> None:
    h = Hand()
    h.run("a.0")
    h.report(ended=(("a.0", 1, "error"), ("b.0", 1, "stop")))
    assert only(h.decide(), KeepDead) == [KeepDead("a.0")]


def test_a_repeated_report_is_harmless() -> None:
    h = Hand()
    h.run("a.0")
    for _ in range(2):
        h.report(ended=(("a.0", 1, "stop"),))
    assert not h.view().running and len(calls(h.decide(), Update)) == 2


def test_an_update_is_repeated_until_it_is_answered() -> None:
    h = Hand()
    h.run("a.0")
    h.until_quiet()
    h.report(seals=(SEAL,))
    (update,) = calls(h.decide(), Update)
    h.now += REPEAT_AFTER_S + 0.01
    assert update in calls(h.decide(), Update)
    h.answer(update)
    h.now += REPEAT_AFTER_S + 0.01
    assert update not in calls(h.decide(), Update)


def test_a_store_that_knows_another_term_is_reconciled() -> None:
    h = Hand()
    h.run("a.0")
    waiting = h.ensure("b.0")
    h.report(seals=(SEAL,))
    (update,) = calls(h.decide(), Update)
    h.answer(update, status="not_ready")
    assert h.view().phase is Phase.TAKING_OVER and not h.view().placing
    h.answer(waiting)
    h.make_ready("w", row("a.0"))
    assert [e.sid for e in calls(h.until_quiet(), Ensure)] == ["b.0"]


def test_equal_blocks_become_one() -> None:
    h = Hand()
    h.run("a.0")
    h.until_quiet()
    h.report(seals=(SEAL,))
    (update,) = calls(h.decide(), Update)
    h.answer(update, remaps=(("a.0", 1, 0, 7, 3), ("gone.0", 1, 0, 8, 3), ("a.0", 9, 0, 8, 3)))
    plan, call = h.decide()
    assert isinstance(plan, Plan) and plan.changes == (Remap(sid="a.0", epoch=1, pool_term=5, index=0, block_id=3),)
    assert calls([call], Update)[0].dropped == (("a.0", 1, 7),)  # after the plan


def test_a_silent_worker_is_noticed() -> None:
    h = Hand()
    h.now += 10
    assert h.core.hears_of_all(h.now)
    h.run("a.0")
    assert h.core.hears_of_all(h.now + SILENCE_S / 2) and not h.core.hears_of_all(h.now + SILENCE_S * 2)
    h.now += SILENCE_S * 2
    h.report(row("a.0"))
    assert h.core.hears_of_all(h.now)


# --- spare grants ----------------------------------------------------------------------------------------------------


def granted(h: Hand, *spares: int, num_free: int = 50) -> list[int]:
    """Answers the grant that is under way; the blocks sent to the worker."""
    (grant,) = h.pending(Grant)
    h.answer(grant, spare_block_ids=spares, num_free=num_free)
    return [b for c in changes(h.until_quiet()) if isinstance(c, Extend) for b in c.block_ids]


def test_who_decodes_gets_spares() -> None:
    h = Hand()
    assert calls(h.until_quiet(), Grant) == []
    h.run("a.0")
    assert granted(h, 50, 51) == [50, 51] and h.view().spares == {50, 51}
    assert h.until_quiet() == []


def test_spares_are_topped_up_with_what_is_new_only() -> None:
    h = Hand()
    h.run("a.0")
    granted(h, 50, 51)
    taken = (Taken(sid="a.0", epoch=1, index=3, block_id=50), Taken(sid="a.0", epoch=1, index=4, block_id=51))
    h.report(row("a.0"), taken=taken)
    h.answer_updates(h.until_quiet())
    assert h.view().spares == set()
    assert granted(h, 52, 53) == [52, 53]


def test_a_block_is_not_given_twice_though_the_grant_overtakes_the_update() -> None:
    """The store has answered the grant after it learnt of the taken block; its answers come the other way round."""
    h = Hand()
    h.run("a.0")
    granted(h, 50, 51)
    h.view().tokens_per_second = 100
    h.report(row("a.0"), taken=(TAKEN,), speed=100)
    (update,) = calls(h.decide(), Update)
    assert h.view().spares == {50, 51}
    h.now += 1
    (grant,) = calls(h.decide(), Grant)
    h.answer(grant, spare_block_ids=(51, 52))
    assert changes(h.decide()) == [Extend(sid="", epoch=0, pool_term=5, block_ids=(52,))]
    h.answer(update)
    assert h.view().spares == {51, 52} and changes(h.decide()) == []


def test_an_old_grant_does_not_give_a_taken_block_again() -> None:
    """It was answered before the store learnt of the taken block, and comes after."""
    h = Hand()
    h.run("a.0")
    granted(h, 50, 51)
    h.report(row("a.0"), speed=100)
    (grant,) = calls(h.decide(), Grant)
    h.report(row("a.0"), taken=(TAKEN,), speed=100)
    h.answer_updates(h.decide())
    h.answer(grant, spare_block_ids=(50, 51, 52))
    actions = h.until_quiet()
    assert changes(actions) == []
    (again,) = calls(actions, Grant)
    h.answer(again, spare_block_ids=(51, 52))
    assert changes(h.until_quiet()) == [Extend(sid="", epoch=0, pool_term=5, block_ids=(52,))]


def test_a_second_answer_to_a_grant_is_ignored() -> None:
    h = Hand()
    h.run("a.0")
    (grant,) = calls(h.until_quiet(), Grant)
    h.answer(grant, spare_block_ids=(50,))
    h.answer(grant, spare_block_ids=(50, 51))
    assert changes(h.until_quiet()) == [Extend(sid="", epoch=0, pool_term=5, block_ids=(50,))]


def test_one_grant_at_a_time() -> None:
    h = Hand()
    h.run("a.0")
    assert len(calls(h.until_quiet(), Grant)) == 1
    h.report(row("a.0"), speed=1000.0)
    assert calls(h.until_quiet(), Grant) == []


@pytest.mark.parametrize("status", ["not_ready", "stale"])
def test_a_refused_grant_is_not_asked_for_at_once(status: str) -> None:
    h = Hand()
    h.run("a.0")
    (grant,) = calls(h.until_quiet(), Grant)
    h.answer(grant, status=status)
    actions = h.until_quiet()
    assert calls(actions, Grant) == [] and isinstance(changes(actions)[0], TakeOver) and not h.view().granting


def test_a_grant_under_way_is_forgotten_with_its_store() -> None:
    h = Hand()
    h.run("a.0")
    (old,) = calls(h.until_quiet(), Grant)
    h.core.set_store("w", "c2", 6)
    h.make_ready("w", row("a.0"))
    assert granted(h, 60) == [60]
    h.answer(old, spare_block_ids=(50,))
    assert changes(h.until_quiet()) == []


def full_and_idle(h: Hand) -> None:
    """The worker has spares left, nothing runs, and a sequence as large as the pool does not fit."""
    h.run("a.0")
    granted(h, 50, 51)
    h.report(ended=(("a.0", 1, "stop"),))
    h.answer_updates(h.until_quiet(), num_free=98)
    h.answer(h.ensure("large.0", 399), status="full", num_needed=100, num_free=98)


def test_an_idle_worker_gives_its_spares_back_for_a_prompt_as_large_as_the_pool() -> None:
    h = Hand()
    full_and_idle(h)
    actions = h.until_quiet()
    h.answer_updates(actions, num_free=98)  # of the refused one
    actions = h.until_quiet()
    assert changes(actions) == [Reclaim(pool_term=5, block_ids=(50, 51))]
    (update,) = calls(actions, Update)
    assert update.reclaimed == (50, 51) and not h.view().spares
    assert [type(a) for a in actions if a in only(actions, Plan) or calls([a], Update)][0] is Plan  # the plan is first
    h.answer(update, num_free=100)
    assert [e.sid for e in calls(h.until_quiet(), Ensure)] == ["large.0"]


def test_nothing_is_reclaimed_while_a_grant_is_under_way() -> None:
    h = Hand()
    h.run("a.0")
    granted(h, 50, 51)
    h.report(row("a.0"), speed=100)
    (grant,) = calls(h.decide(), Grant)
    h.report(ended=(("a.0", 1, "stop"),))
    h.answer_updates(h.until_quiet(), num_free=98)
    h.answer(h.ensure("large.0", 399), status="full", num_needed=100, num_free=98)
    h.answer_updates(h.until_quiet())
    assert [c for c in changes(h.until_quiet()) if isinstance(c, Reclaim)] == []
    h.answer(grant, spare_block_ids=(50, 51, 52), num_free=97)
    reclaimed = [c for c in changes(h.until_quiet()) if isinstance(c, Reclaim)]
    assert reclaimed == [Reclaim(pool_term=5, block_ids=(50, 51, 52))]


def test_blocks_that_are_held_for_nobody_are_found_by_asking_anew() -> None:
    h = Hand()
    h.answer(h.ensure("large.0", 399), status="full", num_needed=100, num_free=90)
    h.answer_updates(h.until_quiet(), num_free=90)
    assert [type(c) for c in changes(h.until_quiet())] == [TakeOver]
    h.make_ready()
    assert [e.sid for e in calls(h.until_quiet(), Ensure)] == ["large.0"]


# --- where blocks have run out ---------------------------------------------------------------------------------------


def starving(h: Hand, *sids: str, **fields: int) -> list[object]:
    """They run, nothing is free, and the first of them cannot go on; what is done about it."""
    for sid in sids:
        h.run(sid, arrival_ms=len(h.view().running), **fields)
    while grants := h.pending(Grant):
        h.answer(grants[0], num_free=0)
    h.report(*(row(sid, starved=sid == sids[0]) for sid in sids))
    return [c for c in changes(h.until_quiet()) if isinstance(c, Preempt)]


def test_one_gives_way_to_who_cannot_go_on() -> None:
    h = Hand()
    assert starving(h, "a.0", "b.0", "c.0") == [Preempt(sid="c.0", epoch=1)]  # as cheap as the others, and the latest


def test_one_at_a_time_gives_way() -> None:
    h = Hand()
    starving(h, "a.0", "b.0", "c.0")
    for _ in range(3):
        h.report(*(row(sid, starved=True) for sid in ("a.0", "b.0", "c.0")))
        assert changes(h.until_quiet()) == []


def test_nobody_else_gives_way_before_the_blocks_are_counted() -> None:
    h = Hand()
    starving(h, "a.0", "b.0", "c.0")
    h.report(row("a.0", starved=True), row("b.0"), ended=(("c.0", 1, "preempted"),))
    actions = h.until_quiet()
    assert only(actions, Requeue) == [Requeue("c.0", 1)] and changes(actions) == []
    h.answer_updates(actions, num_free=3)
    assert changes(h.until_quiet()) == [] and not only(h.until_quiet(), Finish)


def test_who_is_alone_is_not_ended_before_the_blocks_are_counted() -> None:
    """The one that gave way has just been reported: its blocks are free as soon as the store has learnt it."""
    h = Hand()
    starving(h, "a.0", "b.0")
    h.report(row("a.0", starved=True), ended=(("b.0", 1, "preempted"),))
    actions = h.until_quiet()
    assert only(actions, Finish) == []
    h.answer_updates(actions, num_free=3)
    assert granted(h, 50, num_free=2) == [50]
    h.report(row("a.0", starved=True))  # sent before it had the block
    actions = h.until_quiet()
    assert only(actions, Finish) == [] and changes(actions) == []


def test_who_is_alone_and_has_all_ends_with_its_length() -> None:
    h = Hand()
    h.run("a.0")
    (grant,) = h.pending(Grant)
    h.answer(grant, num_free=0)
    for _ in range(3):
        h.report(row("a.0", starved=True))
    (finish,) = only(h.until_quiet(), Finish)
    assert (finish.sid, finish.epoch, finish.outcome.reason) == ("a.0", 1, "length")
    h.report(row("a.0", starved=True))
    assert only(h.until_quiet(), Finish) == []


def test_what_is_on_its_way_is_waited_for() -> None:
    h = Hand()
    h.run("a.0")
    (grant,) = calls(h.until_quiet(), Grant)
    h.answer(grant, num_free=0)
    ensure = h.ensure("b.0")
    h.report(row("a.0", starved=True))
    assert only(h.until_quiet(), Finish) == []
    h.answer(ensure, status="full", num_needed=3, num_free=0)
    h.answer_updates(h.until_quiet(), num_free=0)
    assert len(only(h.until_quiet(), Finish)) == 1


def test_followers_do_not_keep_the_starving_waiting() -> None:
    h = Hand()
    h.run("a.0")
    (grant,) = calls(h.until_quiet(), Grant)
    h.answer(grant, num_free=0)
    h.answer(h.ensure("b.0"), status="wait", leader="a.0", leader_index=5)
    h.report(row("a.0", starved=True))
    assert len(only(h.until_quiet(), Finish)) == 1


def test_spares_that_nobody_takes_are_not_where_they_seem_to_be() -> None:
    h = Hand()
    h.run("a.0")
    granted(h, 50, 51, num_free=0)
    h.report(row("a.0", starved=True))
    assert h.until_quiet() == []
    h.now += STARVED_TIMEOUT_S + 0.1
    assert [type(c) for c in changes(h.until_quiet())] == [TakeOver]


def test_the_starving_are_given_what_is_free() -> None:
    h = Hand()
    h.run("a.0")
    granted(h, 50, 51, num_free=1)
    h.report(row("a.0", starved=True), taken=(TAKEN, Taken(sid="a.0", epoch=1, index=4, block_id=51)))
    actions = h.until_quiet()
    assert changes(actions) == [] and not only(actions, Finish)
    h.answer_updates(actions, num_free=1)
    assert granted(h, 52, num_free=0) == [52]


def test_a_lower_priority_is_the_victim() -> None:
    h = Hand()
    h.run("low.0", 300, priority=9)
    assert starving(h, "a.0", "b.0") == [Preempt(sid="low.0", epoch=1)]


def test_what_gave_way_can_come_back() -> None:
    h = Hand()
    starving(h, "a.0", "b.0")
    h.report(row("a.0"), ended=(("b.0", 1, "preempted"),))
    h.answer_updates(h.until_quiet(), num_free=10)
    h.queue("b.0", epoch=1)
    (ensure,) = calls(h.until_quiet(), Ensure)
    assert (ensure.sid, ensure.epoch, ensure.keep_free) == ("b.0", 2, 1)
    assert isinstance(h.give(ensure), Assign)


def test_a_worker_whose_engine_stands_still_is_given_up_once() -> None:
    h = Hand()
    h.run("r.0")
    for _ in range(70):
        h.now += 0.1
        report = Report(
            worker="w", term=3, pool_term=5, running=(row("r.0"),), num_steps=9, hang_s=5.0, tokens_per_second=1.0
        )
        h.core.on_message(report, h.now)
        if expelled := only(h.until_quiet(), Expel):
            break
    assert expelled == [Expel("w")]
    h.core.lose_worker("w")
    assert only(h.until_quiet(), Expel) == []
