"""Taking over a worker, and what its reports mean for the store. *Pure.*

One order holds for block ownership: a change that takes blocks away is planned before the store is told to release
them. So a preempted sequence's blocks are released when the worker has reported it ended, a remapped block is dropped
after the Remap is planned, and reports are forwarded to the store in the order they come: taken, seals, ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from services.scheduler.actions import CheckPlaced, KeepDead, Requeue
from services.scheduler.outbound import Outbound
from services.scheduler.sequence import Running
from services.scheduler.worker_view import ASK_AGAIN_S, Phase, WorkerView
from shared.store_calls import Reconcile, Reconciled, Update, Updated
from shared.worker_protocol import Remap, Report, RunningSequence, RunningState, Seal, Taken, TakeOver

MAX_ASK_AGAIN_S = 4.0
RUNS_NO_MORE = ("refused", "preempted")  # ended at the worker, not for the client: it is queued again


class Takeover:
    """interrupt: called when what was on its way to a worker must start again. drew: an API key's sequence has drawn
    so many tokens."""

    def __init__(
        self, workers: Mapping[str, WorkerView], out: Outbound, inbox: str, interrupt: Callable[[WorkerView], None],
        drew: Callable[[str, int], None],
    ) -> None:  # fmt: skip
        self._workers = workers
        self._out = out
        self._inbox = inbox
        self._interrupt = interrupt
        self._drew = drew

    def restart(self, view: WorkerView, patience_s: float = ASK_AGAIN_S) -> None:
        """Worker and store must agree anew on what runs: no call under way counts any more."""
        view.patience_s = patience_s
        view.phase, view.asked_at, view.oldest_ask = Phase.TAKING_OVER, -math.inf, view.ask + 1
        view.granting, view.starved_since = False, math.inf
        view.forget_full()
        view.ending_calls.clear()
        self._out.calls.forget(view.worker)
        self._interrupt(view)

    def advance(self, now: float) -> None:
        """Asks workers that have not answered yet, or whose store has not."""
        for view in self._workers.values():
            if view.phase is Phase.READY or not view.store or now - view.asked_at < view.patience_s:
                continue
            if view.asked_at > -math.inf:
                view.patience_s = min(2 * view.patience_s, MAX_ASK_AGAIN_S)
            view.phase, view.asked_at, view.ask = Phase.TAKING_OVER, now, view.ask + 1
            self._out.calls.forget(view.worker)
            self._out.plan(view, TakeOver(term=view.term, inbox=self._inbox, ask=view.ask))

    def on_running_state(self, state: RunningState, now: float) -> None:
        """A second answer cannot count, since what was planned after the first is not in it. It must not be passed
        over either: the worker took it for told, so what it says is in no report. The worker is asked anew, with more
        patience, lest answers that are slow lead to second ones for ever."""
        view = self._workers.get(state.worker)
        if view is None or state.term != view.term or not view.store or 0 < state.ask < view.oldest_ask:
            return
        if view.phase is not Phase.TAKING_OVER:
            self.restart(view, view.patience_s)
            return
        known = view.running
        view.running = {r.sid: _running(r, known.get(r.sid)) for r in state.running}
        _count_seals(view, state.seals)
        view.spares, view.num_taken = set(state.spare_block_ids), state.num_taken
        view.phase, view.asked_at, view.heard_at = Phase.RECONCILING, now, now
        shown = frozenset((r.sid, r.epoch) for r in state.running)
        self._out.act(CheckPlaced(view.worker, shown))
        held = tuple((r.sid, r.epoch, r.salt, r.block_ids) for r in state.running)
        self._out.call(view, now, Reconcile, running=held, spare_block_ids=state.spare_block_ids)
        if state.seals:
            self._out.call(view, now, Update, seals=state.seals)

    def on_reconciled(self, reply: Reconciled) -> None:
        call = self._out.calls.answered(reply.call)
        view = self._workers.get(reply.worker)
        if view is None or not isinstance(call, Reconcile):
            return
        if reply.status == "ok":
            view.phase = Phase.READY
            view.set_free(reply.num_free)
        else:  # the store is not ready yet: ask the worker anew, its state will have moved on
            view.phase = Phase.TAKING_OVER

    def on_report(self, report: Report, now: float) -> WorkerView | None:
        """The view it belongs to, or None when it is of another term or before the running set is known."""
        view = self._workers.get(report.worker)
        if view is None or report.term != view.term or view.phase is Phase.TAKING_OVER:
            return None
        view.heard_at = now
        view.tokens_per_second = report.tokens_per_second
        view.prefill_tokens_per_second = report.prefill_tokens_per_second
        for r in report.running:
            known = view.running.get(r.sid)
            if known is not None and known.epoch == r.epoch:
                if r.num_tokens > known.num_tokens:
                    self._drew(known.key, r.num_tokens - known.num_tokens)
                    known.first_by_ms = 0
                known.num_tokens, known.num_computed, known.starved = r.num_tokens, r.num_computed, r.starved
        view.note_steps(report.num_steps, report.hang_s, now)
        _count_seals(view, report.seals)
        released = []
        for e in report.ended:
            ended = view.running.get(e.sid)
            if ended is not None and ended.epoch == e.epoch:
                del view.running[e.sid]
            released.append((e.sid, e.epoch))
            if e.reason in RUNS_NO_MORE:
                self._out.act(Requeue(e.sid, e.epoch))
            elif e.reason == "error":
                self._out.act(KeepDead(e.sid))
        taken, is_whole = _news(view, report)
        if taken or report.seals or released:
            call = self._out.update(view, now, taken=taken, seals=report.seals, released=tuple(released))
            if released and call is not None:
                view.ending_calls.add(call)
        if not is_whole or (view.phase is Phase.READY and any(e.reason == "refused" for e in report.ended)):
            self.restart(view)  # worker and store disagree on who holds what: the same would be refused again
        return view

    def on_updated(self, reply: Updated, now: float) -> None:
        call = self._out.calls.answered(reply.call)
        view = self._workers.get(reply.worker)
        if view is None or not isinstance(call, Update):
            return
        if reply.status != "ok":
            if view.phase is Phase.READY:
                self.restart(view)
            return
        if call.taken:
            view.spares.difference_update(t.block_id for t in call.taken)
            view.taken_call = max(view.taken_call, call.call)
        view.set_free(reply.num_free)
        if call.call in view.ending_calls:
            view.ending_calls.discard(call.call)
            view.forget_full()  # fewer are running, so fewer blocks are kept free for them
        for sid, epoch, index, old, new in reply.remaps:
            running = view.running.get(sid)
            if running is None or running.epoch != epoch:
                continue  # released meanwhile, and the old block with it
            self._out.plan(view, Remap(sid=sid, epoch=epoch, pool_term=view.pool_term, index=index, block_id=new))
            self._out.update(view, now, dropped=((sid, epoch, old),))


def _news(view: WorkerView, report: Report) -> tuple[tuple[Taken, ...], bool]:
    """What was not known to be taken; and whether nothing between it and what was known has been lost.

    A worker repeats what it was not told to have said. A block may have been given back by then, and lent again: taken
    for news, the repeat would take it from the worker."""
    first, known = report.taken_from, view.num_taken
    if first < 0 or known < 0:
        return report.taken, True
    view.num_taken = max(known, first + len(report.taken))
    return report.taken[max(0, known - first) :], first <= known


def _count_seals(view: WorkerView, seals: tuple[Seal, ...]) -> None:
    for seal in seals:
        sealer = view.running.get(seal.sid)
        if sealer is not None and sealer.epoch == seal.epoch:
            sealer.num_sealed = max(sealer.num_sealed, seal.index + 1)


def _running(row: RunningSequence, known: Running | None) -> Running:
    """What the worker says, and what only this scheduler knows about it."""
    if known is None or known.epoch != row.epoch:
        known = Running(row.sid, row.epoch, row.num_tokens)
    return replace(known, num_tokens=row.num_tokens, num_computed=row.num_computed, starved=row.starved, num_sealed=0)
