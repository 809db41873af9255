"""What happens where blocks have run out: who gives way, who ends, and what is given back. *Pure.*

Every decision waits for the answers that are under way, since each may tell of blocks that are free again: nobody is
stopped for room that is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from services.scheduler.actions import Finish
from services.scheduler.outbound import Outbound
from services.scheduler.placement import choose_victim
from services.scheduler.sequence import Queued
from services.scheduler.spares import SpareGrants
from services.scheduler.worker_view import Phase, WorkerView
from shared.protocol import Outcome
from shared.worker_protocol import Preempt

STARVED_TIMEOUT_S = 2.0  # a worker takes a spare block within a step


class Pressure:
    def __init__(
        self, out: Outbound, spares: SpareGrants, restart: Callable[[WorkerView], None], min_priority: int
    ) -> None:
        self._out = out
        self._spares = spares
        self._restart = restart
        self._min_priority = min_priority

    def relieve(self, view: WorkerView, now: float) -> None:
        """Where sequences cannot go on: more spares, or one gives way, or, where it is alone, it has reached the end.
        Where nothing can be placed on an idle worker: the spares go back."""
        if view.wants_grant():
            self._spares.ask(view, now)
        if view.phase is not Phase.READY or self._out.calls.pending(view.worker):
            return
        if not view.num_sequences:
            self._give_back(view, now)
        elif not any(r.starved for r in view.running.values()):
            view.starved_since = math.inf
        elif not view.placing and view.num_free == 0 and not view.spares:
            self._make_room(view)
        else:
            self._see_to_spares(view, now)

    def _give_back(self, view: WorkerView, now: float) -> None:
        if view.full_at < 0:
            return
        if view.spares:
            self._spares.reclaim(view, now)
        else:  # nobody runs there and yet it is full: the store holds blocks for somebody whom nobody knows
            self._restart(view)

    def _make_room(self, view: WorkerView) -> None:
        if len(view.running) > 1:
            self.preempt(view)
            return
        last = next(iter(view.running.values()))
        if last.preempting:
            return
        last.preempting = True
        outcome = Outcome(reason="length", message=f"the KV pool holds {view.capacity} tokens")
        self._out.act(Finish(last.sid, last.epoch, outcome))

    def _see_to_spares(self, view: WorkerView, now: float) -> None:
        """It has blocks to go on with, or will have; if it still does not, they are not where they seem to be."""
        view.starved_since = min(view.starved_since, now)
        preempting = any(r.preempting for r in view.running.values())
        if view.spares and not preempting and now - view.starved_since > STARVED_TIMEOUT_S:
            self._restart(view)

    def preempt(self, view: WorkerView, newcomer: Queued | None = None, key: str | None = None) -> bool:
        """Chooses one victim, of the key if one is named, unless one is on its way already; True if there is one.
        newcomer: that it must rank behind."""
        if any(r.preempting for r in view.running.values()):
            return True
        candidates = [r for r in view.running.values() if key in (None, r.key)]
        victim = choose_victim(candidates, newcomer, self._min_priority)
        if victim is None:
            return False
        victim.preempting = True
        self._out.plan(view, Preempt(sid=victim.sid, epoch=victim.epoch))
        return True
