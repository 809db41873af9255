"""A worker on a real Redis, and hands that do by themselves what gateway, scheduler and store would do."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from services.gpu_worker.composer import Budget
from services.gpu_worker.grammar import Grammars
from services.gpu_worker.scripted_engine import ScriptedEngine, validate
from services.gpu_worker.service import WorkerService
from shared.bus import connect
from shared.protocol import Member, RequestSpec, TextParams
from shared.records import Records, SequenceRecord
from shared.scripts import Scripts
from shared.wire import Message, decode, encode, pack_ids
from shared.worker_protocol import Admit, TakeOver
from tests.gpu_worker.builders import BLOCK_SIZE, CAPACITY, SALT, make_params

MODEL = "m"
GATEWAY = "g-test"
SCHEDULER = "s-test"
STORE = "c-test"


class Clock:
    """Stands still unless it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class WorkerBench:
    def __init__(self, redis: Any, worker: WorkerService, clock: Clock) -> None:
        self.redis = redis
        self.worker = worker
        self.clock = clock
        self.scripts = Scripts(redis, MODEL)
        self.records = Records(redis, self.scripts.prefix)
        self.term = 0
        self._last = dict.fromkeys((f"inbox:{SCHEDULER}", f"cache:{STORE}", f"out:{GATEWAY}"), "0-0")

    async def join_others(self) -> None:
        for kind, id in (("scheduler", SCHEDULER), ("store", STORE), ("gateway", GATEWAY)):
            stream = {"scheduler": "inbox", "store": "cache", "gateway": "out"}[kind]
            member = Member.model_validate({"kind": kind, "incarnation": id})
            await self.scripts.join(member, 60_000, [f"{stream}:{id}"])

    # --- the scheduler ---------------------------------------------------------------------------------------------

    async def take_over(self) -> None:
        """Takes the worker's lease and the running state that it answers with."""
        self.term, _ = await self.scripts.take_lease("run", self.worker.incarnation, SCHEDULER, 60_000)
        await self.plan(TakeOver(term=self.term, inbox=SCHEDULER))
        await self.worker.read_plan(0)
        self.worker.step()
        await self.worker.flush()
        await self.inbox()

    async def plan(self, *changes: Message, kind: str = "run", term: int | None = None) -> None:
        """Written even if the term is over, as if it had been before."""
        for change in changes:
            fields = {"k": kind, "t": self.term if term is None else term, "m": encode(change)}
            assert await self.redis.xadd(self.key("plan", self.worker.incarnation), fields, nomkstream=True)

    async def place(
        self, prompt: Sequence[int] | bytes, *, rid: str = "r", block_ids: Sequence[int] = (0, 1, 2, 3),
        cached_length: int = 0, pool_term: int = 0, **params: object,
    ) -> str:  # fmt: skip
        """Admits a request of one choice and assigns it to the worker; its sid."""
        spec = RequestSpec(
            rid=rid, num_choices=1, num_prompt_tokens=len(prompt), salt=SALT, sampling=make_params(**params),
            text=TextParams(api="chat"),
        )  # fmt: skip
        await self.scripts.admit(
            [(spec, pack_ids(list(prompt)))], gateway=GATEWAY, owner="", priority=0, max_requests=100,
            max_tokens=10**6, retention_ms=60_000,
        )  # fmt: skip
        sid = f"{rid}.0"
        await self.assign(sid, 0, block_ids, cached_length, pool_term)
        return sid

    async def assign(
        self, sid: str, epoch: int, block_ids: Sequence[int] = (0, 1, 2, 3), cached_length: int = 0, pool_term: int = 0
    ) -> None:
        admit = Admit(
            sid=sid, epoch=epoch + 1, pool_term=pool_term, cached_length=cached_length, block_ids=tuple(block_ids)
        )
        assert await self.scripts.assign(sid, epoch, self.worker.incarnation, self.term, encode(admit)) == "ok"

    # --- what the others get ---------------------------------------------------------------------------------------

    async def inbox(self) -> list[Any]:
        return [decode(fields[b"m"]) for fields in await self._new(f"inbox:{SCHEDULER}") if b"m" in fields]

    async def store_inbox(self) -> list[Any]:
        return [decode(fields[b"m"]) for fields in await self._new(f"cache:{STORE}") if b"m" in fields]

    async def out(self) -> list[tuple[str, Any]]:
        """(field, message) of the gateway's stream."""
        entries = await self._new(f"out:{GATEWAY}")
        return [(k.decode(), decode(v)) for fields in entries for k, v in fields.items() if k != b"born"]

    async def _new(self, stream: str) -> list[dict[bytes, bytes]]:
        entries = await self.redis.xrange(self.scripts.key(stream), min=f"({self._last[stream]}")
        if entries:
            self._last[stream] = entries[-1][0].decode()
        return [fields for _, fields in entries]

    async def log(self, sid: str) -> list[int]:
        return [i for chunk in await self.records.log(sid) for i in chunk.ids]

    async def record(self, sid: str) -> SequenceRecord:
        record = await self.records.sequence(sid)
        assert record is not None
        return record

    def key(self, *parts: str) -> str:
        return self.scripts.key(":".join(parts))

    async def lease_ms(self) -> int:
        return int(await self.redis.pttl(self.key("lease", "worker", self.worker.incarnation)))

    # --- the worker --------------------------------------------------------------------------------------------------

    async def run_dry(self) -> None:
        """Plan, steps and commits until nothing is left to do."""
        await self.worker.read_plan(0)
        while self.worker.step():
            await self.worker.flush()
        await self.worker.flush()


@contextlib.asynccontextmanager
async def worker_bench(
    url: str,
    *,
    num_blocks: int = 32,
    capacity: Budget = CAPACITY,
    grammars: Grammars | None = None,
    **engine_options: Any,
) -> AsyncIterator[WorkerBench]:
    """A worker that has joined, with a scheduler that has taken it over."""
    clients = [connect(url) for _ in range(3)]
    clock = Clock()
    engine = ScriptedEngine(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=64, **engine_options)
    worker = WorkerService(
        clients[0], MODEL, engine, capacity=capacity, validate=validate, name="test", incarnation="w-first",
        blocking=clients[1], heartbeat=clients[2], clock=clock, grammars=grammars,
    )  # fmt: skip
    bench = WorkerBench(clients[0], worker, clock)
    try:
        await bench.join_others()
        await worker.start()
        await bench.take_over()
        yield bench
    finally:
        for client in clients:
            await client.aclose()


def losing_reply(call: Callable[..., Any], *, applied: bool, times: int = 1) -> Callable[..., Any]:
    """The call, whose first replies are lost: after it was applied, or before it arrived."""
    left = times

    async def lost(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        if left == 0:
            return await call(*args, **kwargs)
        left -= 1
        if applied:
            await call(*args, **kwargs)
        raise ConnectionError("the reply is lost")

    return lost
