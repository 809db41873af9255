"""A worker with sequences that says nothing any more is looked at at once, not at the scheduler's next regular look."""

from __future__ import annotations

from services.scheduler.sequence import Running
from services.scheduler.worker_view import SILENCE_S, WorkerView
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
