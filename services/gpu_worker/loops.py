"""The worker as a process: the service's steps as loops, and when each is due.

Reading the plan blocks on its stream; commits are due by the pacer, and the engine's thread wakes their loop for what
is urgent; the heartbeat is short while the lease is. An idle worker wakes once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from services.gpu_worker.pacing import Pacer
from services.gpu_worker.service import WorkerService
from shared.bus import LOST
from shared.leases import BUSY_REFRESH_MS, IDLE_REFRESH_MS
from shared.runtime import Stop, forever, run_until_stopped

log = logging.getLogger(__name__)

READ_BLOCK_MS = 1000  # the plan of a new life is read after at most this long
FAREWELL_S = 2.0  # for the last words of a process that stops


class WorkerLoops:
    def __init__(self, service: WorkerService, flush_interval_s: float) -> None:
        self._service = service
        self._pacer = Pacer(flush_interval_s)
        self._wake = asyncio.Event()  # there is something to flush
        self._parked = False  # the flush loop waits for something to flush, at most until the next report
        self._beat_missed = False

    async def run(self, stop: Stop) -> None:
        """Serves until stopped; then commits what is drawn and hands the running sequences back.

        Raises what ended the engine, or EngineHung: the process is to be replaced.
        """
        service = self._service
        loop = asyncio.get_running_loop()
        service.engine_loop.start(lambda: self._on_progress(loop))
        try:
            await run_until_stopped(
                [
                    forever("plan", lambda: service.read_plan(READ_BLOCK_MS), stop),
                    forever("commit", self._flush_when_due, stop),
                    forever("heartbeat", self._beat_when_due, stop),
                ],
                stop,
            )
        except Exception:
            with contextlib.suppress(*LOST, TimeoutError):  # dead to others at once, as if killed
                async with asyncio.timeout(FAREWELL_S):
                    await service.life.membership.leave()
            raise
        try:
            await self._end_step()
            async with asyncio.timeout(FAREWELL_S):
                await service.leave()
        except (*LOST, TimeoutError) as e:
            log.warning("left without a word, Redis is away (%s)", str(e) or type(e).__name__)

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
        service.check_engine()
        self._parked = True  # before looking: what happens after the look wakes this loop
        self._wake.clear()
        now, urgent, pending = service.clock(), service.urgent, service.pending
        regular = self._pacer.due_in(now, pending=pending, running=service.has_sequences)
        delay = 0.0 if urgent else regular
        self._parked = not pending  # what is drawn meanwhile is due sooner than the next report
        if delay is None or delay > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._wake.wait()
            return
        complete = await service.flush(urgent_only=urgent and (regular is None or regular > 0))
        self._pacer.flushed(now, service.num_entries, complete)

    async def _beat_when_due(self) -> None:
        service = self._service
        if not self._beat_missed:
            period_ms = BUSY_REFRESH_MS if service.lease_is_short else IDLE_REFRESH_MS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period_ms / 1000):
                    await service.lease_became_short.wait()
                service.lease_became_short.clear()
                if not service.beat_is_due:
                    return
        self._beat_missed = True
        await service.heartbeat()
        self._beat_missed = False
