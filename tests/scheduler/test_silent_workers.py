"""A worker with sequences that says nothing any more is looked at at once, not at the scheduler's next regular look."""

from __future__ import annotations

from services.scheduler.sequence import Running
from services.scheduler.worker_view import HANG_SLACK_S, SILENCE_S, WorkerView
from shared.leases import BUSY_LEASE_MS
from shared.protocol import Member


def view(**fields: float) -> WorkerView:
    return WorkerView(Member(kind="worker", incarnation="w-1", num_blocks=8, block_size=16), term=1, **fields)  # type: ignore[arg-type]


def test_only_a_worker_that_has_sequences_can_be_silent() -> None:
    worker = view(heard_at=10.0)
    assert not worker.is_silent(99.0)
    worker.running["r.0"] = Running("r.0", 1, 5)
    assert worker.is_silent(99.0)
    assert not worker.is_silent(9.9 + SILENCE_S)
    assert worker.is_silent(10.1 + SILENCE_S)


def test_silence_is_noticed_before_a_busy_lease_has_run_out() -> None:
    assert SILENCE_S < BUSY_LEASE_MS / 1000


def reports(worker: WorkerView, since: float, seconds: float, num_steps: int) -> None:
    """Regular ones, as takeover takes them in."""
    for i in range(round(seconds / 0.1) + 1):
        worker.heard_at = since + 0.1 * i
        worker.note_steps(num_steps, 5.0, worker.heard_at)


def test_a_worker_that_reports_the_same_step_for_too_long_is_hung() -> None:
    worker = view()
    worker.running["r.0"] = Running("r.0", 1, 5)
    reports(worker, 100.0, 5.0 + HANG_SLACK_S - 0.1, num_steps=7)
    assert not worker.is_hung()
    reports(worker, 105.0 + HANG_SLACK_S, 0.2, num_steps=7)
    assert worker.is_hung()
    reports(worker, 107.0, 0.0, num_steps=8)
    assert not worker.is_hung()


def test_a_worker_with_nothing_to_step_is_not_hung() -> None:
    worker = view()
    reports(worker, 100.0, 20.0, num_steps=7)
    assert not worker.is_hung()
    worker.running["r.0"] = Running("r.0", 1, 5, starved=True)
    reports(worker, 120.0, 20.0, num_steps=7)
    assert not worker.is_hung()
    worker.running["r.0"].starved = False  # since now
    reports(worker, 140.1, 4.0, num_steps=7)
    assert not worker.is_hung()


def test_old_reports_that_a_scheduler_finds_after_a_pause_are_not_believed() -> None:
    worker = view()
    worker.running["r.0"] = Running("r.0", 1, 5)
    reports(worker, 100.0, 0.1, num_steps=7)
    for now in (160.0, 160.0, 160.0):  # written at 100.2, …, read at once
        worker.heard_at = now
        worker.note_steps(7, 5.0, now)
    assert not worker.is_hung()
