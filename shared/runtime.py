"""How a service process lives: signals, loops that outlast a lost Redis, a clean end.

Knows nothing of what the loops do. A loop that fails for any other reason than a lost connection ends the process:
a supervised restart is better than a half-dead service.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from redis.asyncio import Redis

from shared.bus import LOST, backoff, check_keeps, wait_for_redis
from shared.loop_watch import WatchedLoop

log = logging.getLogger(__name__)

T = TypeVar("T")

START_TIMEOUT_S = 30.0  # for Redis to answer
FAREWELL_S = 2.0
EXIT_CONFIG = 78  # EX_CONFIG
EXIT_MODEL = 65  # EX_DATAERR
EXIT_LAPSED = 75  # EX_TEMPFAIL: start again as a new incarnation
EXIT_HUNG = 70
EXIT_ENGINE = 71
EXIT_MEMORY = 72
EXIT_MEANINGS = {
    EXIT_CONFIG: "its settings cannot be used", EXIT_MODEL: "its model cannot be served",
    EXIT_HUNG: "a step did not end", EXIT_ENGINE: "its engine cannot compute", EXIT_MEMORY: "memory has run out",
}  # fmt: skip
FINAL_EXITS = (EXIT_CONFIG, EXIT_MODEL)  # restarting will not help
CANCEL_AGAIN_S = 0.1
HURRY_S = 2.0


class Stop:
    """Set by the first SIGTERM or SIGINT. After a second one the process has HURRY_S to leave in order, without waiting
    for what still runs; a third ends it at once."""

    def __init__(self, exit: Callable[[int], Any] = os._exit) -> None:
        self._event = asyncio.Event()
        self._hurry = asyncio.Event()
        self._exit = exit

    def set(self) -> None:
        if self._hurry.is_set():
            self._exit(1)
        elif self._event.is_set():
            self._hurry.set()
            asyncio.get_running_loop().call_later(HURRY_S, self._exit, 1)
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()

    @property
    def hurried(self) -> bool:
        return self._hurry.is_set()

    async def in_a_hurry(self) -> None:
        """Returns at the second signal."""
        await self._hurry.wait()


async def forever(
    name: str, step: Callable[[], Awaitable[Any]], stop: Stop, on_lost: Callable[[], Any] = lambda: None
) -> None:
    """Repeats a step that blocks on its own broker or socket; waits with jitter while Redis is away.

    A step must be repeatable. on_lost is called once each time the connection is lost.
    """
    while not stop.is_set():
        try:
            await step()
        except LOST as e:
            log.warning("%s: Redis is away (%s)", name, str(e) or type(e).__name__)
            on_lost()
            async for _ in backoff():
                try:
                    await step()
                    log.info("%s: Redis is back", name)
                    break
                except LOST:
                    if stop.is_set():
                        return


async def all_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results; calls begin in this order and wait for replies together. The first exception is raised when
    all have ended: nothing of them is under way any more when they are made again."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> None:
    """Returns when the event is set, or after the time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


async def redis_answers(
    redis: Redis, stop: Stop, timeout_s: float = START_TIMEOUT_S, *, volatile: bool = False
) -> bool:
    """Waits for it at a service's start; False if the service is stopped meanwhile. NoRedis after timeout_s, and
    UnfitRedis for a server that does not keep what is written (volatile: one may forget it in a restart)."""

    async def ask() -> None:
        await wait_for_redis(redis, timeout_s)
        await check_keeps(redis, volatile)

    return await once("start", ask, stop)


async def once(name: str, step: Callable[[], Awaitable[Any]], stop: Stop) -> bool:
    """A step of a service's start, repeated with jitter while Redis is away; False if the service is stopped meanwhile.
    As in `forever`, the step must be repeatable."""

    async def until_done() -> None:
        async for _ in backoff():
            try:
                await step()
                return
            except LOST as e:
                log.warning("%s: Redis is away (%s)", name, str(e) or type(e).__name__)

    working, stopping = asyncio.ensure_future(until_done()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        await _cancel([working, stopping])


async def farewell(last_calls: Awaitable[Any]) -> None:
    """What a service that stops has to tell; where Redis is away it leaves without a word, and its lease runs out."""
    try:
        async with asyncio.timeout(FAREWELL_S):
            await last_calls
    except LOST as e:
        log.warning("left without a word, Redis is away (%s)", str(e) or type(e).__name__)


async def run_until_stopped(loops: list[Coroutine[Any, Any, None]], stop: Stop) -> None:
    """Runs the loops; returns when stop is set, having cancelled them. The first exception of a loop is raised."""
    tasks = [asyncio.ensure_future(loop) for loop in loops]
    stopper = asyncio.ensure_future(stop.wait())
    try:
        done, _ = await asyncio.wait([*tasks, stopper], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopper}:
            task.result()
            if not stop.is_set():
                raise RuntimeError(f"a service loop ended by itself: {task}")
    finally:
        await _cancel([*tasks, stopper])


async def _cancel(tasks: list[asyncio.Future[None]]) -> None:
    """Until they have ended: on Python 3.11 `asyncio.wait_for`, which redis-py's pipelines send through, can swallow a
    cancel that comes just as the commands have been sent; the task then goes on."""
    pending: set[asyncio.Future[None]] = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)  # the first exception has been raised already


def main(service: Callable[[Stop], Coroutine[Any, Any, int]]) -> int:
    """Runs an async service to its end with signals wired; its exit status."""

    async def wired() -> int:
        stop = Stop()
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, stop.set)
        return await service(stop)

    with asyncio.Runner(loop_factory=WatchedLoop) as runner:
        return runner.run(wired())
