"""What has run out of time: sequences that waited too long, cannot be in time any more, or run too long. *Pure.*

Deadlines are in Redis' time (ms; 0: none), which every process can ask for and no process' own clock decides: the shell
says now and then what it is, and between two sayings it goes on with the monotonic clock. Before it is known nothing
has run out. Time between tokens is the gateway's, which sees each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from services.scheduler.actions import Finish
from services.scheduler.outbound import Outbound
from services.scheduler.sequence import Queued, QueueState, Running
from services.scheduler.worker_view import WorkerView
from shared import timeouts
from shared.protocol import Outcome

LOOK_S = 0.1  # between two looks through everything


class Deadlines:
    """drop: takes a queued sequence out and ends it with an outcome."""

    def __init__(
        self, queue: Mapping[str, Queued], workers: Mapping[str, WorkerView], out: Outbound,
        drop: Callable[[Queued, Outcome, float], None],
    ) -> None:  # fmt: skip
        self._queue = queue
        self._workers = workers
        self._out = out
        self._drop = drop
        self._offset_ms = math.nan  # Redis' time less ours; compared with nothing while it is not known
        self._look_at = -math.inf

    def set_redis_time(self, redis_ms: float, now: float) -> None:
        self._offset_ms = redis_ms - now * 1000

    def enforce(self, now: float) -> None:
        if now < self._look_at or math.isnan(self._offset_ms):
            return
        self._look_at = now + LOOK_S
        redis_ms = self.redis_ms(now)
        for queued in list(self._queue.values()):
            outcome = _overdue(queued, redis_ms)
            if outcome is not None and queued.state is not QueueState.ASSIGNING:
                self._drop(queued, outcome, now)
        for view in self._workers.values():
            for running in view.running.values():
                outcome = _overdue(running, redis_ms)
                if outcome is not None and not running.ending:
                    running.ending = True
                    self._out.act(Finish(running.sid, running.epoch, outcome))

    def missed(self, queued: Queued, view: WorkerView, cached_length: int, now: float) -> Outcome | None:
        """Why it is not worth computing its prompt there: even alone it would be too late. None while the worker's
        speed is not known."""
        by_ms = queued.first_by_ms or queued.end_by_ms
        if not by_ms or view.prefill_tokens_per_second <= 0:
            return None
        needed_s = (queued.num_tokens - cached_length) / view.prefill_tokens_per_second
        left_s = (by_ms - self.redis_ms(now)) / 1000
        if not needed_s > left_s:
            return None
        message = f"the prompt alone takes about {needed_s:.1f} s, and {max(0.0, left_s):.1f} s are left"
        return Outcome(reason="error", code="deadline_exceeded", message=message)

    def redis_ms(self, now: float) -> float:
        """NaN while it is not known."""
        return now * 1000 + self._offset_ms


def _overdue(sequence: Queued | Running, redis_ms: float) -> Outcome | None:
    if isinstance(sequence, Queued) and 0 < sequence.start_by_ms < redis_ms:
        return timeouts.QUEUE
    if 0 < sequence.first_by_ms < redis_ms:
        return timeouts.FIRST_TOKEN
    return timeouts.TOTAL if 0 < sequence.end_by_ms < redis_ms else None
