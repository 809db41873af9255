"""The spare grants of workers: how they grow, and how an idle worker gives them back. *Pure.*"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from services.scheduler.outbound import Outbound
from services.scheduler.worker_view import WorkerView
from shared.store_calls import Grant, Granted
from shared.worker_protocol import Extend, Reclaim


class SpareGrants:
    def __init__(self, workers: Mapping[str, WorkerView], out: Outbound, restart: Callable[[WorkerView], None]) -> None:
        self._workers = workers
        self._out = out
        self._restart = restart

    def ask(self, view: WorkerView, now: float) -> None:
        view.granting = True
        self._out.call(view, now, Grant, num_blocks=view.spare_target())

    def on_granted(self, granted: Granted) -> None:
        call = self._out.calls.answered(granted.call)
        view = self._workers.get(granted.worker)
        if view is None or not isinstance(call, Grant):
            return
        view.granting = False
        if granted.status != "ok":
            self._restart(view)
            return
        view.set_free(granted.num_free)
        if call.call < view.taken_call:
            return  # it may name blocks that sequences have by now: the next grant names what is left of them
        new = tuple(b for b in granted.spare_block_ids if b not in view.spares)
        if new:
            view.spares.update(new)
            view.starved_since = math.inf
            self._out.plan(view, Extend(sid="", epoch=0, pool_term=view.pool_term, block_ids=new))

    def reclaim(self, view: WorkerView, now: float) -> None:
        """All of an idle worker. Not while a grant is under way: its answer would seem to give them again."""
        spares = tuple(sorted(view.spares))
        view.spares.clear()
        self._out.plan(view, Reclaim(pool_term=view.pool_term, block_ids=spares))
        self._out.update(view, now, reclaimed=spares)
