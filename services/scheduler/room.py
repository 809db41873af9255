"""Where a queued sequence may go now, and whether there is surely room for it. *Pure.*"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.scheduler.sequence import Queued, QueueState
from services.scheduler.worker_view import Phase, WorkerView


class Room:
    def __init__(self, workers: Mapping[str, WorkerView], queue: Mapping[str, Queued], max_strikes: int) -> None:
        self._workers = workers
        self._queue = queue
        self._max_strikes = max_strikes

    def candidates(self, queued: Queued, names: Iterable[str]) -> list[WorkerView]:
        """Those of the named workers that can take it. A suspect of worker deaths goes where no other one is, so that
        the next death tells which of them it was."""
        views = [self._workers[name] for name in names if name in self._workers]
        suspect = self.is_suspect(queued)
        return [
            v for v in views
            if v.has_room() and v.fits(queued.num_held) and not (suspect and self._has_suspect(v))
        ]  # fmt: skip

    def is_suspect(self, queued: Queued) -> bool:
        return queued.strikes >= self._max_strikes

    def _has_suspect(self, view: WorkerView) -> bool:
        on_their_way = view.on_their_way(self._queue)
        return any(r.suspect for r in view.running.values()) or any(map(self.is_suspect, on_their_way))

    def must_wait(self, queued: Queued, view: WorkerView) -> bool:
        """Where blocks are scarce, a store is asked for one sequence after another: else a later one would take what
        the first one waits for."""
        asked_for = [q for q in view.on_their_way(self._queue) if q.state is QueueState.ENSURING]
        promised = sum(view.num_blocks_for(q.num_held) for q in (queued, *asked_for))
        return bool(asked_for) and promised + len(view.running) > view.num_free

    def too_small_for(self, queued: Queued) -> int | None:
        """Tokens that the largest worker here holds, if none could ever run it, even alone; None if one could, or not
        all of them are known yet."""
        views = list(self._workers.values())
        if not views or any(v.phase is not Phase.READY or v.fits(queued.num_held) for v in views):
            return None
        return max(v.capacity for v in views)
