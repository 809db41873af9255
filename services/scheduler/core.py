"""What the scheduler decides: which queued sequence runs where, with which blocks. *Pure.*

Events come in as method calls (`now` is a monotonic time in seconds), `decide` gives the actions that follow. The core
may be wrong about anything another process did meanwhile: scripts and stores refuse what is out of date, and the
refusals come back as events. Taking over a worker and what its reports mean is in `takeover.py`.
"""

from __future__ import annotations

from collections import Counter

from services.scheduler.actions import Action, Assign, Call, Finish, Plan, ReadRecord
from services.scheduler.cache_client import CacheCalls
from services.scheduler.placement import choose_worker
from services.scheduler.sequence import Queued, QueueState, Running, order_key
from services.scheduler.takeover import Takeover
from services.scheduler.worker_view import Phase, WorkerView
from shared.protocol import (
    Admit,
    Ensure,
    Extend,
    Grant,
    Granted,
    Match,
    Matched,
    Member,
    Message,
    Outcome,
    Reclaim,
    Reconciled,
    Report,
    RunningState,
    Table,
    Updated,
)

MAX_PLACING = 64  # sequences on their way to a worker at a time
MATCH_TIMEOUT_S = 0.2
FOLLOW_TIMEOUT_S = 2.0  # about as long as computing a long prompt takes


