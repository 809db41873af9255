"""Which services of this model are alive, and what the workers among them can take.

Reads membership and nothing else; decides nothing about placement. What it knows is as old as its last look, which is
at most a moment: a hint on the `events` stream or the refresh interval brings the next.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from services.gateway.admission import unavailable
from services.gateway.preparation import Limits
from services.gateway.redis_calls import CALL_TIMEOUT_S, in_time
from shared.bus import StreamReader
from shared.protocol import Event, Member
from shared.records import Records
from shared.wire import ProtocolError, decode_as

log = logging.getLogger(__name__)

REFRESH_S = 2.0
STALE_S = 10.0  # readiness fails when Redis has told nothing for so long
RETRY_AFTER_S = 2  # about what a worker's restart takes


class Fleet:
    def __init__(self, redis: Any, records: Records, prefix: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._records = records
        self._redis = redis
        self._prefix = prefix
        self._events: StreamReader | None = None
        self._clock = clock
        self._looked_at = -STALE_S
        self._alive: tuple[Member, ...] = ()

    async def turn(self) -> None:
        """Waits for an event or for the next look to be due, and looks; the first one waits for nothing."""
        if self._events is None:
            newest = await in_time(self._redis.xrevrange(self._prefix + "events", count=1))
            self._events = StreamReader(self._redis, self._prefix, {"events": newest[0][0].decode() if newest else "0"})
        left_s = self._looked_at + REFRESH_S - self._clock()
        if left_s > 0:
            block_ms = int(left_s * 1000) + 1
            entries = await in_time(self._events.read(block_ms), CALL_TIMEOUT_S + left_s)
            if entries and not any(_is_membership(entry.fields) for entry in entries):
                return
        await self.look()

    async def look(self) -> None:
        members = await in_time(self._records.members())
        alive = tuple(member for member, leased in members.values() if leased)
        if {m.incarnation for m in alive} != {m.incarnation for m in self._alive}:
            log.info("alive: %s", ", ".join(f"{n} {kind}" for kind, n in sorted(_count(alive).items())) or "nothing")
        self._alive = alive
        self._looked_at = self._clock()

    @property
    def members(self) -> tuple[Member, ...]:
        return self._alive

    @property
    def workers(self) -> tuple[Member, ...]:
        return tuple(m for m in self._alive if m.kind == "worker")

    def num_alive(self) -> dict[str, int]:
        return {kind: _count(self._alive)[kind] for kind in ("gateway", "scheduler", "store", "worker")}

    def is_fresh(self) -> bool:
        return self._clock() - self._looked_at < STALE_S

    def is_ready(self) -> bool:
        """Redis has answered lately and a worker is alive."""
        return self.is_fresh() and bool(self.workers)

    def limits(self, max_choices: int) -> Limits:
        """What the roomiest live worker takes; TryLater when none is alive."""
        workers = self.workers
        if not workers:
            raise unavailable("no worker is alive", "no_worker", RETRY_AFTER_S)
        return Limits(
            max_model_len=max(w.max_model_len for w in workers),
            pool_tokens=max(w.num_blocks * w.block_size for w in workers),
            max_choices=max_choices,
        )

    def fingerprint(self) -> str | None:
        """Names the kernel variants that may answer: within one, equal requests have equal answers."""
        variants = sorted({w.variant for w in self.workers})
        return "fp_" + hashlib.sha256("\n".join(variants).encode()).hexdigest()[:12] if variants else None


def _count(members: tuple[Member, ...]) -> Counter[str]:
    return Counter(m.kind for m in members)


def _is_membership(fields: dict[bytes, bytes]) -> bool:
    try:
        return decode_as(Event, fields.get(b"m", b"")).kind in ("joined", "left")
    except ProtocolError:
        return False
