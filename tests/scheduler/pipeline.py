"""A scheduler service on a real Redis, between a worker and a store that take one step when told to."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from services.cache_store.store_core import StoreCore
from services.scheduler.service import SchedulerService
from shared.bus import StreamReader
from shared.protocol import Member, Outcome
from shared.scripts import CommitCode
from shared.store_calls import Inventory
from shared.wire import Message, decode, encode
from shared.worker_protocol import Admit, Ended, Extend, Report, RunningSequence, RunningState, TakeOver
from tests.shared.script_world import HOUR_MS, MODEL, World, entry, world_at

STOP = Outcome(reason="stop")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeWorker:
    """Runs what it is given and draws nothing until `finish`."""

    def __init__(self, w: World, name: str = "w") -> None:
        self.w = w
        self.member = Member(
            kind="worker", incarnation=name, max_model_len=512, num_blocks=64, block_size=4, max_num_seqs=8,
            max_num_batched_tokens=64, variant="v",
        )  # fmt: skip
        self.reader = StreamReader(w.redis, w.scripts.prefix, {f"plan:{name}": "0-0"})
        self.seen: list[Message] = []
        self.rows: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.spares: set[int] = set()
        self.inbox = ""
        self.term = 0

    @property
    def name(self) -> str:
        return self.member.incarnation

    async def start(self) -> None:
        await self.w.scripts.join(self.member, HOUR_MS, [f"plan:{self.name}"])

    async def turn(self) -> int:
        entries = [e for e in await self.reader.read(0) if b"m" in e.fields]
        for e in entries:
            message = decode(e.fields[b"m"])
            self.seen.append(message)
            await self.apply(message)
        return len(entries)

    async def apply(self, message: Message) -> None:
        match message:
            case TakeOver():
                self.term, self.inbox = message.term, message.inbox
                await self.w.scripts.send(f"inbox:{self.inbox}", encode(self.state(message.ask)))
            case Admit():
                self.rows[message.sid] = (message.epoch, message.block_ids)
            case Extend(sid=""):
                self.spares.update(message.block_ids)

    def state(self, ask: int) -> RunningState:
        rows = tuple(
            RunningSequence(sid=s, epoch=e, num_tokens=4, num_computed=3, block_ids=b, salt=bytes(32))
            for s, (e, b) in self.rows.items()
        )
        return RunningState(
            worker=self.name, term=self.term, pool_term=1, running=rows, spare_block_ids=tuple(self.spares), ask=ask
        )

    async def finish(self, sid: str, outcome: Outcome = STOP) -> None:
        """One token and the end, in one commit with the report."""
        epoch, _ = self.rows.pop(sid)
        report = Report(
            worker=self.name, term=self.term, pool_term=1, ended=(Ended(sid=sid, epoch=epoch, reason=outcome.reason),)
        )
        answers = await self.w.commit(
            entry(sid, epoch, outcome=encode(outcome)), worker=self.name, inbox=self.inbox, report=encode(report)
        )
        assert answers == [(CommitCode.APPENDED, 1)]

    async def die(self) -> None:
        """As if killed: its lease runs out."""
        await self.w.redis.delete(self.w.key(f"lease:worker:{self.name}"))


class FakeStore:
    def __init__(self, w: World, name: str = "c") -> None:
        self.w = w
        self.name = name
        self.core = StoreCore(name)
        self.reader = StreamReader(w.redis, w.scripts.prefix, {f"cache:{name}": "0-0"})

    async def start(self, *workers: FakeWorker) -> None:
        await self.w.join("store", self.name, f"cache:{self.name}")
        for worker in workers:
            await self.open(worker)

    async def open(self, worker: FakeWorker) -> None:
        term, _ = await self.w.scripts.take_lease("pool", worker.name, self.name, HOUR_MS)
        member = worker.member
        self.core.open_pool(worker.name, term, member.num_blocks, member.block_size, member.variant)
        self.core.handle(Inventory(worker=worker.name, pool_term=term, blocks=(), last=True))

    async def turn(self) -> int:
        entries = [e for e in await self.reader.read(0) if b"m" in e.fields]
        for e in entries:
            for stream, answer in self.core.handle(decode(e.fields[b"m"])):
                await self.w.scripts.send(stream, encode(answer))
        return len(entries)

    def num_used(self, worker: str = "w") -> int:
        """Blocks that are neither free nor spare."""
        manager = self.core.pools[worker].manager
        manager.check_invariants()
        return manager.num_blocks - manager.num_free - len(manager.spares)


class Pipeline:
    def __init__(self, w: World) -> None:
        self.w = w
        self.clock = Clock()
        self.worker = FakeWorker(w)
        self.store = FakeStore(w)
        self.workers = [self.worker]
        self.stores = [self.store]
        self.services: list[SchedulerService] = []

    async def scheduler(self, name: str = "s", **options: Any) -> SchedulerService:
        service = SchedulerService(self.w.redis, MODEL, incarnation=name, clock=self.clock, **options)
        self.services.append(service)
        await service.start()
        return service

    async def up(self) -> SchedulerService:
        """A worker, a store and a scheduler that knows both."""
        await self.w.gateway()
        await self.worker.start()
        await self.store.start(self.worker)
        service = await self.scheduler()
        await self.settle()
        return service

    async def settle(self) -> None:
        """Everybody takes turns until nobody has anything left to do."""
        busy = 1
        while busy:
            busy = 0
            for service in self.services:
                busy += await service.read_queue(0) + await service.read_inbox(0)
                await service.pump()
            for actor in (*self.workers, *self.stores):
                busy += await actor.turn()

    async def states(self, *sids: str) -> list[str]:
        return [(await self.w.sequence(sid)).state for sid in sids]


@contextlib.asynccontextmanager
async def pipeline_at(url: str) -> AsyncIterator[Pipeline]:
    async with world_at(url) as w:
        yield Pipeline(w)
