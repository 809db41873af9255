"""Reading what the scripts wrote: request and sequence records, token logs, members. Changes nothing.

Plain commands, not scripts: what is read may be old by the time it is used, and only scripts decide.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from shared.protocol import Member, MemberKind, RequestSpec, TokenChunk
from shared.wire import ProtocolError, decode_as, unpack_ids


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    state: str
    epoch: int
    worker: str
    gateway: str
    attach: int
    num_tokens: int
    strikes: int
    num_prompt_tokens: int
    outcome: bytes
    priority: int = 0
    arrival_ms: int = 0


@dataclass(frozen=True, slots=True)
class Reader:
    """Who reads a sequence that has not ended; gateway empty: its client has left, and it is cancelled after
    orphan_at_ms of Redis' time. Where the gateway has died, its client has at least resume_ms to come back."""

    gateway: str
    attach: int
    resume_ms: int = 0
    orphan_at_ms: int = 0


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """owner: who made it (an API key's id); only the owner may attach. resume_ms: how long it goes on when its client
    has left. body_digest: of the call, where a repeated one joins it."""

    spec: RequestSpec
    prompt: bytes  # packed ids
    owner: str
    resume_ms: int = 0
    body_digest: str = ""

    @property
    def prompt_ids(self) -> list[int]:
        return unpack_ids(self.prompt)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Of a request, in Redis' time (ms); 0: none. owner: the API key's id."""

    owner: str = ""
    first_by_ms: int = 0
    end_by_ms: int = 0


@dataclass(frozen=True, slots=True)
class DeadRecord:
    """A request that workers have died of, or that an engine failed on. fields: sid, reason, deaths, prompt and output
    (numbers of tokens), worker (the last one)."""

    id: str  # begins with Redis' time in ms
    fields: dict[str, str]

    @property
    def sid(self) -> str:
        return self.fields.get("sid", "")

    @property
    def at_s(self) -> float:
        return int(self.id.partition("-")[0]) / 1000


class Records:
    def __init__(self, redis: Any, prefix: str) -> None:
        self._redis = redis
        self._prefix = prefix

    async def request(self, rid: str) -> RequestRecord | None:
        """None when there is no record (it expired); ProtocolError when it is not ours."""
        prompt, spec, owner, resume_ms, body_digest = await self._redis.hmget(
            f"{self._prefix}r:{rid}", ["prompt", "spec", "owner", "resume_ms", "body_digest"]
        )
        if prompt is None or spec is None:
            return None
        return RequestRecord(
            decode_as(RequestSpec, spec), prompt, (owner or b"").decode(), int(resume_ms or 0),
            (body_digest or b"").decode(),
        )  # fmt: skip

    async def deadlines(self, rid: str) -> Deadlines:
        f = await self._redis.hmget(f"{self._prefix}r:{rid}", ["owner", "first_by", "end_by"])
        return Deadlines((f[0] or b"").decode(), int(f[1] or 0), int(f[2] or 0))

    async def sequence(self, sid: str) -> SequenceRecord | None:
        f = await self._redis.hgetall(f"{self._prefix}s:{sid}")
        if not f:
            return None
        return SequenceRecord(
            state=f[b"state"].decode(),
            epoch=int(f[b"epoch"]),
            worker=f.get(b"worker", b"").decode(),
            gateway=f[b"gateway"].decode(),
            attach=int(f[b"attach"]),
            num_tokens=int(f[b"num_tokens"]),
            strikes=int(f[b"strikes"]),
            num_prompt_tokens=int(f[b"prompt_tokens"]),
            priority=int(f[b"priority"]),
            arrival_ms=int(f[b"arrival_ms"]),
            outcome=f.get(b"outcome", b""),
        )

    async def log(self, sid: str, first_chunk: int = 0, max_chunks: int | None = None) -> list[TokenChunk]:
        """Chunks of the durable token log, from chunk number first_chunk (not token) on."""
        last = -1 if max_chunks is None else first_chunk + max_chunks - 1
        chunks = await self._redis.lrange(f"{self._prefix}s:{sid}:log", first_chunk, last)
        return [decode_as(TokenChunk, data) for data in chunks]

    async def dead(self, count: int) -> list[DeadRecord]:
        """The last ones that workers have died of, the latest first."""
        entries = await self._redis.xrevrange(f"{self._prefix}dead", count=count)
        return [DeadRecord(id.decode(), {k.decode(): v.decode() for k, v in f.items()}) for id, f in entries]

    async def retained_ms(self, rid: str) -> int:
        """How long the record of a request that has ended can still be read; 0: not any more."""
        return max(0, int(await self._redis.pttl(f"{self._prefix}r:{rid}")))

    async def placed_on(self, worker: str) -> list[str]:
        return sorted(sid.decode() for sid in await self._redis.smembers(f"{self._prefix}on:{worker}"))

    async def num_placed_on(self, workers: Sequence[str]) -> dict[str, int]:
        if not workers:
            return {}
        async with self._redis.pipeline(transaction=False) as pipe:
            for worker in workers:
                pipe.scard(f"{self._prefix}on:{worker}")
            return dict(zip(workers, await pipe.execute(), strict=True))

    async def readers(self, sids: Sequence[str]) -> tuple[dict[str, Reader], int]:
        """Of those that have not ended, who reads them; and the Redis time in milliseconds."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.time()
            for sid in sids:
                pipe.hmget(f"{self._prefix}s:{sid}", ["state", "gateway", "attach", "resume_ms", "orphan_at_ms"])
            (seconds, micros), *rows = await pipe.execute()
        readers = {
            sid: Reader(gateway.decode(), int(attach), int(resume_ms or 0), int(orphan_at_ms or 0))
            for sid, (state, gateway, attach, resume_ms, orphan_at_ms) in zip(sids, rows, strict=True)
            if state in (b"queued", b"placed")
        }
        return readers, seconds * 1000 + micros // 1000

    async def alive(self, kind: MemberKind, incarnations: Collection[str]) -> set[str]:
        """Those of them that have a lease."""
        ids = sorted(incarnations)
        leases = await self._redis.mget([f"{self._prefix}lease:{kind}:{i}" for i in ids]) if ids else []
        return {i for i, lease in zip(ids, leases, strict=True) if lease is not None}

    async def living(self, kind: MemberKind) -> set[str]:
        """All of that kind that have a lease."""
        return await self.alive(kind, [i for i, member in (await self._members()).items() if member.kind == kind])

    async def members(self) -> dict[str, tuple[Member, bool]]:
        """Every incarnation, with whether its lease is alive."""
        found = await self._members()
        if not found:
            return {}
        leases = await self._redis.mget([f"{self._prefix}lease:{m.kind}:{m.incarnation}" for m in found.values()])
        return {m.incarnation: (m, lease is not None) for m, lease in zip(found.values(), leases, strict=True)}

    async def _members(self) -> dict[str, Member]:
        found: dict[str, Member] = {}
        for data in (await self._redis.hgetall(f"{self._prefix}members")).values():
            try:
                member = decode_as(Member, data)
            except ProtocolError:
                continue  # another version's: its own services deal with it
            found[member.incarnation] = member
        return found

    async def leases(self, workers: Sequence[str]) -> dict[str, tuple[str, str, int]]:
        """worker -> (scheduler that leases it, store that leases its pool, the pool's term); "" and 0 where none."""
        if not workers:
            return {}
        keys = [f"{self._prefix}lease:{kind}:{w}" for w in workers for kind in ("run", "pool")]
        owners = [(o or b"").decode() for o in await self._redis.mget(keys)]
        terms = await self._redis.hmget(f"{self._prefix}term", [f"pool:{w}" for w in workers])
        return {w: (owners[2 * i], owners[2 * i + 1], int(terms[i] or 0)) for i, w in enumerate(workers)}