class SchedulerCore:
    def __init__(self, inbox: str, prefix_caching: bool = True, max_strikes: int = 2) -> None:
        self.queue: dict[str, Queued] = {}
        self.workers: dict[str, WorkerView] = {}
        self.calls = CacheCalls(f"inbox:{inbox}")
        self.counts: Counter[str] = Counter()
        self._inbox = inbox
        self._prefix_caching = prefix_caching
        self._max_strikes = max_strikes
        self._actions: list[Action] = []
        self._takeover = Takeover(self.workers, self.calls, self._actions, inbox)

    # --- events: the queue -----------------------------------------------------------------------------------------

    def on_queued(self, queued: Queued) -> None:
        """A header from the `requests` stream; also one that is here already (a claim) or in a newer epoch."""
        known = self.queue.get(queued.sid)
        if known is not None and known.epoch >= queued.epoch:
            return
        if known is not None:
            self._leave_queue(known)
        self.queue[queued.sid] = queued

    def on_cancelled(self, rid: str) -> None:
        for sid in [s for s in self.queue if s.rpartition(".")[0] == rid]:
            self._leave_queue(self.queue[sid])

    def on_record(self, sid: str, ids: bytes | None, salt: bytes) -> None:
        """ids: packed prompt and committed output; None: no such record any more."""
        queued = self.queue.get(sid)
        if queued is None or queued.state is not QueueState.READING:
            return
        if ids is None:
            del self.queue[sid]
            return
        queued.ids, queued.salt, queued.state = ids, salt, QueueState.WAITING
        queued.num_output_tokens = len(ids) // 4 - queued.num_prompt_tokens

    def on_assigned(self, sid: str, epoch: int, worker: str, status: str, now: float) -> None:
        queued = self.queue.get(sid)
        view = self.workers.get(worker)
        if view is not None:
            view.placing.discard(sid)
        if status == "ok":
            self.queue.pop(sid, None)
            if view is not None and queued is not None:
                view.heard_at = max(view.heard_at, now)
                view.running[sid] = Running(
                    sid, epoch + 1, queued.num_tokens, 0, 0, queued.priority, queued.arrival_ms, salt=queued.salt
                )
            self.counts["assigned"] += 1
            return
        self.counts[f"assign_{status}"] += 1
        if view is not None:
            self._takeover.update(view, now, released=((sid, epoch + 1),))
        if status == "stale":
            self.queue.pop(sid, None)
        else:
            self.lose_worker(worker)
            if queued is not None:
                queued.back_to_waiting()

    # --- events: workers and stores --------------------------------------------------------------------------------

    def gain_worker(self, member: Member, term: int) -> None:
        """The lease on a worker was taken with a new term."""
        self.lose_worker(member.incarnation)
        self.workers[member.incarnation] = WorkerView(member, term)

    def lose_worker(self, worker: str) -> None:
        """The lease is another's, or the worker is gone: forget it; what was on its way there waits again."""
        view = self.workers.pop(worker, None)
        if view is not None:
            self._interrupt(view)

    def set_store(self, worker: str, store: str, pool_term: int) -> None:
        """Who leases the worker's pool; a new term means that the store must be given the running set first."""
        view = self.workers.get(worker)
        if view is None or (view.store, view.pool_term) == (store, pool_term):
            return
        view.store, view.pool_term, view.phase, view.granting = store, pool_term, Phase.TAKING_OVER, False
        view.asked_at, view.full_at = float("-inf"), -1
        self._interrupt(view)

    def _interrupt(self, view: WorkerView) -> None:
        self.calls.forget(view.worker)
        for queued in self.queue.values():
            if queued.worker == view.worker and queued.state is not QueueState.ASSIGNING:
                queued.back_to_waiting()
        view.placing = {s for s in view.placing if s in self.queue and self.queue[s].state is QueueState.ASSIGNING}

    def on_message(self, message: Message, now: float) -> None:
        """A message from the inbox. What does not fit the present state is ignored: it is old."""
        match message:
            case Report():
                self._on_report(message, now)
            case RunningState():
                self._takeover.on_running_state(message, now)
            case Reconciled():
                self._takeover.on_reconciled(message)
            case Table():
                self._on_table(message, now)
            case Matched():
                self._on_matched(message)
            case Granted():
                self._on_granted(message)
            case Updated():
                self._takeover.on_updated(message, now)

    def _on_report(self, report: Report, now: float) -> None:
        view = self._takeover.on_report(report, now)
        if view is None:
            return
        ended = {e.sid for e in report.ended}
        sealed = {(s.sid, s.index) for s in report.seals}
        for queued in self.queue.values():
            if queued.state is not QueueState.FOLLOWING or queued.worker != view.worker:
                continue
            if queued.leader in ended or (queued.leader, queued.leader_index) in sealed:
                queued.state = QueueState.WAITING

    def _on_table(self, table: Table, now: float) -> None:
        call = self.calls.answered(table.call)
        view, queued = self.workers.get(table.worker), self.queue.get(table.sid)
        if view is None or not isinstance(call, Ensure) or table.pool_term != view.pool_term:
            return
        view.set_free(table.num_free)
        if queued is None or queued.state is not QueueState.ENSURING or queued.epoch + 1 != table.epoch:
            if table.status == "ok":  # cancelled meanwhile: give the blocks back
                self._takeover.update(view, now, released=((table.sid, table.epoch),))
            return
        if table.status == "ok":
            queued.state = QueueState.ASSIGNING
            admit = Admit(
                sid=table.sid, epoch=table.epoch, pool_term=table.pool_term, cached_length=table.cached_length,
                block_ids=table.block_ids, alone=queued.strikes >= self._max_strikes,
            )  # fmt: skip
            self.counts["cached_tokens"] += table.cached_length
            self._actions.append(Assign(table.sid, queued.epoch, view.worker, view.term, admit))
            return
        self.counts[f"ensure_{table.status}"] += 1
        if table.status == "wait":
            queued.state, queued.followed_since = QueueState.FOLLOWING, now
            queued.leader, queued.leader_index = table.leader, table.leader_index
            return
        view.placing.discard(table.sid)
        queued.back_to_waiting()
        if table.status == "full":
            self._on_full(view, queued, table, now)
        elif table.status == "not_ready":
            view.phase, view.asked_at = Phase.TAKING_OVER, float("-inf")

    def _on_full(self, view: WorkerView, queued: Queued, table: Table, now: float) -> None:
        """Nothing is admitted there until more is free; a lower priority gives way; idle spares are given back."""
        view.full_at = table.num_free
        if self._takeover.preempt(view, below_priority=queued.priority):
            return
        if not view.num_sequences and view.spares:
            spares = tuple(sorted(view.spares))
            view.spares.clear()
            self._actions.append(Plan(view.worker, view.term, (Reclaim(pool_term=view.pool_term, block_ids=spares),)))
            self._takeover.update(view, now, reclaimed=spares)
        elif not view.num_sequences and table.num_needed > view.member.num_blocks:
            self._refuse(queued, view.member.num_blocks * view.member.block_size)

    def _on_matched(self, matched: Matched) -> None:
        call = self.calls.answered(matched.call)
        if not isinstance(call, Match):
            return
        for queued in self.queue.values():
            if queued.state is QueueState.MATCHING and queued.ids == call.ids and matched.worker in queued.asked:
                queued.matches[matched.worker] = matched.cached_length

    def _on_granted(self, granted: Granted) -> None:
        call = self.calls.answered(granted.call)
        view = self.workers.get(granted.worker)
        if view is None or call is None or granted.pool_term != view.pool_term:
            return
        view.granting = False
        if granted.status != "ok":
            return
        view.set_free(granted.num_free)
        new = tuple(b for b in granted.spare_block_ids if b not in view.spares)
        if new:
            view.spares.update(new)
            extend = Extend(sid="", epoch=0, pool_term=view.pool_term, block_ids=new)
            self._actions.append(Plan(view.worker, view.term, (extend,)))

    def hears_of_all(self, now: float) -> bool:
        """False while a worker that should report is silent: is it alive?"""
        return not any(view.is_silent(now) for view in self.workers.values())

    # --- decisions ---------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[Action]:
        """Everything to do now, in order; call it after events, and at least every 0.2 s while work is waiting."""
        self._takeover.advance(now)
        for view in self.workers.values():
            if view.wants_grant():
                self._grant(view, now)
        self._place(now)
        for pending in self.calls.overdue(now):
            self._actions.append(Call(pending.store, pending.message))
        actions = list(self._actions)
        self._actions.clear()
        return actions

    def _grant(self, view: WorkerView, now: float) -> None:
        view.granting = True
        self._call(view, now, Grant, num_blocks=view.spare_target())

    def _call(self, view: WorkerView, now: float, kind: type[Grant | Ensure | Match], **fields: object) -> None:
        self._takeover.call(view, now, kind, **fields)

    def _place(self, now: float) -> None:
        budget = MAX_PLACING - sum(len(v.placing) for v in self.workers.values())
        for queued in sorted(self.queue.values(), key=order_key):
            if budget <= 0:
                break
            match queued.state:
                case QueueState.FOLLOWING if now - queued.followed_since > FOLLOW_TIMEOUT_S:
                    queued.patient, queued.state = False, QueueState.WAITING
                    self._start(queued, now)
                case QueueState.MATCHING:
                    self._finish_matching(queued, now)
                case QueueState.WAITING:
                    if not self._start(queued, now):
                        break  # nobody passes the first in line
                    budget -= 1

    def _start(self, queued: Queued, now: float) -> bool:
        """Takes a waiting sequence one step on; False if there is no room for it anywhere."""
        if queued.worker in self.workers:  # followed a leader there: its blocks are sealed now
            self._ensure(queued, self.workers[queued.worker], now)
            return True
        candidates = [v for v in self.workers.values() if v.has_room() and v.fits(queued.num_tokens)]
        if not candidates:
            return self._refuse_if_never(queued)
        if not queued.ids:
            queued.state = QueueState.READING
            self._actions.append(ReadRecord(queued.sid))
        elif len(candidates) == 1 or not self._prefix_caching:
            self._ensure(queued, self.workers[choose_worker(queued.num_tokens, candidates, {})], now)
        else:
            queued.state, queued.matches, queued.asked_at = QueueState.MATCHING, {}, now
            queued.asked = frozenset(v.worker for v in candidates)
            for view in candidates:
                self._call(view, now, Match, salt=queued.salt, ids=queued.ids)
        return True

    def _finish_matching(self, queued: Queued, now: float) -> None:
        if len(queued.matches) < len(queued.asked) and now - queued.asked_at < MATCH_TIMEOUT_S:
            return
        candidates = [self.workers[w] for w in queued.asked if w in self.workers and self.workers[w].has_room()]
        if not candidates:
            queued.back_to_waiting()
            return
        self._ensure(queued, self.workers[choose_worker(queued.num_tokens, candidates, queued.matches)], now)

    def _ensure(self, queued: Queued, view: WorkerView, now: float) -> None:
        queued.state, queued.worker = QueueState.ENSURING, view.worker
        view.placing.add(queued.sid)
        self._call(
            view, now, Ensure, sid=queued.sid, epoch=queued.epoch + 1, salt=queued.salt, ids=queued.ids,
            wait_for_leader=queued.patient and self._prefix_caching, use_cached=self._prefix_caching,
            keep_free=len(view.running),
        )  # fmt: skip

    def _refuse_if_never(self, queued: Queued) -> bool:
        """True (go on with the next) if it was refused: no live worker could ever run it, even alone."""
        ready = [v for v in self.workers.values() if v.phase is Phase.READY]
        if not ready or len(ready) < len(self.workers) or any(v.fits(queued.num_tokens) for v in ready):
            return False
        self._refuse(queued, max(v.member.num_blocks * v.member.block_size for v in ready))
        return True

    def _refuse(self, queued: Queued, capacity: int) -> None:
        self.queue.pop(queued.sid, None)
        message = f"{queued.num_tokens} tokens and one more do not fit: a worker holds at most {capacity} tokens"
        outcome = Outcome(reason="error", code="context_length_exceeded", message=message)
        self._actions.append(Finish(queued.sid, queued.epoch, outcome))

    def _leave_queue(self, queued: Queued) -> None:
        """Cancelled: blocks that are being ensured for it are given back when the answer comes."""
        if queued.state is QueueState.ASSIGNING:
            return
        self.queue.pop(queued.sid, None)
        if queued.worker in self.workers:
            self.workers[queued.worker].placing.discard(queued.sid)
