"""Connections to Redis, made here alone, and reading of streams that this process owns.

Knows no message and no script. redis-py 8 sets a socket time-out of 5 s by default, which breaks longer blocking reads,
and its RESP3 replies have other shapes: both are fixed here. A blocked read occupies its connection, so heartbeats get
a client of their own (`connect` once more).
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from shared.redis_link import LinkedRedis

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
MAX_BLOCK_MS = 4000
SOCKET_TIMEOUT_S = 10.0  # well above any blocking read: a network that swallows everything must not hang us for good
PROMPT_S = 0.2  # an answer with the time that takes longer tells too little
# redis-py makes a connection error of a wrong or missing password, and of a certificate: waiting does not help there
_REFUSED = re.compile("invalid username-password|WRONGPASS|NOAUTH|Authentication required|CERTIFICATE_VERIFY_FAILED")
LOST = (ConnectionError, TimeoutError, BusyLoadingError, OSError)


class CannotWrite(ConnectionError):
    """Redis answers but refuses writes (full, its disk too, or a replica by now): as good as away until it does not."""


# How a server says so: redis-py knows some by class, and strips the word; a script's error carries it in the middle on
# 6.2, so that it has no class there.
_CANNOT_WRITE = (OutOfMemoryError, ReadOnlyError)
_CANNOT_WRITE_WORDS = ("OOM command not allowed", "MISCONF", "READONLY", "NOREPLICAS")


def refuses_writes(error: ResponseError) -> bool:
    return isinstance(error, _CANNOT_WRITE) or any(word in str(error) for word in _CANNOT_WRITE_WORDS)


class NoRedis(RedisError):
    """A service has waited in vain for Redis to answer; one sentence for the operator."""


class UnfitRedis(RedisError):
    """Redis answers and must not be used as it is; one sentence for the operator."""


class _Client(LinkedRedis):
    async def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().execute_command(*args, **options)
        except ResponseError as e:
            if refuses_writes(e):
                raise CannotWrite(str(e)) from e
            raise


def connect(url: str) -> Redis:
    """A client with a pool of its own. Nothing is sent before the first command; replies are bytes.

    No retry inside the library: after a lost connection a command may or may not have run, and only the caller knows
    that repeating it is harmless. A command that is refused because nothing can be written raises CannotWrite.
    """
    return _Client.from_url(
        url, socket_timeout=SOCKET_TIMEOUT_S, socket_connect_timeout=CONNECT_TIMEOUT_S, protocol=2,
        retry=Retry(NoBackoff(), 0), retry_on_error=[], health_check_interval=0, decode_responses=False,
        driver_info=None,  # its CLIENT SETINFO costs a round trip, and a service's user may not use CLIENT
    )  # fmt: skip


def id_key(stream_id: str) -> tuple[int, int]:
    """Stream ids in their order."""
    ms, _, seq = stream_id.partition("-")
    return int(ms), int(seq or 0)


@dataclass(frozen=True, slots=True)
class Entry:
    stream: str
    id: str
    fields: dict[bytes, bytes]


class StreamReader:
    """Reads several streams with one blocking call and remembers what it has read.

    `last` may be handed to `Scripts.refresh`, which trims the streams up to it; hand over only what is handled.
    """

    def __init__(self, redis: Any, prefix: str, last: dict[str, str]) -> None:
        self._redis = redis
        self._prefix = prefix
        self.last = dict(last)

    async def read(self, block_ms: int, count: int = 256) -> list[Entry]:
        """Entries after the last ones read; [] after block_ms without any. block_ms 0 returns at once."""
        assert block_ms <= MAX_BLOCK_MS, block_ms
        streams = {self._prefix + name: last for name, last in self.last.items()}
        reply = await self._redis.xread(streams, count=count, block=block_ms or None)
        entries: list[Entry] = []
        for name, items in reply:
            stream = name.decode()[len(self._prefix) :]
            entries += [Entry(stream, id.decode(), fields) for id, fields in items]
            if items:
                self.last[stream] = items[-1][0].decode()
        return entries


async def ask_time(redis: Redis, clock: Callable[[], float]) -> tuple[float, float] | None:
    """Redis' time in milliseconds, and when it was that by the own clock; None if the answer took too long to tell."""
    asked_at = clock()
    seconds, micros = await redis.time()
    heard_at = clock()
    if heard_at - asked_at >= PROMPT_S:
        return None
    return seconds * 1000 + micros / 1000, (asked_at + heard_at) / 2


async def backoff() -> AsyncIterator[None]:
    """Yields at growing, jittered distances (0.05 to 2 s): `async for _ in backoff(): try ... else: break`."""
    delay = 0.05
    while True:
        yield
        await asyncio.sleep(delay * (0.5 + random.random()))
        delay = min(2.0, delay * 2)


async def wait_for_redis(redis: Redis, timeout_s: float) -> None:
    """Returns when Redis answers; NoRedis after timeout_s."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    waits = False
    async for _ in backoff():
        try:
            await redis.ping()
            return
        except LOST as e:
            if _REFUSED.search(str(e)):
                raise UnfitRedis(f"Redis refuses this service: {e}") from e
            if asyncio.get_running_loop().time() > deadline:
                raise NoRedis(f"Redis does not answer: {e}") from e
            if not waits:
                log.warning("waiting for Redis (%s)", str(e) or type(e).__name__)
            waits = True


async def check_keeps(redis: Redis, volatile: bool) -> None:
    """UnfitRedis unless what is written stays: in memory, and over a restart too where not volatile."""
    memory = await redis.info("memory")
    if memory.get("maxmemory") and memory.get("maxmemory_policy") != "noeviction":
        policy = memory.get("maxmemory_policy")
        raise UnfitRedis(f"Redis drops keys when it is full ({policy}): set its maxmemory-policy to noeviction")
    if not volatile and not (await redis.info("persistence")).get("aof_enabled"):
        raise UnfitRedis(
            "Redis keeps no append-only file, so that accepted requests are lost when it restarts: "
            "set appendonly yes there, or accept that with --volatile (HEADRACE_VOLATILE=1)"
        )
