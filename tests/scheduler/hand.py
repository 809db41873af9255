"""A scheduler core whose events are fed by hand, and whose actions are looked at."""

from __future__ import annotations

from typing import Any, TypeVar

from services.scheduler.actions import Action, Assign, Call, Plan, ReadRecord
from services.scheduler.core import SchedulerCore
from services.scheduler.sequence import Queued
from services.scheduler.worker_view import Phase, WorkerView
from shared.protocol import Member
from shared.store_calls import (
    Ensure,
    Grant,
    Granted,
    Match,
    Matched,
    Reconcile,
    Reconciled,
    StoreCall,
    Table,
    Update,
    Updated,
)
from shared.wire import Message, pack_ids
from shared.worker_protocol import Ended, Report, RunningSequence, RunningState, Seal, Taken

A = TypeVar("A", bound=Action)
C = TypeVar("C", bound=StoreCall)
SALT = bytes(32)
NUM_BLOCKS = 100
BLOCK_SIZE = 4


def member(worker: str = "w", **fields: Any) -> Member:
    defaults = {
        "max_model_len": 1000, "num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_num_seqs": 4, "variant": "v",
    }  # fmt: skip
    return Member(kind="worker", incarnation=worker, **(defaults | fields))


def row(sid: str, epoch: int = 1, num_tokens: int = 10, starved: bool = False) -> RunningSequence:
    return RunningSequence(sid=sid, epoch=epoch, num_tokens=num_tokens, num_computed=num_tokens - 1, starved=starved)


class Hand:
    def __init__(self, *workers: str, prefix_caching: bool = True, min_priority: int = 0, **fields: Any) -> None:
        """Workers (one, `w`, if none is named) that are ready, with all their blocks free."""
        self.now = 100.0
        self.core = SchedulerCore("s", prefix_caching, min_priority=min_priority)
        for worker in workers or ("w",):
            self.core.gain_worker(member(worker, **fields), term=3)
            self.core.set_store(worker, "c", 5)
            self.make_ready(worker)

    def view(self, worker: str = "w") -> WorkerView:
        return self.core.workers[worker]

    def decide(self) -> list[Action]:
        return self.core.decide(self.now)

    def until_quiet(self) -> list[Action]:
        """All actions, with records read, until nothing more is decided."""
        actions: list[Action] = []
        while new := self.decide():
            actions += new
            for action in new:
                if isinstance(action, ReadRecord):
                    self.read(action.sid)
        return actions

    # --- workers -----------------------------------------------------------------------------------------------------

    def make_ready(self, worker: str = "w", *rows: RunningSequence, num_free: int = NUM_BLOCKS) -> None:
        self.until_quiet()
        assert self.view(worker).phase is Phase.TAKING_OVER and self.view(worker).asked_at == self.now
        self.core.on_message(self.running_state(worker, *rows), self.now)
        (reconcile,) = calls(self.decide(), Reconcile)
        self.answer(reconcile, num_free=num_free)
        assert self.view(worker).phase is Phase.READY

    def running_state(self, worker: str, *rows: RunningSequence, **fields: Any) -> RunningState:
        view = self.view(worker)
        defaults = {"term": view.term, "pool_term": view.pool_term, "spare_block_ids": (), "ask": view.ask}
        return RunningState(worker=worker, running=rows, **(defaults | fields))

    def report(
        self, *rows: RunningSequence, worker: str = "w", ended: tuple[tuple[str, int, str], ...] = (),
        seals: tuple[Seal, ...] = (), taken: tuple[Taken, ...] = (), term: int | None = None, speed: float = 0.0,
        prefill_speed: float = 0.0, taken_from: int = -1,
    ) -> None:  # fmt: skip
        report = Report(
            worker=worker, term=self.view(worker).term if term is None else term, pool_term=5, running=rows,
            seals=seals, taken=taken, ended=tuple(Ended(sid=s, epoch=e, reason=r) for s, e, r in ended),
            tokens_per_second=speed, prefill_tokens_per_second=prefill_speed, taken_from=taken_from,
        )  # fmt: skip
        self.core.on_message(report, self.now)

    # --- the queue ---------------------------------------------------------------------------------------------------

    def queue(self, sid: str = "r.0", num_tokens: int = 10, epoch: int = 0, **fields: Any) -> Queued:
        queued = Queued(sid, epoch, num_tokens, **({"arrival_ms": len(self.core.queue)} | fields))
        self.core.on_queued(queued, self.now)
        return queued

    def read(self, sid: str) -> None:
        num_tokens = self.core.queue[sid].num_tokens
        self.core.on_record(sid, pack_ids([*sid.encode(), *range(num_tokens)][:num_tokens]), SALT)

    def ensure(self, sid: str = "r.0", num_tokens: int = 10, **fields: Any) -> Ensure:
        """Queues it; the call for its blocks."""
        self.queue(sid, num_tokens, **fields)
        ensures = [e for e in calls(self.until_quiet(), Ensure) if e.sid == sid]
        assert len(ensures) == 1, f"no call for the blocks of {sid}"
        return ensures[0]

    def assign(self, sid: str = "r.0", num_tokens: int = 10, **fields: Any) -> Assign:
        """Queues it and gives it blocks; the action that assigns it."""
        return self.give(self.ensure(sid, num_tokens, **fields))

    def give(self, ensure: Ensure, **fields: Any) -> Assign:
        self.answer(ensure, **fields)
        (assign,) = [a for a in self.decide() if isinstance(a, Assign)]
        return assign

    def run(self, sid: str = "r.0", num_tokens: int = 10, **fields: Any) -> None:
        """Queues it and lets it run."""
        self.core.on_assigned(self.assign(sid, num_tokens, **fields), "ok", self.now)

    def pending(self, kind: type[C]) -> list[C]:
        """Calls that are under way."""
        self.until_quiet()
        return [p.message for p in self.core.calls._pending.values() if isinstance(p.message, kind)]

    # --- the store ---------------------------------------------------------------------------------------------------

    def answer(self, call: StoreCall, **fields: Any) -> None:
        self.core.on_message(self.reply(call, **fields), self.now)

    def reply(self, call: StoreCall, **fields: Any) -> Message:
        head: dict[str, Any] = {"call": call.call, "worker": call.worker, "pool_term": call.pool_term}
        free = {"num_free": self.view(call.worker).num_free} if call.worker in self.core.workers else {}
        match call:
            case Ensure(sid=sid, epoch=epoch):
                return Table(**head | {"sid": sid, "epoch": epoch, "status": "ok"} | free | fields)
            case Match():
                return Matched(**head | {"cached_length": 0} | free | fields)
        kinds: dict[type[StoreCall], type[Message]] = {Grant: Granted, Update: Updated, Reconcile: Reconciled}
        return kinds[type(call)](**head | {"status": "ok"} | free | fields)

    def answer_updates(self, actions: list[Action], **fields: Any) -> None:
        for update in calls(actions, Update):
            self.answer(update, **fields)


def plans(actions: list[Action]) -> list[Plan]:
    return [a for a in actions if isinstance(a, Plan)]


def changes(actions: list[Action], worker: str = "w") -> list[Message]:
    return [change for plan in plans(actions) if plan.worker == worker for change in plan.changes]


def calls(actions: list[Action], kind: type[C]) -> list[C]:
    return [a.message for a in actions if isinstance(a, Call) and isinstance(a.message, kind)]


def only(actions: list[Action], kind: type[A]) -> list[A]:
    return [a for a in actions if isinstance(a, kind)]
