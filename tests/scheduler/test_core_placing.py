"""The core, event by event: how a sequence gets from its header onto a worker, and what may come in between."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.actions import Assign, Finish, Plan, ReadRecord
from services.scheduler.batcher import FOLLOW_TIMEOUT_S
from services.scheduler.cache_client import REPEAT_AFTER_S
from services.scheduler.matching import MATCH_TIMEOUT_S
from services.scheduler.sequence import QueueState, Running
from services.scheduler.worker_view import Phase
from shared.records import Deadlines, SequenceRecord
from shared.store_calls import Ensure, Match, Update
from shared.worker_protocol import Admit, Preempt, Seal, TakeOver
from tests.scheduler.hand import BLOCK_SIZE, NUM_BLOCKS, SALT, Hand, calls, changes, member, only, row

ALL_TOKENS = NUM_BLOCKS * BLOCK_SIZE


def seal(sid: str, index: int, epoch: int = 1) -> Seal:
    return Seal(sid=sid, epoch=epoch, index=index, block_id=index, ids=(1,) * BLOCK_SIZE)


# --- one sequence ----------------------------------------------------------------------------------------------------


def test_from_the_header_to_the_worker() -> None:
    h = Hand()
    h.queue("r.0", 10)
    assert h.decide() == [ReadRecord("r.0")]
    h.read("r.0")
    (ensure,) = calls(h.decide(), Ensure)
    assert (ensure.worker, ensure.run_term, ensure.pool_term) == ("w", 3, 5)
    assert (ensure.sid, ensure.epoch, ensure.salt, len(ensure.ids)) == ("r.0", 1, SALT, 40)
    h.answer(ensure, block_ids=(4, 5, 6), cached_length=4)
    admit = Admit(sid="r.0", epoch=1, pool_term=5, cached_length=4, block_ids=(4, 5, 6))
    (assign,) = h.decide()
    assert assign == Assign("r.0", 0, "w", 3, admit)
    h.core.on_assigned(assign, "ok", h.now)
    assert h.core.queue == {} and h.view().running["r.0"].epoch == 1 and not h.view().placing
    assert h.core.counts["assigned"] == 1 and h.core.counts["cached_tokens"] == 4


def test_a_sequence_that_comes_back_is_read_with_its_output() -> None:
    h = Hand()
    h.queue("r.0", 10, epoch=4, num_output_tokens=3)
    h.decide()
    h.core.on_record("r.0", bytes(4 * 15), SALT)  # two tokens more had been committed
    (ensure,) = calls(h.decide(), Ensure)
    assert ensure.epoch == 5 and len(ensure.ids) == 60 and h.core.queue["r.0"].num_tokens == 15


def test_a_prompt_whose_log_probabilities_are_missing_matches_nothing() -> None:
    h = Hand()
    for sid, scoring in (("r.0", True), ("s.0", False)):
        h.queue(sid, 10)
        h.decide()
        h.core.on_record(sid, bytes(40), SALT, scoring=scoring)
        (ensure,) = calls(h.decide(), Ensure)
        assert (ensure.use_cached, ensure.wait_for_leader) == (not scoring, not scoring)


def test_a_record_that_is_gone_ends_it() -> None:
    h = Hand()
    h.queue()
    h.decide()
    h.core.on_record("r.0", None, b"")
    assert h.core.queue == {} and h.decide() == []


def test_a_header_is_taken_once() -> None:
    h = Hand()
    first = h.queue()
    h.until_quiet()
    h.queue()
    assert h.core.queue["r.0"] is first and first.state is QueueState.ENSURING


def test_an_old_header_of_a_running_sequence_is_not_taken() -> None:
    h = Hand()
    h.run()
    h.queue("r.0", epoch=0)
    assert h.core.queue == {}
    h.queue("r.0", epoch=1)  # queued again: the worker will learn it
    assert "r.0" in h.core.queue


def test_a_newer_header_takes_the_place_of_an_older_one() -> None:
    h = Hand()
    old = h.ensure()
    h.queue("r.0", epoch=1)
    actions = h.until_quiet()
    assert [u.released for u in calls(actions, Update)] == [(("r.0", 1),)]
    assert [e.epoch for e in calls(actions, Ensure)] == [2]
    h.answer(old, block_ids=(1, 2, 3))  # nobody waits for it any more
    assert only(h.decide(), Assign) == [] and h.view().placing == {"r.0"}


def test_nothing_happens_without_workers_or_stores() -> None:
    h = Hand()
    h.core.lose_worker("w")
    h.queue()
    assert h.decide() == [] and h.core.queue["r.0"].state is QueueState.WAITING


# --- the order -------------------------------------------------------------------------------------------------------


def test_nobody_passes_the_first_in_line() -> None:
    h = Hand(max_num_seqs=4)
    for i in range(5):
        h.run(f"r{i}.0")
    h.queue("first.0", 50, arrival_ms=1)
    h.queue("second.0", 1, arrival_ms=900)
    assert h.until_quiet() == []
    h.report(ended=(("r0.0", 1, "stop"),))
    assert [e.sid for e in calls(h.until_quiet(), Ensure)] == ["first.0"]


def test_a_long_prompt_stands_back_a_little() -> None:
    h = Hand(max_num_seqs=1)
    h.run("r0.0")
    h.run("r1.0")
    h.queue("long.0", 300, arrival_ms=0)
    h.queue("short.0", 3, arrival_ms=200)
    h.queue("late.0", 3, arrival_ms=400)
    order = []
    for _ in range(3):
        running = next(iter(h.view().running))
        h.report(ended=((running, 1, "stop"),))
        (ensure,) = calls(h.until_quiet(), Ensure)
        order.append(ensure.sid)
        h.core.on_assigned(h.give(ensure), "ok", h.now)
    assert order == ["short.0", "long.0", "late.0"]


def test_priority_comes_before_arrival() -> None:
    h = Hand(max_num_seqs=1)
    h.run("r0.0")
    h.run("r1.0")
    h.queue("usual.0", 3, arrival_ms=0)
    h.queue("urgent.0", 3, arrival_ms=99, priority=-1)
    h.report(ended=(("r0.0", 1, "stop"),))
    assert [e.sid for e in calls(h.until_quiet(), Ensure)] == ["urgent.0"]


def test_no_more_are_prepared_than_have_room() -> None:
    """Else every free slot would have the whole queue read and matched again."""
    h = Hand("w1", "w2", max_num_seqs=1)
    for i in range(9):
        h.queue(f"q{i}.0", 10)
    actions = h.until_quiet()
    num_slots = 2 * 2  # one more than it takes, on each worker
    assert len(only(actions, ReadRecord)) == num_slots and len({m.ids for m in calls(actions, Match)}) == num_slots


# --- several workers -------------------------------------------------------------------------------------------------


def matched(h: Hand, cached: dict[str, int]) -> list[Ensure]:
    h.queue("r.0", 300)
    matches = calls(h.until_quiet(), Match)
    assert {m.worker for m in matches} == set(h.core.workers)
    for match in matches:
        if match.worker in cached:
            h.answer(match, cached_length=cached[match.worker])
    return calls(h.until_quiet(), Ensure)


def test_the_longest_prefix_wins() -> None:
    assert [e.worker for e in matched(Hand("w1", "w2"), {"w1": 0, "w2": 100})] == ["w2"]


def test_load_outweighs_a_short_prefix() -> None:
    h = Hand("w1", "w2")
    for i in range(3):
        h.view("w2").running[f"q{i}.0"] = Running(f"q{i}.0", 1, 10)
    assert [e.worker for e in matched(h, {"w1": 0, "w2": 100})] == ["w1"]


def test_a_store_that_does_not_answer_is_not_waited_for_long() -> None:
    h = Hand("w1", "w2")
    assert matched(h, {"w1": 0}) == []
    h.now += MATCH_TIMEOUT_S
    assert [e.worker for e in calls(h.until_quiet(), Ensure)] == ["w1"]


def test_where_matched_room_is_gone_it_waits_again() -> None:
    h = Hand("w1", "w2")
    h.queue("r.0", 300)
    h.until_quiet()
    for worker in ("w1", "w2"):
        h.view(worker).handing_over = True
    h.now += MATCH_TIMEOUT_S
    assert calls(h.decide(), Ensure) == [] and h.core.queue["r.0"].state is QueueState.WAITING


def test_without_prefix_caching_nobody_is_asked() -> None:
    h = Hand("w1", "w2", prefix_caching=False)
    ensure = h.ensure()
    assert not ensure.use_cached and not ensure.wait_for_leader


def test_a_worker_that_is_handed_over_gets_nothing_more() -> None:
    h = Hand("w1", "w2")
    h.view("w1").handing_over = True
    assert h.ensure().worker == "w2"


# --- leaders ---------------------------------------------------------------------------------------------------------


def following(h: Hand, leader: str = "lead.0", index: int = 1, **fields: Any) -> None:
    h.answer(h.ensure("r.0"), status="wait", leader=leader, leader_index=index, **fields)
    assert h.until_quiet() == [] and h.view().following == {"r.0"} and "r.0" not in h.view().placing


def test_a_follower_goes_on_when_the_block_is_sealed() -> None:
    h = Hand()
    h.run("lead.0")
    following(h)
    h.report(seals=(seal("lead.0", 0),))
    assert calls(h.until_quiet(), Ensure) == []
    h.report(seals=(seal("lead.0", 1),))
    (ensure,) = calls(h.until_quiet(), Ensure)
    assert ensure.sid == "r.0" and ensure.wait_for_leader and not h.view().following


def test_a_follower_goes_on_when_its_leader_has_ended() -> None:
    for reason in ("stop", "preempted", "cancelled"):
        h = Hand()
        h.run("lead.0")
        following(h)
        h.report(ended=(("lead.0", 1, reason),))
        assert [e.sid for e in calls(h.until_quiet(), Ensure)] == ["r.0"]


def test_a_seal_that_came_before_the_answer_is_not_missed() -> None:
    h = Hand()
    h.run("lead.0")
    ensure = h.ensure()
    h.report(seals=(seal("lead.0", 0), seal("lead.0", 1)))
    h.answer(ensure, status="wait", leader="lead.0", leader_index=1)
    assert [e.sid for e in calls(h.until_quiet(), Ensure)] == ["r.0"]


def test_a_leader_on_its_way_is_waited_for() -> None:
    h = Hand()
    lead = h.assign("lead.0")
    following(h)
    h.core.on_assigned(lead, "stale", h.now)  # cancelled: it will never run
    assert [e.sid for e in calls(h.until_quiet(), Ensure)] == ["r.0"]


def test_a_leader_that_nobody_knows_is_asked_about_once_more() -> None:
    h = Hand()
    h.answer(h.ensure(), status="wait", leader="ghost.0", leader_index=1)
    (again,) = calls(h.until_quiet(), Ensure)
    assert again.wait_for_leader
    h.answer(again, status="wait", leader="ghost.0", leader_index=1)
    (last,) = calls(h.until_quiet(), Ensure)
    assert not last.wait_for_leader


def test_a_follower_does_not_wait_for_ever() -> None:
    h = Hand()
    h.run("lead.0")
    following(h)
    h.now += FOLLOW_TIMEOUT_S + 0.1
    (ensure,) = calls(h.until_quiet(), Ensure)
    assert not ensure.wait_for_leader


def test_a_follower_waits_for_a_leader_that_gets_on() -> None:
    """However slow the machine: else all would compute what one of them is about to have."""
    h = Hand()
    h.run("lead.0")
    following(h)
    h.now += FOLLOW_TIMEOUT_S - 0.1
    h.report(seals=(seal("lead.0", 0),))
    assert calls(h.until_quiet(), Ensure) == []
    h.now += FOLLOW_TIMEOUT_S - 0.1
    assert calls(h.until_quiet(), Ensure) == []
    h.now += 0.2
    (ensure,) = calls(h.until_quiet(), Ensure)
    assert not ensure.wait_for_leader


def test_followers_count_as_load() -> None:
    h = Hand(max_num_seqs=1)
    h.run("lead.0")
    following(h)
    h.queue("more.0")
    assert h.until_quiet() == []


# --- no room ---------------------------------------------------------------------------------------------------------


def test_full_waits_until_more_is_free() -> None:
    h = Hand()
    h.run("a.0")
    h.answer(h.ensure(), status="full", num_needed=3, num_free=2)
    actions = h.until_quiet()
    assert calls(actions, Ensure) == [] and h.core.queue["r.0"].state is QueueState.WAITING and not h.view().placing
    h.answer_updates(actions, num_free=2)
    assert calls(h.until_quiet(), Ensure) == []
    h.report(seals=(seal("a.0", 0),))
    h.answer_updates(h.decide(), num_free=4)
    assert [e.sid for e in calls(h.until_quiet(), Ensure)] == ["r.0"]


def test_what_was_refused_is_given_up_there() -> None:
    """A late copy of the question must not hold blocks for a sequence that goes elsewhere."""
    h = Hand()
    h.run("a.0")
    h.answer(h.ensure(), status="full", num_needed=3, num_free=2)
    assert [u.released for u in calls(h.until_quiet(), Update)] == [(("r.0", 1),)]


def test_full_waits_until_fewer_are_running() -> None:
    h = Hand()
    h.run("a.0")
    ensure = h.ensure()
    assert ensure.keep_free == 1
    h.answer(ensure, status="full", num_needed=3, num_free=3)
    h.until_quiet()
    h.report(ended=(("a.0", 1, "stop"),))
    h.answer_updates(h.decide(), num_free=3)
    (again,) = calls(h.until_quiet(), Ensure)
    assert again.keep_free == 0


def test_a_refusal_ends_no_other_refusal() -> None:
    h = Hand()
    h.run("a.0")
    h.answer(h.ensure("r.0"), status="full", num_needed=9, num_free=2)
    for _ in range(3):
        actions = h.until_quiet()
        h.answer_updates(actions, num_free=2)
        assert calls(actions, Ensure) == []


def test_where_blocks_are_scarce_one_is_asked_for_after_another() -> None:
    """Else a small one behind takes what a large one in front waits for, for ever."""
    h = Hand()
    h.view().num_free = 10
    h.queue("large.0", 39, arrival_ms=0)
    h.queue("small.0", 7, arrival_ms=900)
    (large,) = calls(h.until_quiet(), Ensure)
    assert large.sid == "large.0"
    h.answer(large, status="full", num_needed=10, num_free=9)
    assert calls(h.until_quiet(), Ensure) == []


def test_where_blocks_abound_all_are_asked_for_at_once() -> None:
    h = Hand()
    for i in range(4):
        h.queue(f"r{i}.0", 10)
    assert len(calls(h.until_quiet(), Ensure)) == 4


def test_a_lower_priority_gives_way() -> None:
    h = Hand()
    h.run("low.0", priority=5)
    h.run("same.0", priority=0)
    h.answer(h.ensure("r.0"), status="full", num_needed=3, num_free=2)
    assert [c for c in changes(h.until_quiet()) if isinstance(c, Preempt)] == [Preempt(sid="low.0", epoch=1)]


def test_nobody_gives_way_to_what_never_fits() -> None:
    """It needs more blocks than there are, though its tokens alone would fit: it ends, and what runs goes on."""
    h = Hand()
    h.run("low.0", priority=5)
    h.answer(h.ensure("r.0"), status="full", num_needed=h.view().member.num_blocks + 1, num_free=2)
    actions = h.until_quiet()
    assert [a.sid for a in actions if isinstance(a, Finish)] == ["r.0"]
    assert changes(actions) == [] and h.view().full_at == -1


def test_nobody_gives_way_while_an_end_is_being_told() -> None:
    h = Hand()
    h.run("low.0", priority=5)
    h.run("ending.0")
    ensure = h.ensure("r.0")
    h.report(ended=(("ending.0", 1, "stop"),))
    (update,) = calls(h.decide(), Update)
    h.answer(ensure, status="full", num_needed=3, num_free=2)
    assert changes(h.until_quiet()) == []
    h.answer(update, num_free=2)
    (again,) = calls(h.until_quiet(), Ensure)
    h.answer(again, status="full", num_needed=3, num_free=2)
    assert changes(h.until_quiet()) == [Preempt(sid="low.0", epoch=1)]


def test_an_equal_priority_does_not_give_way() -> None:
    h = Hand()
    h.run("same.0")
    h.answer(h.ensure("r.0"), status="full", num_needed=3, num_free=2)
    assert changes(h.until_quiet()) == []


def test_what_never_fits_is_refused_with_the_real_number() -> None:
    h = Hand()
    h.queue("r.0", ALL_TOKENS)
    h.queue("q.0", 10)
    actions = h.until_quiet()
    (finish,) = only(actions, Finish)
    assert (finish.sid, finish.epoch, finish.outcome.reason) == ("r.0", 0, "error")
    assert finish.outcome.code == "context_length_exceeded" and str(ALL_TOKENS) in finish.outcome.message
    assert [e.sid for e in calls(actions, Ensure)] == ["q.0"] and "r.0" not in h.core.queue


def test_nothing_is_refused_before_all_workers_are_known() -> None:
    h = Hand("w1", "w2")
    h.core.set_store("w2", "c2", 6)
    h.queue("r.0", ALL_TOKENS)
    assert only(h.until_quiet(), Finish) == []


def test_the_largest_that_fits_is_placed() -> None:
    assert Hand().ensure("r.0", ALL_TOKENS - 1).epoch == 1


def test_a_context_is_as_long_as_the_model_allows() -> None:
    h = Hand(max_model_len=50)
    h.queue("r.0", 50)
    assert len(only(h.until_quiet(), Finish)) == 1
    assert h.ensure("q.0", 49)


@pytest.mark.parametrize("fields", [{}, {"max_model_len": 50}])
def test_a_prompt_that_nothing_is_drawn_after_needs_no_slot_more(fields: dict[str, int]) -> None:
    """Only its record tells that, so it is read where one token more would be too many."""
    h, most = Hand(**fields), fields.get("max_model_len", ALL_TOKENS)
    h.queue("r.0", most)
    assert only(h.decide(), ReadRecord) and not only(h.until_quiet(), Finish)
    h.core.on_record("r.0", bytes(4 * most), SALT, scoring=True, draws=False)
    (ensure,) = calls(h.until_quiet(), Ensure)
    assert len(ensure.ids) == 4 * (most - 1)  # the store adds a slot, and holds no block more than there are
    h.queue("q.0", most + 1)
    assert [f.sid for f in only(h.until_quiet(), Finish)] == ["q.0"]


def test_a_single_token_that_nothing_is_drawn_after_has_a_block() -> None:
    h = Hand()
    h.queue("r.0", 1)
    h.decide()
    h.core.on_record("r.0", bytes(4), SALT, scoring=False, draws=False)
    (ensure,) = calls(h.until_quiet(), Ensure)
    assert len(ensure.ids) == 4


# --- cancelled -------------------------------------------------------------------------------------------------------


def test_cancelled_while_it_waits_or_is_read() -> None:
    h = Hand()
    h.queue()
    h.core.on_cancelled("r.0", h.now)
    assert h.core.queue == {} and h.decide() == []
    h.queue()
    h.decide()
    h.core.on_cancelled("r", h.now)
    h.core.on_record("r.0", bytes(40), SALT)
    assert h.core.queue == {} and h.decide() == []


def test_cancelled_while_stores_are_asked() -> None:
    h = Hand("w1", "w2")
    h.queue()
    matches = calls(h.until_quiet(), Match)
    h.core.on_cancelled("r.0", h.now)
    for match in matches:
        h.answer(match)
    assert h.until_quiet() == [] and h.core.queue == {}


@pytest.mark.parametrize("status", ["ok", "wait", "full"])
def test_cancelled_while_a_store_allocates(status: str) -> None:
    h = Hand()
    ensure = h.ensure()
    h.core.on_cancelled("r.0", h.now)
    assert [u.released for u in calls(h.decide(), Update)] == [(("r.0", 1),)]
    h.answer(ensure, status=status)
    h.now += 10
    assert not only(h.decide(), Assign) and not h.view().placing and not h.core.queue


def test_cancelled_while_it_follows() -> None:
    h = Hand()
    h.run("lead.0")
    following(h)
    h.core.on_cancelled("r.0", h.now)
    assert [u.released for u in calls(h.decide(), Update)] == [(("r.0", 1),)] and not h.view().following


def test_cancelled_while_it_is_assigned() -> None:
    h = Hand()
    assign = h.assign()
    h.core.on_cancelled("r.0", h.now)
    h.core.on_assigned(assign, "stale", h.now)
    assert [u.released for u in calls(h.decide(), Update)] == [(("r.0", 1),)]
    assert h.core.queue == {} and not h.view().placing and not h.view().running


def test_cancelled_choices_leave_the_others() -> None:
    h = Hand(max_num_seqs=1)
    for sid in ("a.0", "b.0", "r.0", "r.1", "rr.0"):
        h.queue(sid)
    h.core.on_cancelled("r.0", h.now)
    assert "r.1" in h.core.queue and "r.0" not in h.core.queue
    h.core.on_cancelled("r", h.now)
    assert set(h.core.queue) == {"a.0", "b.0", "rr.0"}


# --- the answers of `assign` -----------------------------------------------------------------------------------------


def test_stale_gives_the_blocks_back() -> None:
    h = Hand()
    h.core.on_assigned(h.assign(), "stale", h.now)
    assert [u.released for u in calls(h.decide(), Update)] == [(("r.0", 1),)]
    assert h.core.queue == {} and not h.view().placing


@pytest.mark.parametrize("status", ["fenced", "gone"])
def test_a_worker_of_another_scheduler_leaves_it_waiting(status: str) -> None:
    h = Hand()
    h.core.on_assigned(h.assign(), status, h.now)
    h.core.lose_worker("w")
    assert h.core.queue["r.0"].state is QueueState.WAITING
    h.core.gain_worker(member(), term=4)
    h.core.set_store("w", "c", 5)
    h.make_ready()
    assert [e.run_term for e in calls(h.until_quiet(), Ensure)] == [4]


def test_an_answer_for_an_old_term_does_not_touch_the_new_one() -> None:
    h = Hand()
    assign = h.assign()
    h.core.gain_worker(member(), term=4)
    h.core.set_store("w", "c", 5)
    h.core.on_assigned(assign, "fenced", h.now)
    assert h.core.workers["w"].term == 4 and h.core.queue["r.0"].state is QueueState.WAITING


def test_a_late_answer_does_not_drop_a_newer_header() -> None:
    h = Hand()
    assign = h.assign()
    h.queue("r.0", epoch=1)  # it was assigned, refused by the worker and queued again, all before the answer
    h.core.on_assigned(assign, "stale", h.now)
    assert h.core.queue["r.0"].epoch == 1


def test_an_old_header_does_not_release_what_runs() -> None:
    """Another scheduler had placed it here before this one took over, and the header was still in memory."""
    h = Hand()
    assign = h.assign()
    h.view().running["r.0"] = Running("r.0", 1, 10)
    h.core.on_assigned(assign, "stale", h.now)
    assert calls(h.decide(), Update) == []


def test_an_end_that_comes_before_the_answer_leaves_no_ghost() -> None:
    h = Hand()
    assign = h.assign()
    h.report(ended=(("r.0", 1, "stop"),))
    h.core.on_assigned(assign, "ok", h.now)
    assert not h.view().running and not h.view().placing and not h.core.queue


def test_a_refusal_that_comes_before_the_answer_is_queued_again() -> None:
    h = Hand()
    assign = h.assign()
    h.report(ended=(("r.0", 1, "refused"),))
    h.queue("r.0", epoch=1)
    h.core.on_assigned(assign, "ok", h.now)
    assert h.core.queue["r.0"].epoch == 1 and not h.view().running


# --- the answers of stores -------------------------------------------------------------------------------------------


def test_calls_are_repeated_until_they_are_answered() -> None:
    h = Hand()
    ensure = h.ensure()
    h.now += REPEAT_AFTER_S / 2
    assert h.decide() == []
    h.now += REPEAT_AFTER_S
    assert calls(h.decide(), Ensure) == [ensure]
    h.answer(ensure)
    h.now += 1
    assert calls(h.decide(), Ensure) == []


def test_a_second_answer_changes_nothing() -> None:
    h = Hand()
    ensure = h.ensure()
    h.give(ensure)
    h.answer(ensure)
    assert h.decide() == []


def test_a_store_that_is_not_ready_is_reconciled_and_nothing_is_stuck() -> None:
    """Also what had been asked for besides: its answers will never come."""
    h = Hand()
    first, second = h.ensure("a.0"), h.ensure("b.0")
    h.answer(first, status="not_ready", pool_term=9)
    assert h.view().phase is Phase.TAKING_OVER and not h.view().placing
    assert all(q.state is QueueState.WAITING for q in h.core.queue.values())
    h.make_ready()
    assert {e.sid for e in calls(h.until_quiet(), Ensure)} == {"a.0", "b.0"}
    h.answer(second)  # of the old round
    assert only(h.decide(), Assign) == []


def test_an_old_header_that_the_store_knows_better_is_dropped() -> None:
    """It stays in the stream, and is claimed again if it is not old."""
    h = Hand()
    h.answer(h.ensure(), status="stale")
    h.until_quiet()
    assert h.core.queue == {} and not h.view().placing


def test_a_store_that_changes_starts_everything_again() -> None:
    h = Hand()
    assign, ensure = h.assign("a.0"), h.ensure("b.0")
    h.core.set_store("w", "c2", 6)
    assert h.view().placing == {"a.0"}  # it may have been assigned
    (plan,) = only(h.decide(), Plan)
    assert plan.changes == (TakeOver(term=3, inbox="s", ask=2),)
    h.answer(ensure)
    assert only(h.decide(), Assign) == []
    h.core.on_assigned(assign, "ok", h.now)
    h.make_ready("w", row("a.0"))
    assert [(e.sid, e.pool_term) for e in calls(h.until_quiet(), Ensure)] == [("b.0", 6)]


def test_a_store_that_reads_no_more_is_asked_nothing() -> None:
    h = Hand()
    h.ensure()
    h.core.lose_store("w", "another")
    assert h.view().phase is Phase.READY
    h.core.lose_store("w", "c")
    h.now += 1
    assert h.decide() == [] and h.core.queue["r.0"].state is QueueState.WAITING
    h.core.set_store("w", "c", 5)  # it is there again
    h.make_ready()


# --- suspects --------------------------------------------------------------------------------------------------------


def test_a_suspect_runs_in_steps_of_its_own() -> None:
    h = Hand()
    assert [h.assign(f"r{n}.0", strikes=n).admit for n in (0, 1, 2)] == [
        Admit(sid=f"r{n}.0", epoch=1, pool_term=5, cached_length=0, block_ids=(), alone=n == 2) for n in (0, 1, 2)
    ]


def test_one_suspect_a_worker() -> None:
    """So that the next death tells which of them it was; others pass those that wait for it."""
    h = Hand()
    h.run("s1.0", strikes=2)
    h.queue("s2.0", strikes=2)
    h.queue("q.0")
    assert [e.sid for e in calls(h.until_quiet(), Ensure)] == ["q.0"]
    h.report(ended=(("s1.0", 1, "stop"),))
    assert [e.sid for e in calls(h.until_quiet(), Ensure)] == ["s2.0"]


def test_suspects_go_to_different_workers() -> None:
    h = Hand("w1", "w2", prefix_caching=False)
    assert {h.ensure("s1.0", strikes=2).worker, h.ensure("s2.0", strikes=2).worker} == {"w1", "w2"}


def test_a_suspect_is_known_after_a_take_over() -> None:
    h = Hand()
    h.core.set_store("w", "c2", 6)
    h.make_ready("w", row("s1.0", epoch=3))
    record = SequenceRecord("placed", 3, "w", "g", 1, 0, 2, 10, b"", priority=4, arrival_ms=77)
    h.core.on_placed("w", "s1.0", record, Deadlines("k", first_by_ms=5, end_by_ms=6))
    h.queue("s2.0", strikes=2)
    assert calls(h.until_quiet(), Ensure) == []
    placed = h.view().running["s1.0"]
    assert (placed.priority, placed.arrival_ms) == (4, 77)
    assert (placed.key, placed.first_by_ms, placed.end_by_ms) == ("k", 5, 6)
