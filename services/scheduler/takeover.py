"""Taking over a worker, and what its reports mean for the store. *Pure.*

One order holds for block ownership: a change that takes blocks away is planned before the store is told to release
them. So a preempted sequence's blocks are released when the worker has reported it ended, a remapped block is dropped
after the Remap is planned, and reports are forwarded to the store in the order they come: taken, seals, ended.
"""

from __future__ import annotations

from typing import Any

from services.scheduler.actions import Action, Call, CheckPlaced, Finish, Plan, Requeue
from services.scheduler.cache_client import CacheCalls
from services.scheduler.placement import choose_victim
from services.scheduler.sequence import Running
from services.scheduler.worker_view import Phase, WorkerView
from shared.protocol import (
    Message,
    Outcome,
    Preempt,
    Reconcile,
    Reconciled,
    Remap,
    Report,
    RunningSequence,
    RunningState,
    StoreCall,
    TakeOver,
    Update,
    Updated,
)

ASK_AGAIN_S = 0.5
RUNS_NO_MORE = ("refused", "preempted")  # ended at the worker, not for the client: it is queued again


class Takeover:
    def __init__(self, workers: dict[str, WorkerView], calls: CacheCalls, actions: list[Action], inbox: str) -> None:
        self._workers = workers
        self._calls = calls
        self._actions = actions
        self._inbox = inbox

    def call(self, view: WorkerView, now: float, kind: type[StoreCall], **fields: Any) -> None:
        """Sends a call to the worker's store under the present terms."""
        message = kind(
            call=self._calls.new_id(), reply_to=self._calls.reply_to, worker=view.worker, run_term=view.term,
            pool_term=view.pool_term, **fields,
        )  # fmt: skip
        self._calls.sent(view.store, message, now)
        self._actions.append(Call(view.store, message))

    def update(self, view: WorkerView, now: float, **fields: Any) -> None:
        """Tells the store; before READY there is nothing to tell, the reconcile will say it all."""
        if view.phase is not Phase.TAKING_OVER:
            self.call(view, now, Update, **fields)

    def plan(self, view: WorkerView, *changes: Message) -> None:
        self._actions.append(Plan(view.worker, view.term, changes))

    def advance(self, now: float) -> None:
        """Asks workers that have not answered yet, and victims for those whose batch has run dry."""
        for view in self._workers.values():
            if view.phase is Phase.READY:
                if any(r.starved for r in view.running.values()) and not view.granting:
                    self._relieve(view)
            elif view.store and now - view.asked_at >= ASK_AGAIN_S:
                view.phase, view.asked_at = Phase.TAKING_OVER, now
                self._calls.forget(view.worker)
                self.plan(view, TakeOver(term=view.term, inbox=self._inbox))

    def on_running_state(self, state: RunningState, now: float) -> None:
        view = self._workers.get(state.worker)
        if view is None or state.term != view.term or view.phase is not Phase.TAKING_OVER or not view.store:
            return
        known = view.running
        view.running = {r.sid: _running(r, known.get(r.sid)) for r in state.running}
        view.spares = set(state.spare_block_ids)
        view.phase, view.asked_at, view.heard_at = Phase.RECONCILING, now, now
        shown = frozenset((r.sid, r.epoch) for r in state.running)
        self._actions.append(CheckPlaced(view.worker, shown))
        held = tuple((r.sid, r.epoch, r.salt, r.block_ids) for r in state.running)
        self.call(view, now, Reconcile, running=held, spare_block_ids=state.spare_block_ids)
        if state.seals:
            self.call(view, now, Update, seals=state.seals)

    def on_reconciled(self, reply: Reconciled) -> None:
        call = self._calls.answered(reply.call)
        view = self._workers.get(reply.worker)
        if view is None or call is None or call.pool_term != view.pool_term:
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
        for r in report.running:
            known = view.running.get(r.sid)
            if known is not None and known.epoch == r.epoch:
                known.num_tokens, known.num_computed, known.starved = r.num_tokens, r.num_computed, r.starved
        released = []
        for e in report.ended:
            ended = view.running.get(e.sid)
            if ended is not None and ended.epoch == e.epoch:
                del view.running[e.sid]
            released.append((e.sid, e.epoch))
            if e.reason in RUNS_NO_MORE:
                self._actions.append(Requeue(e.sid, e.epoch))
        if report.taken or report.seals or released:
            self.update(view, now, taken=report.taken, seals=report.seals, released=tuple(released))
        return view

    def on_updated(self, reply: Updated, now: float) -> None:
        call = self._calls.answered(reply.call)
        view = self._workers.get(reply.worker)
        if view is None or not isinstance(call, Update) or reply.pool_term != view.pool_term:
            return
        if reply.status != "ok":
            if view.phase is Phase.READY:
                view.phase, view.asked_at = Phase.TAKING_OVER, float("-inf")
            return
        view.spares.difference_update(t.block_id for t in call.taken)
        view.set_free(reply.num_free)
        if call.released:
            view.full_at = -1  # fewer are running, so fewer blocks are kept free for them
        for sid, epoch, index, old, new in reply.remaps:
            running = view.running.get(sid)
            if running is None or running.epoch != epoch:
                continue  # released meanwhile, and the old block with it
            self.plan(view, Remap(sid=sid, epoch=epoch, pool_term=view.pool_term, index=index, block_id=new))
            self.update(view, now, dropped=((sid, epoch, old),))

    def preempt(self, view: WorkerView, below_priority: int | None = None) -> bool:
        """Chooses one victim, unless one is on its way already; True if there is one."""
        if any(r.preempting for r in view.running.values()):
            return True
        victim = choose_victim(view.running.values(), below_priority)
        if victim is None:
            return False
        victim.preempting = True
        self.plan(view, Preempt(sid=victim.sid, epoch=victim.epoch))
        return True

    def _relieve(self, view: WorkerView) -> None:
        """A sequence cannot go on and nothing is free: one gives way, or, where it is alone, it has reached the end."""
        if view.num_free > 0 or view.placing:
            return
        if len(view.running) > 1:
            self.preempt(view)
            return
        last = next(iter(view.running.values()))
        if last.preempting:
            return
        last.preempting = True
        capacity = view.member.num_blocks * view.member.block_size
        message = f"the KV pool holds {capacity} tokens"
        self._actions.append(Finish(last.sid, last.epoch, Outcome(reason="length", message=message)))


def _running(row: RunningSequence, known: Running | None) -> Running:
    running = Running(row.sid, row.epoch, row.num_tokens, row.num_computed, len(row.block_ids), starved=row.starved)
    if known is not None and known.epoch == row.epoch:
        running.priority, running.arrival_ms, running.preempting = known.priority, known.arrival_ms, known.preempting
    return running
