"""What a stack has left in Redis, read as a bystander: records, leases, blocks, and what is not at rest.

Uses the product's own messages and key names, and plain synchronous commands: it belongs to no event loop, and a look
takes well under a millisecond. Changes nothing that a service reads, except that it asks stores how much is free.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import redis

from shared.protocol import Member, Outcome, TokenChunk
from shared.scripts import SCHEDULER_GROUP, prefix_of
from shared.store_calls import Match, Matched
from shared.wire import decode, decode_as, encode, pack_ids

PROBE = "inbox:bystander"
STREAMS = {"gateway": "out", "scheduler": "inbox", "store": "cache", "worker": "plan"}
MAX_STREAM_LENGTH = 4
LASTING = {"requests", "queue", "members", "term", "events", "secret", "dead"}


@dataclass(frozen=True)
class Sequence:
    sid: str
    state: str
    epoch: int
    worker: str
    gateway: str
    num_tokens: int
    strikes: int
    outcome: Outcome | None


class State:
    def __init__(self, url: str, model: str) -> None:
        self.prefix = prefix_of(model)
        self.redis: Any = redis.Redis.from_url(url)
        self._num_probes = 0

    def close(self) -> None:
        self.redis.close()

    def key(self, name: str) -> str:
        return self.prefix + name

    def keys(self, pattern: str) -> list[str]:
        found = self.redis.scan_iter(_escaped(self.prefix) + pattern, count=1000)
        return sorted(key.decode().removeprefix(self.prefix) for key in found)

    # --- records -----------------------------------------------------------------------------------------------------

    def sequence(self, sid: str) -> Sequence | None:
        f = self.redis.hgetall(self.key(f"s:{sid}"))
        if not f:
            return None
        return Sequence(
            sid, f[b"state"].decode(), int(f[b"epoch"]), f.get(b"worker", b"").decode(), f[b"gateway"].decode(),
            int(f[b"num_tokens"]), int(f[b"strikes"]),
            decode_as(Outcome, f[b"outcome"]) if f.get(b"outcome") else None,
        )  # fmt: skip

    def sequences(self) -> list[Sequence]:
        names = [k.removeprefix("s:") for k in self.keys("s:*") if not k.endswith(":log")]
        return [s for s in map(self.sequence, names) if s is not None]

    def running(self) -> list[Sequence]:
        return [s for s in self.sequences() if s.state == "placed"]

    def log(self, sid: str) -> list[int]:
        """The committed tokens; AssertionError where a chunk does not begin where the one before it ended. What is
        said of the prompt's tokens comes before the answer's, under numbers below 0."""
        ids: list[int] = []
        chunks = [decode_as(TokenChunk, data) for data in self.redis.lrange(self.key(f"s:{sid}:log"), 0, -1)]
        position = min(0, chunks[0].first) if chunks else 0
        for chunk in chunks:
            assert chunk.first == position, f"{sid}: a chunk at {chunk.first}, where {position} was to come"
            position += len(chunk.ids)
            if chunk.first >= 0:
                ids += chunk.ids
        return ids

    def num_queued(self) -> int:
        return int(self.redis.xlen(self.key("requests")))

    # --- members -----------------------------------------------------------------------------------------------------

    def members(self) -> dict[str, Member]:
        """Those with a lease, by incarnation."""
        found = [decode_as(Member, data) for data in self.redis.hgetall(self.key("members")).values()]
        return {m.incarnation: m for m in found if self.redis.exists(self.key(f"lease:{m.kind}:{m.incarnation}"))}

    def alive(self, kind: str) -> list[str]:
        return sorted(i for i, m in self.members().items() if m.kind == kind)

    def owner(self, kind: str, worker: str) -> str:
        """Who leases the worker (kind run) or its pool (kind pool)."""
        return (self.redis.get(self.key(f"lease:{kind}:{worker}")) or b"").decode()

    def all_leased(self) -> bool:
        return all(self.owner("run", w) and self.owner("pool", w) for w in self.alive("worker"))

    # --- blocks ------------------------------------------------------------------------------------------------------

    def num_free(self, worker: str, timeout: float = 2.0) -> int:
        """Blocks of the worker's pool that are free or evictable, asked of the store that has them; -1: no answer."""
        self._num_probes += 1
        reply_to, call = f"{PROBE}:{id(self)}", self._num_probes
        last = self.redis.xadd(self.key(reply_to), {"born": ""})
        self.redis.expire(self.key(reply_to), 60)
        question = Match(
            call=call, reply_to=reply_to, worker=worker, run_term=0, pool_term=0, salt=b"", ids=pack_ids([0])
        )
        self.redis.xadd(self.key(f"cache:{self.owner('pool', worker)}"), {"m": encode(question)}, nomkstream=True)
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            replies = self.redis.xread({self.key(reply_to): last}, block=max(1, int(left * 1000)))
            for answer_id, fields in replies[0][1] if replies else []:
                last, answer = answer_id, decode(fields[b"m"])
                if isinstance(answer, Matched) and answer.call == call:
                    return answer.num_free
        return -1

    def gauges(self, kind: str, incarnation: str) -> dict[str, float]:
        """The metrics that the service has last published: name, or name{label value}, → value."""
        data = self.redis.get(self.key(f"metrics:{kind}:{incarnation}"))
        found = {}
        for _, _, _, samples in msgpack.unpackb(data) if data else []:
            for name, labels, value in samples:
                found[name + "".join(f"{{{v}}}" for v in labels.values())] = value
        return found

    # --- at rest -----------------------------------------------------------------------------------------------------

    def unrest(self) -> list[str]:
        """What keeps this from being a stack that nobody uses: open sequences, queued ones, blocks held."""
        return [*self._open_work(), *self._untrimmed_streams(), *self._lasting_keys(), *self._held_blocks()]

    def _open_work(self) -> Iterator[str]:
        for seq in self.sequences():
            if seq.state != "done":
                yield f"{seq.sid} is {seq.state}"
        if self.num_queued():
            yield f"{self.num_queued()} entries are queued"
        if int(self.redis.hget(self.key("queue"), "tokens") or 0):
            yield "tokens are counted as queued"
        if pending := self.redis.xpending(self.key("requests"), SCHEDULER_GROUP)["pending"]:
            yield f"{pending} queue entries are pending"
        for key in self.keys("on:*"):
            yield f"{key} is not empty"

    def _untrimmed_streams(self) -> Iterator[str]:
        """Invariant 8: who reads a stream trims it with its lease's refresh."""
        for incarnation, member in self.members().items():
            name = f"{STREAMS[member.kind]}:{incarnation}"
            if (length := self.redis.xlen(self.key(name))) > MAX_STREAM_LENGTH:
                yield f"{name} has {length} entries"

    def _lasting_keys(self) -> Iterator[str]:
        """What does not expire by itself must be one of the few keys that a model has as such."""
        names = self.keys("*")
        pipe = self.redis.pipeline(transaction=False)
        for name in names:
            pipe.ttl(self.key(name))
        for name, ttl in zip(names, pipe.execute(), strict=True):
            if ttl == -1 and name not in LASTING:
                yield f"{name} does not expire"

    def _held_blocks(self) -> Iterator[str]:
        """By what the services publish, so it is true some 2 s later than the state itself."""
        spare = 0.0
        for worker in self.alive("worker"):
            gauges = self.gauges("worker", worker)
            if gauges.get("headrace_worker_kv_blocks{held}", -1) != 0:
                yield f"{worker} holds {gauges.get('headrace_worker_kv_blocks{held}')} blocks"
            if gauges.get("headrace_num_sequences_running", -1) != 0:
                yield f"{worker} runs {gauges.get('headrace_num_sequences_running')} sequences"
            spare += gauges.get("headrace_worker_kv_blocks{spare}", 0)
        used = sum(self.gauges("store", store).get("headrace_kv_blocks{used}", -1) for store in self.alive("store"))
        if used != spare:
            yield f"the stores count {used:g} blocks as used, of which {spare:g} are spares of workers"


def _escaped(prefix: str) -> str:
    return "".join(f"[{c}]" if c in "[]*?{}" else c for c in prefix)
