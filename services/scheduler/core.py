"""What the scheduler decides: which queued sequence runs where, with which blocks. *Pure.*

Events come in as method calls (`now` is a monotonic time in seconds), `decide` gives the actions that follow. The core
may be wrong about anything another process did meanwhile: scripts and stores refuse what is out of date, and the
refusals come back as events. The parts: `batcher` (the queue), `takeover` (workers and their reports), `spares`,
`pressure` (where blocks have run out).
"""

from __future__ import annotations

from collections import Counter

from services.scheduler.actions import Action, Assign, Call, Expel, Offer
from services.scheduler.batcher import Batcher
from services.scheduler.matching import Neighbour
from services.scheduler.outbound import Outbound
from services.scheduler.pressure import Pressure
from services.scheduler.sequence import Queued
from services.scheduler.spares import SpareGrants
from services.scheduler.takeover import Takeover
from services.scheduler.worker_view import WorkerView
from shared.protocol import Member
from shared.records import Deadlines, SequenceRecord
from shared.store_calls import Granted, Matched, Reconciled, Table, Updated
from shared.wire import Message
from shared.worker_protocol import Report, RunningState


class SchedulerCore:
    """max_strikes: worker deaths after which a sequence is a suspect, which runs in steps of its own. min_priority: the
    lowest one that counts between keys."""

    def __init__(self, inbox: str, prefix_caching: bool = True, max_strikes: int = 2, min_priority: int = 0) -> None:
        self.workers: dict[str, WorkerView] = {}
        self._neighbours: dict[str, Neighbour] = {}
        self.counts: Counter[str] = Counter()
        self._max_strikes = max_strikes
        self._out = Outbound(inbox)
        self._takeover = Takeover(self.workers, self._out, inbox, self._interrupt, self._drew)
        restart = self._takeover.restart
        self._spares = SpareGrants(self.workers, self._out, restart)
        self._pressure = Pressure(self._out, self._spares, restart, min_priority)
        self._batcher = Batcher(
            self.workers, self._neighbours, self._out, self.counts, self._pressure, restart,
            prefix_caching=prefix_caching, max_strikes=max_strikes, min_priority=min_priority,
        )  # fmt: skip
        self.calls = self._out.calls
        self.queue = self._batcher.queue

    def _interrupt(self, view: WorkerView) -> None:
        self._batcher.interrupt(view)

    def _drew(self, key: str, num_tokens: int) -> None:
        self._batcher.fairness.charge_output(key, num_tokens)

    def take_waits_ms(self) -> list[float]:
        """How long those that were placed for the first time had been in the queue, since the last call."""
        waits, self._batcher.waited_ms = self._batcher.waited_ms, []
        return [ms for ms in waits if ms >= 0]

    def set_redis_time(self, redis_ms: float, now: float) -> None:
        """For deadlines; to be said again now and then."""
        self._batcher.deadlines.set_redis_time(redis_ms, now)

    # --- events: the queue -----------------------------------------------------------------------------------------

    def on_queued(self, queued: Queued, now: float) -> None:
        """A header from the `requests` stream."""
        self._batcher.enter(queued, now)

    def on_cancelled(self, id: str, now: float) -> None:
        """id: of a sequence, or of a request, all of whose queued sequences were cancelled."""
        self._batcher.cancel(id, now)

    def on_record(self, sid: str, ids: bytes | None, salt: bytes, *, scoring: bool = False, draws: bool = True) -> None:
        """ids: packed prompt and committed output; None: no such record any more. scoring: log-probabilities of its
        prompt are asked for and missing yet, so that all of it has to be computed. draws: it wants tokens too."""
        self._batcher.on_record(sid, ids, salt, scoring, draws)

    def on_assigned(self, action: Assign, status: str, now: float) -> None:
        """status: as the script says; the shell sees to it that a worker which is another's is lost."""
        self._batcher.on_assigned(action, status, now)

    def on_offered(self, offer: Offer, status: str) -> None:
        """status: as the script says."""
        self.counts["offered" if status == "ok" else f"offer_{status}"] += 1
        self._batcher.matching.on_offered(offer, status)

    def on_placed(self, worker: str, sid: str, record: SequenceRecord, deadlines: Deadlines) -> None:
        """What the records know of a sequence that a worker showed at its take-over."""
        view = self.workers.get(worker)
        running = view.running.get(sid) if view is not None else None
        if running is not None and running.epoch == record.epoch:
            running.priority, running.arrival_ms = record.priority, record.arrival_ms
            running.suspect = record.strikes >= self._max_strikes
            running.key, running.end_by_ms = deadlines.owner, deadlines.end_by_ms
            running.first_by_ms = 0 if record.num_tokens > 0 else deadlines.first_by_ms

    # --- events: workers and stores --------------------------------------------------------------------------------

    def gain_worker(self, member: Member, term: int) -> None:
        """The lease on a worker was taken with a new term."""
        self.lose_worker(member.incarnation)
        self.workers[member.incarnation] = WorkerView(member, term)

    def lose_worker(self, worker: str) -> None:
        """The lease is another's, or the worker is gone: forget it; what was on its way there waits again."""
        view = self.workers.pop(worker, None)
        if view is not None:
            self.calls.forget(worker)
            self._interrupt(view)

    def agree_anew(self) -> None:
        """Redis may have come back without its last moment: workers are asked again what they run, and what the records
        place there besides is queued again."""
        for view in self.workers.values():
            self._takeover.restart(view)

    def set_neighbours(self, neighbours: list[Neighbour]) -> None:
        """All workers that other schedulers lease, as of now."""
        self._neighbours.clear()
        self._neighbours.update({n.worker: n for n in neighbours})

    def set_store(self, worker: str, store: str, pool_term: int) -> None:
        """Who leases the worker's pool; a new term means that the store must be given the running set first."""
        view = self.workers.get(worker)
        if view is None or (view.store, view.pool_term) == (store, pool_term):
            return
        view.store, view.pool_term = store, pool_term
        self._takeover.restart(view)

    def lose_store(self, worker: str, store: str) -> None:
        """This store reads no more; whoever leases the pool next is told by `set_store`."""
        view = self.workers.get(worker)
        if view is not None and view.store == store:
            self.set_store(worker, "", 0)

    def on_message(self, message: Message, now: float) -> None:
        """A message from the inbox. What does not fit the present state is ignored: it is old."""
        match message:
            case Report():
                view = self._takeover.on_report(message, now)
                if view is not None:
                    for ended in message.ended:
                        self._batcher.end(view, ended)
            case RunningState():
                self._takeover.on_running_state(message, now)
                if message.worker in self.workers:
                    self._batcher.forget_running(self.workers[message.worker], now)
            case Reconciled():
                self._takeover.on_reconciled(message)
            case Table():
                self._batcher.on_table(message, now)
            case Matched():
                self._batcher.matching.on_matched(message)
            case Granted():
                self._spares.on_granted(message)
            case Updated():
                self._takeover.on_updated(message, now)

    def hears_of_all(self, now: float) -> bool:
        """False while a worker that should report is silent: is it alive?"""
        return not any(view.is_silent(now) for view in self.workers.values())

    # --- decisions -------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[Action]:
        """Everything to do now, in order; call it after events, and at least every 0.2 s while work is waiting."""
        for view in self.workers.values():
            if view.is_hung():
                view.num_standing = 0  # said once
                self._out.act(Expel(view.worker))
            self._pressure.relieve(view, now)
        self._takeover.advance(now)
        self._batcher.place(now)
        for pending in self.calls.overdue(now):
            self._out.act(Call(pending.store, pending.message))
        return self._out.take_actions()
