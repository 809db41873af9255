"""The worker's shell: reads its plan, commits what the engine draws, keeps its lease, begins a new life when it must.

Every method is one step that may be repeated, or lose its reply: nothing changes here before the reply has come.
Decides nothing about sequences (`running_set`), nor when the engine or a step runs (`engine_thread`, `loops`).

A life is an incarnation. It ends when the lease has lapsed or the plan stream is not the one it was: the running set is
dropped, its sequences are handed back, and another life joins, which has but the sealed blocks in the pool.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from services.gpu_worker.admission import Validate
from services.gpu_worker.answer_maker import AnswerMaker
from services.gpu_worker.batch import Drafter, Engine
from services.gpu_worker.commits import Commit, Place
from services.gpu_worker.composer import Budget
from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.fleet_link import FleetLink
from services.gpu_worker.grammar import Grammars
from services.gpu_worker.life import Life, member_of, new_life
from services.gpu_worker.metrics_defs import WorkerMetrics
from services.gpu_worker.outbox import NOTHING, Carried
from services.gpu_worker.plan_reader import read_changes
from services.gpu_worker.reports import report, running_state
from services.gpu_worker.running_set import Change, RunningSet
from services.gpu_worker.seals import inventory_pages
from services.gpu_worker.step_cost import StepCost
from services.gpu_worker.watchdog import Watchdog
from shared import metrics
from shared.leases import BUSY_LEASE_MS, IDLE_LEASE_MS, Lapsed, StreamLost, new_incarnation
from shared.records import Records
from shared.scripts import Scripts
from shared.wire import encode
from shared.worker_protocol import Admit, ListInventory, Report

log = logging.getLogger(__name__)


class WorkerService:
    """redis: for commands; `blocking` and `heartbeat` are clients of their own (see shared.bus)."""

    def __init__(
        self, redis: Any, model: str, engine: Engine, *, capacity: Budget, validate: Validate, name: str = "",
        incarnation: str = "", enable_prefix_caching: bool = True, max_step_s: float = 0.1, blocking: Any = None,
        heartbeat: Any = None, clock: Callable[[], float] = time.monotonic, cost: StepCost | None = None,
        overlap: bool = True, drafter: Drafter | None = None, grammars: Grammars | None = None,
        fleet: FleetLink | None = None,
    ) -> None:  # fmt: skip
        self.redis = redis
        self.scripts = Scripts(redis, model)
        self.records = Records(redis, self.scripts.prefix)
        self.metrics = WorkerMetrics()
        info = engine.info
        self.running = RunningSet(info, capacity, validate, drafter, enable_prefix_caching=enable_prefix_caching)
        self.engine_loop = EngineLoop(
            engine, self.running, max_step_s=max_step_s, cost=cost, clock=clock, overlap=overlap,
            on_step=self.metrics.step_seconds.observe,
        )  # fmt: skip
        self._answers = AnswerMaker(grammars or Grammars(), self.engine_loop)
        self.watchdog = Watchdog(self.engine_loop, clock)
        self.fleet = fleet
        self.clock = clock
        self.num_entries = 0  # sequences in the last commit
        self.lease_is_short = False  # as far as is known: BUSY_LEASE_MS, since the last commit or refresh
        self.lease_became_short = asyncio.Event()
        self.beat_is_due = False  # work has come, whose first step may be long and the last one: shorten the lease
        self._blocking = blocking or redis
        self._beat = Scripts(heartbeat or redis, model)
        self._member = member_of(info, name, capacity)
        self.life = self._new_life(incarnation or new_incarnation("worker"))
        self._ended_lives: deque[tuple[str, list[Place]]] = deque()  # to be wound up before the next one joins
        self._joining = asyncio.Lock()
        self._num_commits = 0  # begun
        self._committing = False
        self._published_at = float("-inf")

    @property
    def incarnation(self) -> str:
        return self.life.worker

    # --- lives -------------------------------------------------------------------------------------------------------

    def _new_life(self, incarnation: str) -> Life:
        return new_life(self._member, incarnation, self._beat, self._blocking)

    async def start(self) -> None:
        """Joins, unless it has; first hands back what lives that have ended left behind."""
        async with self._joining:
            while self._ended_lives:
                worker, places = self._ended_lives[0]
                await self._hand_back(places)
                await self._beat.gone("worker", worker)
                self._ended_lives.popleft()
            life = self.life
            if not life.joined:
                await life.membership.join()
                life.joined = True

    async def _hand_back(self, places: list[Place]) -> None:
        """Queues sequences again, without a strike: this process is alive, so they have killed nobody."""
        for sid, epoch in places:
            await self._beat.requeue(sid, epoch)

    def _end(self, life: Life, why: str) -> None:
        if life is not self.life:
            return
        with self.engine_loop.lock:
            places = self.running.places()
        self.engine_loop.reset()
        self._ended_lives.append((life.worker, places))
        self.life = self._new_life(new_incarnation("worker"))
        log.warning("%s is over (%s), with %d sequences; %s begins", life.worker, why, len(places), self.incarnation)

    async def drain(self) -> None:
        """Says that nothing more is wanted; what runs here goes on."""
        self._member = self._member.model_copy(update={"draining": True})
        await self.life.membership.amend(draining=True)

    async def leave(self, blamed: Collection[Place] = ()) -> None:
        """Ends this life in order: the last commit, sequences handed back, the lease dropped. The engine steps no more.

        blamed: places that this worker fails of. They are left for the scheduler, which counts a strike."""
        with self.engine_loop.lock:
            places = self.running.release_all(blamed)
        life = self.life
        while life is self.life and self.pending:
            await self.flush()
        await self._hand_back(places)
        await self._close_plan(life, blamed)
        await life.membership.leave()

    async def _close_plan(self, life: Life, blamed: Collection[Place]) -> None:
        """Nothing more is assigned here; what was and has not been read is handed back too, or it got a strike."""
        await self.redis.delete(self.scripts.key(f"plan:{life.worker}"))
        for sid in await self.records.placed_on(life.worker):
            record = await self.records.sequence(sid)
            if record is None or record.state != "placed" or record.worker != life.worker:
                continue
            if (sid, record.epoch) not in blamed:
                await self.scripts.requeue(sid, record.epoch)

    # --- the plan and the engine -------------------------------------------------------------------------------------

    async def read_plan(self, block_ms: int) -> int:
        """Hands new plan changes to the engine, in order; how many."""
        await self.start()
        life, num_changes = self.life, 0
        if not life.entries:
            life.entries += await life.reader.read(block_ms)
        while life.entries and life is self.life:
            changes = await read_changes(life.entries, life.worker, self.scripts, self.records)
            if life is not self.life:
                break
            for change in changes:
                life.entries.popleft()
                if change is not None and self.fleet is not None:
                    self.fleet.notice(change)
                if isinstance(change, Change):
                    self.engine_loop.submit(change)
                    self._answers.begin(change)
                    num_changes += 1
                    if isinstance(change.message, Admit) and not self.lease_is_short:
                        self.lease_is_short = self.beat_is_due = True
                        self.lease_became_short.set()
        return num_changes

    def step(self) -> bool:
        """One round of the engine, in this thread; False if there was nothing to do."""
        return self.engine_loop.step_once()

    # --- commits -----------------------------------------------------------------------------------------------------

    @property
    def urgent(self) -> bool:
        """Is there something that waits for no interval: first tokens, ends, refusals, questions?"""
        with self.engine_loop.lock:
            running, life = self.running, self.life
            asked = running.questions or life.pages
            return bool(running.ledger.urgent or asked or (life.inbox and running.outbox.urgent))

    @property
    def pending(self) -> bool:
        """Are there tokens to commit, or is there something to report?"""
        with self.engine_loop.lock:
            running = self.running
            unsaid = running.outbox.urgent or (running.outbox and not running.sequences)
            return running.ledger.pending or bool(self.life.inbox and unsaid)

    async def flush(self, urgent_only: bool = False) -> bool:
        """One commit, with a report if one is due, then answers to take-overs and stores; True if nothing is left.

        The commit comes first, so that what is drawn already counts before a scheduler looks who runs here.
        """
        await self.start()
        life = self.life
        complete = await self._commit(life, urgent_only)
        await self._answer(life)
        return complete and not urgent_only

    async def _commit(self, life: Life, urgent_only: bool) -> bool:
        """False if it was too small for everything there is to say."""
        with self.engine_loop.lock:
            commit = self.running.ledger.build(urgent_only)
            carried, message = self._report(life, commit)
        if not commit.entries and message is None:
            return True
        self._num_commits += 1
        if not self.lease_is_short:
            self.lease_is_short = True
            self.lease_became_short.set()
        started = self.clock()
        self._committing = True
        try:
            answers = await self.scripts.commit(
                life.worker, BUSY_LEASE_MS, life.inbox, encode(message) if message else b"", commit.entries
            )
        finally:
            self._committing = False
        self.num_entries = len(commit.entries)
        self.metrics.commit_seconds.observe(self.clock() - started)
        if answers is None or life is not self.life:
            self._end(life, "its lease has lapsed")
            return True
        with self.engine_loop.lock:
            for (sid, epoch), reason in self.running.ledger.apply(commit, answers):
                self.running.dropped(sid, epoch, reason)
            if carried is not None:
                self.running.outbox.acknowledged(carried)
                life.reported(carried, started)
        return commit.complete

    def _report(self, life: Life, commit: Commit) -> tuple[Carried | None, Report | None]:
        """If it changes a decision, or the last one is too old; to nobody who has not been told the running state."""
        running = self.running
        too_old = life.report_is_due(self.clock()) and bool(running.sequences or running.outbox)
        if not life.inbox or not (running.outbox.urgent or too_old):
            return None, None
        details = running.outbox.urgent or life.details_are_due(self.clock())
        carried = running.outbox.carry(running.ledger.unsettled() - commit.closing) if details else NOTHING
        return carried, report(
            running, carried, worker=life.worker, term=life.run_term, num_steps=self.engine_loop.num_steps,
            cost=self.engine_loop.cost, hang_s=self.engine_loop.hang_s,
        )  # fmt: skip

    async def _answer(self, life: Life) -> None:
        """Answers all questions, in order; what is sent is forgotten when its reply has come.

        A running state is taken anew for another try: its scheduler has not listened to the reports in between.
        """
        while life is self.life:
            if life.pages:
                stream, page = life.pages[0]
                await self.scripts.send(stream, encode(page))
                life.pages.popleft()
                continue
            with self.engine_loop.lock:
                if not self.running.questions:
                    return
                question = self.running.questions[0]
                if isinstance(question, ListInventory):
                    self.running.answered(question)
                    pages = inventory_pages(self.running.sealed.entries(), life.worker, question.pool_term)
                    life.pages += [(question.reply_to, page) for page in pages]
                    continue
                state = running_state(self.running, life.worker, question)
            await self.scripts.send(f"inbox:{question.inbox}", encode(state))
            life.inbox, life.run_term = question.inbox, question.term
            with self.engine_loop.lock:
                self.running.answered(question)

    # --- the lease ---------------------------------------------------------------------------------------------------

    async def heartbeat(self) -> None:
        """Refreshes the lease, trims the plan, publishes metrics. Raises when the process must be replaced."""
        self.watchdog.check()
        await self.start()
        life = self.life
        self.beat_is_due = False
        with self.engine_loop.lock:
            busy = self.running.has_work or self.engine_loop.has_changes
        num_commits, committing = self._num_commits, self._committing
        try:
            await life.membership.refresh(life.reader.last, BUSY_LEASE_MS if busy else IDLE_LEASE_MS)
        except (Lapsed, StreamLost) as e:
            self._end(life, f"{type(e).__name__}: {e}")
            await self.start()
            return
        # a commit at the same time may have come after this and made the lease short again
        self.lease_is_short = busy or committing or num_commits != self._num_commits
        if (now := self.clock()) - self._published_at >= metrics.PUBLISH_EVERY_S:
            self.metrics.observe(self.engine_loop)
            await metrics.publish(self._beat.redis, self.scripts.prefix, "worker", life.worker, self.metrics.registry)
            self._published_at = now
