"""What happens to sequences that run out of time, in the queue and on a worker."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.actions import Finish
from shared.store_calls import Ensure, Update
from tests.scheduler.hand import Hand, calls, only, row

REDIS_MS = 1_700_000_000_000  # far from any monotonic clock


def hand(**fields: Any) -> Hand:
    h = Hand(**fields)
    h.core.set_redis_time(REDIS_MS, h.now)
    return h


def codes(h: Hand) -> list[tuple[str, int, str]]:
    return [(f.sid, f.epoch, f.outcome.code) for f in only(h.until_quiet(), Finish)]


@pytest.mark.parametrize(
    ("field", "code"),
    [("start_by_ms", "queue_timeout"), ("first_by_ms", "first_token_timeout"), ("end_by_ms", "timeout")],
)
def test_what_waits_too_long_is_dropped(field: str, code: str) -> None:
    h = hand(max_num_seqs=1)
    for i in range(2):
        h.run(f"busy{i}.0")
    h.queue("r.0", **{field: REDIS_MS + 1000})
    h.now += 0.9
    assert codes(h) == [] and "r.0" in h.core.queue
    h.now += 0.2
    assert codes(h) == [("r.0", 0, code)] and not h.core.queue
    h.now += 1
    assert codes(h) == []


def test_what_a_store_is_asked_for_is_given_back_when_time_runs_out() -> None:
    h = hand()
    late = h.ensure("r.0", start_by_ms=REDIS_MS + 1000)
    h.now += 1.1
    actions = h.until_quiet()
    assert [f.outcome.code for f in only(actions, Finish)] == ["queue_timeout"]
    assert [u.released for u in calls(actions, Update)] == [(("r.0", 1),)]
    h.answer(late)
    assert not h.view().placing and not h.core.queue


def test_what_is_being_assigned_is_not_dropped_from_the_queue() -> None:
    h = hand()
    assign = h.assign("r.0", start_by_ms=REDIS_MS + 1000)
    h.now += 2
    assert codes(h) == []
    h.core.on_assigned(assign, "ok", h.now)
    assert codes(h) == [] and "r.0" in h.view().running


def test_a_running_sequence_ends_at_its_deadline_once() -> None:
    h = hand()
    h.run("r.0", end_by_ms=REDIS_MS + 1000)
    h.now += 0.9
    assert codes(h) == []
    h.now += 0.2
    assert codes(h) == [("r.0", 1, "timeout")]
    h.now += 1
    assert codes(h) == []


def test_the_first_token_has_its_own_deadline_until_it_is_there() -> None:
    h = hand()
    h.run("slow.0", first_by_ms=REDIS_MS + 1000)
    h.run("r.0", first_by_ms=REDIS_MS + 1000)
    h.report(row("slow.0", num_tokens=10), row("r.0", num_tokens=11))
    h.now += 1.1
    assert codes(h) == [("slow.0", 1, "first_token_timeout")]


def test_before_redis_has_told_the_time_nothing_is_late() -> None:
    h = Hand()
    h.run("r.0", end_by_ms=1)
    h.queue("q.0", start_by_ms=1)
    h.now += 1000
    assert codes(h) == []


def test_a_step_of_redis_clock_moves_deadlines_with_it() -> None:
    h = hand()
    h.run("r.0", end_by_ms=REDIS_MS + 1000)
    h.core.set_redis_time(REDIS_MS - 3_600_000, h.now)
    h.now += 5
    assert codes(h) == []


# --- before prefill --------------------------------------------------------------------------------------------------


def ensured(h: Hand, num_tokens: int, **deadlines: int) -> Ensure:
    h.run("other.0")
    h.report(row("other.0"), prefill_speed=100.0)
    return h.ensure("r.0", num_tokens, **deadlines)


@pytest.mark.parametrize("field", ["first_by_ms", "end_by_ms"])
def test_a_prompt_that_takes_longer_than_is_left_is_not_computed(field: str) -> None:
    h = hand()
    ensure = ensured(h, 200, **{field: REDIS_MS + 1500})
    h.answer(ensure)
    actions = h.until_quiet()
    (finish,) = only(actions, Finish)
    assert finish.outcome.code == "deadline_exceeded" and "2.0 s" in finish.outcome.message
    assert [u.released for u in calls(actions, Update)] == [(("r.0", 1),)]


def test_what_is_cached_need_not_be_computed() -> None:
    h = hand()
    h.give(ensured(h, 200, first_by_ms=REDIS_MS + 1500), cached_length=100)


def test_an_unknown_speed_refuses_nobody() -> None:
    h = hand()
    h.assign("r.0", 200, first_by_ms=REDIS_MS + 1)


def test_without_a_deadline_any_prompt_is_computed() -> None:
    h = hand()
    h.give(ensured(h, 200))


def test_how_long_sequences_waited_is_told_once() -> None:
    h = hand()
    h.run("r.0", arrival_ms=REDIS_MS - 250)
    h.run("moved.0", epoch=1, arrival_ms=REDIS_MS - 9999)
    assert h.core.take_waits_ms() == [250]
    assert h.core.take_waits_ms() == []
