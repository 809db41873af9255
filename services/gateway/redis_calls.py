"""How the gateway calls Redis: each call within a time limit, what must be heard again and again until it is, and what
is looked up every now and then.

Knows nothing of what is said.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import ResponseError

from shared.bus import CannotWrite, refuses_writes

log = logging.getLogger(__name__)

MAX_OWED = 20_000  # some 80 MB; what is forgotten beyond it at worst runs to its end for nobody
LOOK_S = 0.1  # between two looks at the same thing
LOOK_SPACING_S = 0.005  # between two looks at anything, however much there is to look at
CALL_TIMEOUT_S = 2.0  # of one try; a stalled Redis must not hold a response

T = TypeVar("T")


async def in_time(call: Awaitable[T], timeout_s: float = CALL_TIMEOUT_S) -> T:
    """The answer of Redis; one of `bus.LOST` when it does not answer in time or refuses to write."""
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except ResponseError as e:
        if refuses_writes(e):
            raise CannotWrite(str(e)) from e
        raise


class Owed:
    """What Redis has yet to hear, in order. Each call must be harmless to repeat: its answer may have been lost."""

    def __init__(self) -> None:
        self._calls: dict[str, Callable[[], Awaitable[object]]] = {}
        self._any = asyncio.Event()

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, what: str, call: Callable[[], Awaitable[object]]) -> None:
        """A call that is owed already, under the same name, is replaced; of too many the oldest is forgotten."""
        if what not in self._calls and len(self._calls) >= MAX_OWED:
            del self._calls[next(iter(self._calls))]
        self._calls[what] = call
        self._any.set()

    async def wait(self) -> None:
        """Returns when something is owed."""
        await self._any.wait()

    async def settle(self) -> None:
        """Makes the calls; when one is not answered, it and those after it stay owed. One that fails is given up: what
        it is about makes no sense in Redis, and others wait behind it."""
        while self._calls:
            what, call = next(iter(self._calls.items()))
            try:
                await in_time(call())
            except ResponseError as e:
                log.error("Redis cannot be told (%s): %s", what, e)
            if self._calls.get(what) is call:
                del self._calls[what]
        self._any.clear()


class Looks:
    """Many who look at the same time look less often, so that they leave Redis to others."""

    def __init__(self) -> None:
        self._last_at = 0.0

    def later(self, look: Callable[[], None], num_reads: int = 1) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        self._last_at = max(loop.time() + LOOK_S, self._last_at + LOOK_SPACING_S * num_reads)
        return loop.call_at(self._last_at, look)
