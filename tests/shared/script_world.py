"""What tests of the scripts share: a Redis with workers, gateways and requests in it, and ways to look at it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from redis.asyncio import Redis

from shared import bus
from shared.protocol import Event, Member, MemberKind, Outcome, RequestSpec, SamplingParams, TextParams, TimeLimits
from shared.records import Records, SequenceRecord
from shared.scripts import Admission, CommitCode, CommitEntry, Repeat, Scripts
from shared.wire import decode_as

MODEL = "m"
HOUR_MS = 3_600_000
STOP = Outcome(reason="stop")
CANCELLED = Outcome(reason="cancelled")
SALT = bytes(32)


def spec_of(rid: str, num_choices: int = 1, num_prompt_tokens: int = 3, **time_limits: int) -> RequestSpec:
    return RequestSpec(
        rid=rid, num_choices=num_choices, num_prompt_tokens=num_prompt_tokens, salt=SALT,
        sampling=SamplingParams(max_tokens=8, seed=1), text=TextParams(api="completions"),
        time_limits=TimeLimits(**time_limits),
    )  # fmt: skip


class World:
    """One model in one Redis. Names without a prefix are names of keys below it."""

    def __init__(self, redis: Redis, scripts: Scripts) -> None:
        self.redis = redis
        self.scripts = scripts
        self.records = Records(redis, scripts.prefix)

    # --- actors ------------------------------------------------------------------------------------------------------

    async def join(self, kind: MemberKind, id: str, *streams: str) -> None:
        await self.scripts.join(Member(kind=kind, incarnation=id), HOUR_MS, streams)

    async def gateway(self, id: str = "g") -> None:
        await self.join("gateway", id, f"out:{id}")

    async def worker(self, id: str = "w", scheduler: str = "s") -> int:
        """A live worker whose run lease a scheduler has; the term."""
        await self.join("worker", id, f"plan:{id}")
        term, _ = await self.scripts.take_lease("run", id, scheduler, HOUR_MS)
        return term

    async def admit(
        self, rid: str = "r", n: int = 1, tokens: int = 3, *, gateway: str = "g", priority: int = 0,
        max_requests: int = 100, max_tokens: int = 1000, retention_ms: int = HOUR_MS, **options: Any,
    ) -> tuple[str, int]:  # fmt: skip
        admission = await self.ask_admission(
            rid, n, tokens, gateway=gateway, priority=priority, max_requests=max_requests, max_tokens=max_tokens,
            retention_ms=retention_ms, **options,
        )  # fmt: skip
        return admission.status, admission.number

    async def ask_admission(
        self, rid: str = "r", n: int = 1, tokens: int = 3, *, more: Sequence[tuple[str, int, int]] = (),
        time_limits: dict[str, int] | None = None, **options: Any,
    ) -> Admission:  # fmt: skip
        """more: further prompts of the same call, each with rid, n and tokens."""
        defaults: dict[str, Any] = {
            "gateway": "g", "owner": "key", "priority": 0, "max_requests": 100, "max_tokens": 1000,
            "retention_ms": HOUR_MS, "repeat": Repeat("", "digest"),
        }  # fmt: skip
        prompts = [(rid, n, tokens), *more]
        requests = [(spec_of(*prompt, **(time_limits or {})), b"\1\0\0\0" * prompt[2]) for prompt in prompts]
        return await self.scripts.admit(requests, **(defaults | options))

    async def placed(self, rid: str = "r", n: int = 1, **admit: Any) -> None:
        """A request with a gateway, all of whose sequences run on the worker `w` in epoch 1."""
        await self.gateway(admit.get("gateway", "g"))
        term = await self.worker()
        await self.admit(rid, n, **admit)
        for i in range(n):
            assert await self.scripts.assign(f"{rid}.{i}", 0, "w", term, b"admit") == "ok"

    async def commit(
        self, *entries: CommitEntry, worker: str = "w", inbox: str = "s", report: bytes = b"", lease_ms: int = HOUR_MS
    ) -> list[tuple[CommitCode, int]] | None:
        return await self.scripts.commit(worker, lease_ms, inbox, report, entries)

    # --- looking -----------------------------------------------------------------------------------------------------

    def key(self, name: str) -> str:
        return self.scripts.key(name)

    async def exists(self, name: str) -> bool:
        return bool(await self.redis.exists(self.key(name)))

    async def sequence(self, sid: str = "r.0") -> SequenceRecord:
        record = await self.records.sequence(sid)
        assert record is not None, sid
        return record

    async def log(self, sid: str = "r.0") -> list[bytes]:
        chunks: list[bytes] = await self.redis.lrange(self.key(f"s:{sid}:log"), 0, -1)
        return chunks

    async def stream(self, name: str) -> list[list[tuple[bytes, bytes]]]:
        """The fields of all entries but the one with which `join` made the stream."""
        entries = await self.redis.xrange(self.key(name))
        return [list(fields.items()) for _, fields in entries if b"born" not in fields]

    async def told(self, gateway: str = "g") -> list[bytes]:
        """The names of all fields that a gateway was sent, in order."""
        return [name for fields in await self.stream(f"out:{gateway}") for name, _ in fields]

    async def events(self) -> list[tuple[str, str]]:
        events = [decode_as(Event, dict(fields)[b"m"]) for fields in await self.stream("events")]
        return [(e.kind, e.id) for e in events]

    async def queue(self) -> list[tuple[str, int]]:
        return [(dict(f)[b"sid"].decode(), int(dict(f)[b"epoch"])) for f in await self.stream("requests")]

    async def queued_tokens(self) -> int:
        return int(await self.redis.hget(self.key("queue"), "tokens") or 0)

    async def read_queue(self, consumer: str = "s") -> int:
        """As a scheduler does: what was new, now pending with it."""
        stream = self.key("requests")
        if not await self.redis.exists(stream) or not await self.redis.xinfo_groups(stream):
            await self.redis.xgroup_create(stream, "schedulers", id="0", mkstream=True)
        reply = await self.redis.xreadgroup("schedulers", consumer, {stream: ">"})
        return len(reply[0][1]) if reply else 0

    async def num_pending(self) -> int:
        pending: int = (await self.redis.xpending(self.key("requests"), "schedulers"))["pending"]
        return pending

    async def everything(self) -> dict[bytes, Any]:
        """All keys and values, to see that nothing has changed."""
        found: dict[bytes, Any] = {}
        async for key in self.redis.scan_iter():
            is_hash = await self.redis.type(key) == b"hash"  # of which a dump has the fields in any order
            found[key] = await (self.redis.hgetall(key) if is_hash else self.redis.dump(key))
        return found

    @contextlib.asynccontextmanager
    async def full_server(self) -> AsyncIterator[None]:
        await self.redis.config_set("maxmemory", 1)
        try:
            yield
        finally:
            await self.redis.config_set("maxmemory", 0)


def entry(
    sid: str = "r.0", epoch: int = 1, first: int = 0, count: int = 1, chunk: bytes = b"c", outcome: bytes = b""
) -> CommitEntry:
    return CommitEntry(sid, epoch, first, count, chunk if count else b"", outcome)


@contextlib.asynccontextmanager
async def world_at(url: str, scripts: type[Scripts] = Scripts) -> AsyncIterator[World]:
    redis = bus.connect(url)
    try:
        yield World(redis, scripts(redis, MODEL))
    finally:
        await redis.aclose()
