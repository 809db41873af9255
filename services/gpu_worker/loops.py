"""The worker as a process: the service's steps as loops, and when each is due.

Reading the plan blocks on its stream; commits are due by the pacer, and the engine's thread wakes their loop for what
is urgent; the heartbeat is short while the lease is. An idle worker wakes once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from redis.exceptions import RedisError

from services.gpu_worker.commits import Place
from services.gpu_worker.failures import WorkerFailure
from services.gpu_worker.pacing import Pacer
from services.gpu_worker.service import WorkerService
from services.gpu_worker.watchdog import LOOK_AGAIN_S
from shared.bus import LOST
from shared.leases import BUSY_REFRESH_MS, IDLE_REFRESH_MS
from shared.runtime import Stop, forever, run_until_stopped, wait_for_event

log = logging.getLogger(__name__)

READ_BLOCK_MS = 1000  # the plan of a new life is read after at most this long
FAREWELL_S = 2.0  # for the last words of a process that stops
DRAIN_LOOK_S = 0.05


class WorkerLoops:
    def __init__(self, service: WorkerService, flush_interval_s: float) -> None:
        self._service = service
        self._pacer = Pacer(flush_interval_s)
        self._wake = asyncio.Event()  # there is something to flush
        self._flushed = asyncio.Event()
        self._parked = False  # the flush loop waits for something to flush, at most until the next report
        self._beat_missed = False

    async def run(self, stop: Stop, drain_timeout_s: float = 0.0) -> None:
        """Serves until stopped; then what can ends within the time, and the rest is handed over with all it has drawn.

        WorkerFailure if the process is to be replaced.
        """
        service = self._service
        loop = asyncio.get_running_loop()
        service.engine_loop.start(lambda: self._on_progress(loop))
        drained = Stop()
        steps: dict[str, Callable[[], Awaitable[Any]]] = {
            "plan": lambda: service.read_plan(READ_BLOCK_MS), "commit": self._flush_when_due,
            "heartbeat": self._beat_when_due,
        }  # fmt: skip
        if (fleet := service.fleet) is not None:
            steps["fleet"] = lambda: fleet.turn(lambda: service.incarnation, lambda: bool(service.running.sequences))
            steps["fleet's answers"] = fleet.take_in
        try:
            await run_until_stopped(
                [
                    *(forever(name, step, drained) for name, step in steps.items()),
                    self._drain(stop, drained, drain_timeout_s),
                ],
                drained,
            )
        except Exception as e:
            await self._part(e.blamed if isinstance(e, WorkerFailure) else ())
            raise
        try:
            await self._end_step()
            async with asyncio.timeout(FAREWELL_S):
                await service.leave()
        except (*LOST, TimeoutError) as e:
            log.warning("left without a word, Redis is away (%s)", str(e) or type(e).__name__)
        except WorkerFailure as e:
            await self._part(e.blamed)
            raise

    async def _drain(self, stop: Stop, drained: Stop, timeout_s: float) -> None:
        """A second signal cuts it short."""
        await stop.wait()
        now = asyncio.get_running_loop().time
        until = now() + timeout_s
        announcing = asyncio.ensure_future(self._announce_drain(timeout_s))
        while self._service.running.has_work and not stop.hurried and now() < until:
            self._flushed.clear()
            await wait_for_event(self._flushed, DRAIN_LOOK_S)
        announcing.cancel()
        drained.set()

    async def _announce_drain(self, timeout_s: float) -> None:
        if timeout_s > 0:
            try:
                await self._service.drain()
            except (*LOST, RedisError) as e:
                log.warning("nobody hears that this worker takes no more (%s)", str(e) or type(e).__name__)

    async def _part(self, blamed: Collection[Place]) -> None:
        """Of a failure: in order if it is known whom it happened to; else dead to others at once, as if killed."""
        service = self._service
        with contextlib.suppress(*LOST, TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await (service.leave(blamed) if blamed else service.life.membership.leave())

    async def _end_step(self) -> None:
        """Waits for the engine's last step, and keeps the lease meanwhile: what it draws is to be committed."""
        stopping = asyncio.ensure_future(asyncio.to_thread(self._service.engine_loop.stop))
        while not stopping.done():
            await asyncio.wait([stopping], timeout=BUSY_REFRESH_MS / 1000)
            await self._service.heartbeat()

    def _on_progress(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the engine's thread: wakes the flush loop if it has nothing to flush yet, or sleeps too long for this."""
        if not self._wake.is_set() and (self._parked or self._service.urgent):
            with contextlib.suppress(RuntimeError):  # the event loop is closed: the process ends
                loop.call_soon_threadsafe(self._wake.set)

    async def _flush_when_due(self) -> None:
        service = self._service
        service.watchdog.check_thread()
        self._parked = True  # before looking: what happens after the look wakes this loop
        self._wake.clear()
        now, urgent, pending = service.clock(), service.urgent, service.pending
        regular = self._pacer.due_in(now, pending=pending, running=bool(service.running.sequences))
        delay = 0.0 if urgent else regular
        self._parked = not pending  # what is drawn meanwhile is due sooner than the next report
        if delay is None or delay > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._wake.wait()
            return
        complete = await service.flush(urgent_only=urgent and (regular is None or regular > 0))
        self._pacer.flushed(now, service.num_entries, complete)
        self._flushed.set()

    async def _beat_when_due(self) -> None:
        service = self._service
        if not self._beat_missed:
            period_s = (BUSY_REFRESH_MS if service.lease_is_short else IDLE_REFRESH_MS) / 1000
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S if service.watchdog.suspects else period_s):
                    await service.lease_became_short.wait()
                service.lease_became_short.clear()
                if not service.beat_is_due:
                    return
        self._beat_missed = True
        await service.heartbeat()
        self._beat_missed = False
