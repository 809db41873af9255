"""A whole pipeline in memory around real scheduler cores and a real cache store, with a worker that checks blocks.

Messages wait in queues until the test delivers them, in any order between queues and in order within one. Records are
kept as the scripts keep them. The worker refuses what would give a block two writers, and counts it. It answers
questions when it comes to it, and what it has told it keeps until it knows that it was told, as the real one does.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from services.cache_store.store_core import StoreCore
from services.scheduler.actions import Action, Assign, Call, CheckPlaced, Finish, Plan, ReadRecord, Requeue
from services.scheduler.core import SchedulerCore
from services.scheduler.executor import MAX_TOGETHER
from services.scheduler.sequence import Queued
from shared.protocol import Member
from shared.store_calls import Inventory
from shared.wire import Message, pack_ids
from shared.worker_protocol import (
    Admit,
    Ended,
    Extend,
    Preempt,
    Reclaim,
    Remap,
    Report,
    RunningSequence,
    RunningState,
    Seal,
    Taken,
    TakeOver,
)

BLOCK_SIZE = 4
SALT = bytes(32)


@dataclass
class Record:
    """As the scripts keep it: queued, placed or done."""

    sid: str
    prompt: list[int]
    max_tokens: int
    priority: int
    arrival: int
    state: str = "queued"
    epoch: int = 0
    worker: str = ""
    output: list[int] = field(default_factory=list)
    outcome: str = ""
    strikes: int = 0

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.output

    def header(self) -> Queued:
        return Queued(
            self.sid, self.epoch, len(self.prompt), len(self.output), self.priority, self.arrival, self.strikes
        )


def next_token(ids: list[int]) -> int:
    return sum(ids) % 97


@dataclass
class Row:
    sid: str
    epoch: int
    ids: list[int]
    block_ids: list[int]
    num_computed: int
    num_sealed: int


class Worker:
    """Applies plan changes in order; a step computes a block of prefill, or draws one token, for every sequence."""

    def __init__(self, name: str, num_blocks: int) -> None:
        self.member = Member(
            kind="worker", incarnation=name, max_model_len=1000, num_blocks=num_blocks, block_size=BLOCK_SIZE,
            max_num_seqs=4, max_num_batched_tokens=64, variant="v",
        )  # fmt: skip
        self.plan: deque[tuple[int, Message]] = deque()
        self.rows: dict[str, Row] = {}
        self.spares: set[int] = set()
        self.sealed: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end
        self.term = 0
        self.inbox = ""
        self.pool_term = 0
        self.run_term = 0  # of the scheduler that was answered last, to which reports go
        self.question: TakeOver | None = None  # to be answered
        self.hears_replies = True  # else it says again what it has said
        self.taken: list[Taken] = []
        self.num_told = 0  # of what was taken, before that
        self.seals: list[Seal] = []
        self.ended: list[Ended] = []
        self.num_refused = 0
        self.planned = (0, 0)

    def is_free(self, block_id: int) -> bool:
        return block_id not in self.spares and all(block_id not in r.block_ids for r in self.rows.values())

    def apply(self, sim: Simulation) -> None:
        term, change = self.plan.popleft()
        if term < self.term:
            return
        match change:
            case TakeOver():
                self.term, self.question = change.term, change
            case Admit():
                self.admit(change, sim.records[change.sid])
            case Extend():
                for b in change.block_ids:
                    if self.is_free(b):
                        self.sealed.pop(b, None)
                        self.spares.add(b)
                    elif b not in self.spares:
                        self.num_refused += 1
            case Reclaim():
                self.spares.difference_update(change.block_ids)
            case Remap():
                row = self.current(change.sid, change.epoch)
                if row is not None:
                    assert self.sealed[change.block_id] == tuple(row.ids[: (change.index + 1) * BLOCK_SIZE])
                    row.block_ids[change.index] = change.block_id
            case Preempt():
                row = self.current(change.sid, change.epoch)
                if row is not None:
                    self.end(row, "preempted")

    def admit(self, admit: Admit, record: Record) -> None:
        if (record.state, record.epoch, record.worker) != ("placed", admit.epoch, self.member.incarnation):
            self.ended.append(Ended(sid=admit.sid, epoch=admit.epoch, reason="stale"))
            return
        if admit.sid in self.rows:
            self.end(self.rows[admit.sid], "stale")
        num_cached = admit.cached_length // BLOCK_SIZE
        ids = list(record.ids)
        cached_ok = all(
            self.sealed.get(b) == tuple(ids[: (i + 1) * BLOCK_SIZE]) for i, b in enumerate(admit.block_ids[:num_cached])
        )
        if (
            admit.pool_term < self.pool_term
            or not cached_ok
            or not all(map(self.is_free, admit.block_ids[num_cached:]))
        ):
            self.num_refused += 1
            self.ended.append(Ended(sid=admit.sid, epoch=admit.epoch, reason="refused"))
            return
        for b in admit.block_ids[num_cached:]:
            self.sealed.pop(b, None)
        self.rows[admit.sid] = Row(admit.sid, admit.epoch, ids, list(admit.block_ids), admit.cached_length, num_cached)

    def current(self, sid: str, epoch: int) -> Row | None:
        row = self.rows.get(sid)
        return row if row is not None and row.epoch == epoch else None

    def end(self, row: Row, reason: str) -> None:
        del self.rows[row.sid]
        self.ended.append(Ended(sid=row.sid, epoch=row.epoch, reason=reason))

    def step(self, sim: Simulation) -> None:
        for row in list(self.rows.values()):
            record = sim.records[row.sid]
            if (record.state, record.epoch) != ("placed", row.epoch):
                self.end(row, "stale" if record.state != "done" else "cancelled")
                continue
            if row.num_computed == len(row.block_ids) * BLOCK_SIZE:
                if not self.spares:
                    continue
                block_id = min(self.spares)
                self.spares.discard(block_id)
                self.taken.append(Taken(sid=row.sid, epoch=row.epoch, index=len(row.block_ids), block_id=block_id))
                row.block_ids.append(block_id)
            self.compute(row)
            self.seal(row)
            if row.num_computed == len(row.ids):
                token = next_token(row.ids)
                row.ids.append(token)
                record.output.append(token)
                if len(record.output) == record.max_tokens:
                    sim.finish(record, "length")
                    self.end(row, "length")

    def compute(self, row: Row) -> None:
        block_id = row.block_ids[row.num_computed // BLOCK_SIZE]
        others = [r.sid for r in self.rows.values() if r is not row and block_id in r.block_ids]
        assert not others, f"block {block_id} has two writers: {row.sid} and {others}"
        assert block_id not in self.spares and block_id not in self.sealed
        row.num_computed = min(len(row.ids), (row.num_computed // BLOCK_SIZE + 1) * BLOCK_SIZE)

    def seal(self, row: Row) -> None:
        while (row.num_sealed + 1) * BLOCK_SIZE <= row.num_computed:
            index, end = row.num_sealed, (row.num_sealed + 1) * BLOCK_SIZE
            ids = tuple(row.ids[end - BLOCK_SIZE : end])
            self.sealed[row.block_ids[index]] = tuple(row.ids[:end])
            self.seals.append(Seal(sid=row.sid, epoch=row.epoch, index=index, block_id=row.block_ids[index], ids=ids))
            row.num_sealed += 1

    def shown(self, row: Row, full: bool) -> RunningSequence:
        starved = row.num_computed == len(row.block_ids) * BLOCK_SIZE and not self.spares
        return RunningSequence(
            sid=row.sid, epoch=row.epoch, num_tokens=len(row.ids), num_computed=row.num_computed, starved=starved,
            block_ids=tuple(row.block_ids) if full else (), salt=SALT if full else b"",
        )  # fmt: skip

    def running_state(self, question: TakeOver) -> RunningState:
        seals = tuple(
            Seal(sid=r.sid, epoch=r.epoch, index=i, block_id=r.block_ids[i],
                 ids=tuple(r.ids[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]))
            for r in self.rows.values() for i in range(r.num_sealed)
        )  # fmt: skip
        return RunningState(
            worker=self.member.incarnation, term=question.term, pool_term=self.pool_term, ask=question.ask,
            running=tuple(self.shown(r, True) for r in self.rows.values()),
            spare_block_ids=tuple(sorted(self.spares)), seals=seals, num_taken=self.num_told,
        )  # fmt: skip

    def answer(self, sim: Simulation) -> None:
        """The running state, which says what the next report would have said of blocks."""
        if self.question is None:
            return
        question = self.question
        self.num_told += len(self.taken)
        self.taken, self.seals = [], []
        sim.to_scheduler(question.inbox, self.running_state(question))
        if self.hears_replies:
            self.inbox, self.run_term, self.question = question.inbox, question.term, None

    def report(self, sim: Simulation) -> None:
        if not self.inbox or not (self.rows or self.taken or self.seals or self.ended):
            return
        report = Report(
            worker=self.member.incarnation, term=self.run_term, pool_term=self.pool_term,
            running=tuple(self.shown(r, False) for r in self.rows.values()), taken=tuple(self.taken),
            spare_block_ids=tuple(sorted(self.spares)), seals=tuple(self.seals), ended=tuple(self.ended),
            taken_from=self.num_told,
        )  # fmt: skip
        if self.hears_replies:
            self.num_told += len(self.taken)
            self.taken, self.seals, self.ended = [], [], []
        sim.to_scheduler(self.inbox, report)


class Simulation:
    """One worker's model with `num_workers` of them, a store, and one scheduler at a time."""

    def __init__(self, num_workers: int = 1, num_blocks: int = 16) -> None:
        self.now = 0.0
        self.records: dict[str, Record] = {}
        self.num_workers = num_workers
        self.workers = {f"w{i}": Worker(f"w{i}", num_blocks) for i in range(num_workers)}
        self.term = 0
        self.pool_term = 0
        self.num_schedulers = 0
        self.num_stores = 0
        self.headers: deque[Queued] = deque()
        self.inbox: deque[Message] = deque()
        self.cache: deque[Message] = deque()
        self.todo: deque[Action] = deque()
        self.assigned: deque[tuple[Assign, str]] = deque()  # whose replies are on their way
        self.haste: dict[str, float] = {}  # of moves, by name: 1 where nothing is said
        self.pace = 1.0  # how fast time passes
        self.new_store()
        self.new_scheduler()

    # --- actors come and go ------------------------------------------------------------------------------------------

    def new_scheduler(self) -> None:
        """Another takes over, which knows nothing but the queue."""
        self.num_schedulers += 1
        self.term += 1
        self.core = SchedulerCore(f"s{self.num_schedulers}")
        self.inbox.clear()
        self.todo.clear()
        self.assigned.clear()
        for worker in self.workers.values():
            self.core.gain_worker(worker.member, self.term)
        self.headers = deque(r.header() for r in self.records.values() if r.state == "queued")
        self.tell_store()

    def new_store(self) -> None:
        self.num_stores += 1
        self.pool_term += 1
        self.cache.clear()
        self.store = StoreCore(f"c{self.num_stores}")
        for worker in self.workers.values():
            self.open_pool(worker)

    def replace_worker(self, name: str) -> str:
        """It dies; its sequences are queued again, and another one comes."""
        self.core.lose_worker(name)
        old = self.workers.pop(name)
        for record in self.records.values():
            if (record.state, record.worker) == ("placed", name):
                record.strikes += 1
                self.requeue(record.sid, record.epoch)
        self.num_workers += 1
        worker = Worker(f"w{self.num_workers}", old.member.num_blocks)
        self.workers[worker.member.incarnation] = worker
        self.store.close_pool(name)
        self.open_pool(worker)
        self.core.gain_worker(worker.member, self.term)
        self.tell_store()
        return worker.member.incarnation

    def open_pool(self, worker: Worker) -> None:
        name = worker.member.incarnation
        assert self.store.open_pool(name, self.pool_term, worker.member.num_blocks, BLOCK_SIZE, "v")
        self.store.handle(Inventory(worker=name, pool_term=self.pool_term, blocks=(), last=True))
        worker.pool_term = self.pool_term

    def tell_store(self) -> None:
        """What the scheduler's scan finds."""
        for name in self.workers:
            self.core.set_store(name, f"c{self.num_stores}", self.pool_term)

    # --- the scripts -------------------------------------------------------------------------------------------------

    def submit(self, sid: str, prompt: list[int], max_tokens: int = 4, priority: int = 0) -> Record:
        record = Record(sid, prompt, max_tokens, priority, arrival=len(self.records))
        self.records[sid] = record
        self.headers.append(record.header())
        return record

    def cancel(self, record: Record) -> None:
        if record.state != "done":
            queued = record.state == "queued"
            self.finish(record, "cancelled")
            if queued:
                self.core.on_cancelled(record.sid, self.now)

    def finish(self, record: Record, outcome: str) -> None:
        record.state, record.outcome = "done", outcome

    def requeue(self, sid: str, epoch: int) -> None:
        record = self.records[sid]
        if (record.state, record.epoch) == ("placed", epoch):
            record.state, record.worker = "queued", ""
            self.headers.append(record.header())

    def assign(self, action: Assign) -> str:
        record = self.records[action.sid]
        if action.term != self.term:
            return "fenced"
        if action.worker not in self.workers:
            return "gone"
        if (record.state, record.epoch, record.worker) == ("placed", action.epoch + 1, action.worker):
            return "ok"
        if (record.state, record.epoch) != ("queued", action.epoch):
            return "stale"
        record.state, record.epoch, record.worker = "placed", action.epoch + 1, action.worker
        self.workers[action.worker].plan.append((action.term, action.admit))
        return "ok"

    # --- delivery ----------------------------------------------------------------------------------------------------

    def to_scheduler(self, inbox: str, message: Message) -> None:
        if inbox in (f"s{self.num_schedulers}", f"inbox:s{self.num_schedulers}"):
            self.inbox.append(message)

    def claim(self) -> None:
        """Entries of the queue that its consumer seems to have forgotten."""
        held = {*self.core.queue, *(header.sid for header in self.headers)}
        self.headers += [r.header() for r in self.records.values() if r.state == "queued" and r.sid not in held]

    def deliver_header(self) -> None:
        self.core.on_queued(self.headers.popleft(), self.now)

    def deliver_to_store(self) -> None:
        for stream, answer in self.store.handle(self.cache.popleft()):
            self.to_scheduler(stream, answer)
        self.store.check_invariants()

    def deliver_to_scheduler(self) -> None:
        self.core.on_message(self.inbox.popleft(), self.now)

    def decide(self) -> None:
        self.todo += self.core.decide(self.now)

    def come_to_assign(self) -> None:
        """Everything between queue and store goes on until some are to be assigned, if any are."""
        for _ in range(5):
            while self.headers:
                self.deliver_header()
            self.decide()
            while self.todo and not isinstance(self.todo[0], Assign):
                self.act()
            if self.todo:
                return
            while self.cache:
                self.deliver_to_store()
            while self.inbox:
                self.deliver_to_scheduler()

    def lose_a_reply(self, rng: random.Random) -> None:
        """The next action is carried out, and will be once more, since nobody has learnt of it. Of those that go along
        with it some are, and of some it is known what came of them; all will be done again."""
        action = self.todo[0]
        match action:
            case Assign() | ReadRecord():
                alike = itertools.takewhile(lambda other: type(other) is type(action), self.todo)
                for each in list(itertools.islice(alike, MAX_TOGETHER)):
                    self._half(each, rng.randrange(3))
            case Plan():
                self.plan(action)
            case Call() if action.store == f"c{self.num_stores}":
                self.cache.append(action.message)
            case Requeue():
                self.requeue(action.sid, action.epoch)

    def _half(self, action: Action, how_far: int) -> None:
        """0: it did not reach Redis. 1: its reply was lost. 2: neither."""
        if isinstance(action, ReadRecord) and how_far == 2:
            self.read(action)
        if isinstance(action, Assign) and how_far:
            status = self.assign(action)
            if how_far == 2:
                self.on_assigned(action, status)

    def plan(self, action: Plan) -> bool:
        """As the script does it: a number is carried out once."""
        if action.term != self.term or action.worker not in self.workers:
            return False
        worker = self.workers[action.worker]
        if worker.planned != (action.term, action.number):
            worker.planned = (action.term, action.number)
            worker.plan += [(action.term, change) for change in action.changes]
        return True

    def act(self) -> None:
        action = self.todo.popleft()
        match action:
            case ReadRecord():
                self.read(action)
            case Call():
                if action.store == f"c{self.num_stores}":
                    self.cache.append(action.message)
                else:
                    self.core.lose_store(action.message.worker, action.store)
            case Plan():
                if not self.plan(action):
                    self.lose(action.worker, action.term)
            case Assign():
                self.assigned.append((action, self.assign(action)))
            case Requeue():
                self.requeue(action.sid, action.epoch)
            case Finish():
                record = self.records[action.sid]
                if record.state != "done" and record.epoch == action.epoch:
                    self.finish(record, action.outcome.reason)
            case CheckPlaced():
                for record in self.records.values():
                    placed = (record.state, record.worker) == ("placed", action.worker)
                    if placed and (record.sid, record.epoch) not in action.shown:
                        self.requeue(record.sid, record.epoch)

    def read(self, action: ReadRecord) -> None:
        self.core.on_record(action.sid, pack_ids(self.records[action.sid].ids), SALT)

    def deliver_reply(self) -> None:
        self.on_assigned(*self.assigned.popleft())

    def on_assigned(self, action: Assign, status: str) -> None:
        self.core.on_assigned(action, status, self.now)
        if status in ("fenced", "gone"):
            self.lose(action.worker, action.term)

    def lose(self, worker: str, term: int) -> None:
        view = self.core.workers.get(worker)
        if view is not None and view.term == term:
            self.core.lose_worker(worker)

    # --- running -----------------------------------------------------------------------------------------------------

    def moves(self) -> dict[str, Any]:
        """What can happen next, by name."""
        moves: dict[str, Any] = {"decide": self.decide}
        if self.headers:
            moves["header"] = self.deliver_header
        if self.cache:
            moves["store"] = self.deliver_to_store
        if self.inbox:
            moves["inbox"] = self.deliver_to_scheduler
        if self.assigned:
            moves["reply"] = self.deliver_reply
        if self.todo and (not self.assigned or self._goes_along(self.todo[0])):
            moves["act"] = self.act
        for name, worker in self.workers.items():
            if worker.plan:
                moves[f"plan {name}"] = lambda worker=worker: worker.apply(self)
            if worker.rows:
                moves[f"step {name}"] = lambda worker=worker: worker.step(self)
            if worker.question is not None:
                moves[f"answer {name}"] = lambda worker=worker: worker.answer(self)
            moves[f"report {name}"] = lambda worker=worker: worker.report(self)
        return moves

    def _goes_along(self, action: Action) -> bool:
        """Else it waits for the replies to those before it."""
        return isinstance(action, Assign) and len(self.assigned) < MAX_TOGETHER

    def run(self, max_rounds: int = 400) -> None:
        """Without faults until all is done, everything in turn; AssertionError if it never is."""
        for worker in self.workers.values():
            worker.hears_replies = True
        for i in range(max_rounds):
            self.now += 0.05
            self.tell_store()
            if i % 20 == 19:
                self.claim()
            for _ in range(4):
                while self.headers:
                    self.deliver_header()
                self.decide()
                while self.todo or self.assigned:
                    self.deliver_reply() if self.assigned else self.act()
                while self.cache:
                    self.deliver_to_store()
                while self.inbox:
                    self.deliver_to_scheduler()
            for worker in self.workers.values():
                while worker.plan:
                    worker.apply(self)
                worker.step(self)
                worker.report(self)
                worker.answer(self)
            if self.is_at_rest():
                return
        stuck = {r.sid: (r.state, r.epoch, r.worker) for r in self.records.values() if r.state != "done"}
        raise AssertionError(f"stuck: {stuck}; queue {self.core.queue}; {self.core.workers}")

    def is_at_rest(self) -> bool:
        queues = (
            self.headers,
            self.core.queue,
            self.inbox,
            self.cache,
            self.todo,
            self.assigned,
            *(w.plan for w in self.workers.values()),
        )
        return (
            not any(queues)
            and not len(self.core.calls)
            and all(r.state == "done" for r in self.records.values())
            and (not any(w.rows or w.ended or w.question for w in self.workers.values()))
        )

    def check_at_rest(self) -> None:
        """Nothing is left anywhere, and every block is free or a spare of its worker."""
        assert not self.core.queue
        for name, view in self.core.workers.items():
            assert not view.placing and not view.following and not view.running and not view.granting
            manager = self.store.pools[name].manager
            assert set(manager.spares) == self.workers[name].spares == view.spares
            assert manager.num_free == manager.num_blocks - len(manager.spares), manager.holds
            assert manager.counts.refused_takes == 0, "of what a worker has taken something was lost, or came twice"
        for record in self.records.values():
            assert record.output == expected(record)[: len(record.output)]

    def random_move(self, rng: random.Random) -> None:
        """Who is slow here comes to it more seldom."""
        moves = self.moves()
        (name,) = rng.choices(list(moves), [self.haste.get(name, 1.0) for name in moves])
        moves[name]()
        self.now += self.pace * rng.choice((0.0, 0.001, 0.001, 0.03))


def expected(record: Record) -> list[int]:
    ids = list(record.prompt)
    for _ in range(record.max_tokens):
        ids.append(next_token(ids))
    return ids[len(record.prompt) :]
