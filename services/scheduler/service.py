"""The scheduler's shell: reads queue, inbox and events, feeds the core, and carries out what it decides.

Every method is one step that may be repeated or lost half way: the state is in Redis, at the workers and in the
stores. Decides nothing itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from redis.exceptions import ResponseError

from services.scheduler.actions import Action
from services.scheduler.core import SchedulerCore
from services.scheduler.executor import Executor
from services.scheduler.fleet import Fleet
from services.scheduler.metrics_defs import SchedulerMetrics
from services.scheduler.sequence import Queued
from shared import metrics
from shared.bus import StreamReader, ask_time
from shared.leases import IDLE_REFRESH_MS, Lapsed, Membership, StreamLost, new_incarnation
from shared.protocol import Event, Member
from shared.records import Records
from shared.runtime import Stop, farewell, forever, once, run_until_stopped, wait_for_event
from shared.scripts import SCHEDULER_GROUP, Scripts
from shared.wire import ProtocolError, decode

log = logging.getLogger(__name__)

CLAIM_IDLE_MS = 1000
TICK_S = 0.2  # while there is work
IDLE_TICK_S = 1.0
SILENT_TICK_S = 0.05  # while a worker says nothing: how late the end of its lease is noticed


class SchedulerService:
    """redis: for commands; `blocking` and `heartbeat` are clients of their own (see shared.bus)."""

    def __init__(
        self, redis: Any, model: str, *, incarnation: str = "", prefix_caching: bool = True, max_strikes: int = 2,
        min_priority: int = 0,
        blocking: Any = None, heartbeat: Any = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.redis = redis
        self.scripts = Scripts(redis, model)
        self.records = Records(redis, self.scripts.prefix)
        self._blocking = blocking or redis
        self._beat = Scripts(heartbeat or redis, model)
        self._clock = clock
        self._prefix_caching = prefix_caching
        self._max_strikes, self._min_priority = max_strikes, min_priority
        self.fleet = Fleet(redis, self.scripts, self.records, clock, max_strikes)
        self.metrics = SchedulerMetrics()
        self._pump_lock = asyncio.Lock()
        self._pump_again = False
        self._todo: deque[Action] = deque()
        self._living = asyncio.Lock()
        self._scanning = asyncio.Lock()
        self._scan_now = asyncio.Event()
        self._pumped = asyncio.Event()  # since the last tick
        self._claimed_at = -math.inf
        self._next_incarnation = incarnation
        self._executor = Executor(self.scripts, self.records, clock, self._scan_now.set)

    # --- one life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self.begin_life()
        await self.scan()

    async def begin_life(self) -> None:
        """Nothing of an old life is valid. To be repeated until it comes through; until then the old one is there.
        Nothing may fail once it has joined: a repeat would be another incarnation."""
        incarnation = self._next_incarnation = self._next_incarnation or new_incarnation("scheduler")
        membership = Membership(self._beat, Member(kind="scheduler", incarnation=incarnation), [f"inbox:{incarnation}"])
        newest = await self.redis.xrevrange(self.scripts.key("events"), count=1)
        events = newest[0][0].decode() if newest else "0-0"
        redis_time = await ask_time(self._beat.redis, self._clock)
        last = await membership.join()
        self._next_incarnation = ""
        self.membership = membership
        self.core = SchedulerCore(incarnation, self._prefix_caching, self._max_strikes, self._min_priority)
        if redis_time is not None:
            self.core.set_redis_time(*redis_time)
        self._todo = deque()
        self.reader = StreamReader(self._blocking, self.scripts.prefix, last | {"events": events})
        self._handled = dict(last)
        self._claim_from = "0-0"

    @property
    def incarnation(self) -> str:
        return self.membership.incarnation

    async def heartbeat(self) -> None:
        """Refreshes the lease; a life that has lapsed, or lost its inbox, ends and another begins."""
        async with self._living:
            try:
                await self.membership.refresh(self._handled)
            except (Lapsed, StreamLost) as e:
                log.warning("this life is over (%s %s); starting a new one", type(e).__name__, e)
                self.fleet.on_left(self.incarnation)
                await self.scripts.gone("scheduler", self.incarnation)
                await self.start()
                return
        if (redis_time := await ask_time(self._beat.redis, self._clock)) is not None:
            self.core.set_redis_time(*redis_time)
        self.metrics.observe(self.core)
        self.metrics.observe_redis(await self._beat.redis.info("cpu"))
        await metrics.publish(
            self._beat.redis, self.scripts.prefix, "scheduler", self.incarnation, self.metrics.registry
        )

    # --- events ------------------------------------------------------------------------------------------------------

    async def read_queue(self, block_ms: int) -> int:
        """New headers, for as long as this scheduler leases a worker to place them on."""
        if not self.core.workers:
            return 0
        try:
            reply = await self._blocking.xreadgroup(
                SCHEDULER_GROUP, self.incarnation, {self.scripts.key("requests"): ">"}, count=256,
                block=block_ms or None,
            )  # fmt: skip
        except ResponseError as e:
            await self._on_no_queue(e)
            return 0
        entries = reply[0][1] if reply else []
        for _, fields in entries:
            self._queue(fields)
        if entries:
            await self.pump()
        return len(entries)

    async def claim(self) -> None:
        """Entries that a dead scheduler holds, or one that has had no room for them for a second."""
        if not any(view.has_room() for view in self.core.workers.values()):
            return
        try:
            reply = await self.redis.xautoclaim(
                self.scripts.key("requests"), SCHEDULER_GROUP, self.incarnation, CLAIM_IDLE_MS, self._claim_from,
                count=64,
            )  # fmt: skip
        except ResponseError as e:
            await self._on_no_queue(e)
            return
        self._claim_from = reply[0].decode()
        for _, fields in reply[1]:
            if fields:
                self._queue(fields)
        if reply[1]:
            await self.pump()

    async def _on_no_queue(self, error: ResponseError) -> None:
        """Redis has come back without the queue, and so without this life."""
        if "NOGROUP" not in str(error):
            raise error
        await self.heartbeat()
        await self.scripts.open_queue()

    def _queue(self, fields: dict[bytes, bytes], offered: bool = False) -> None:
        try:
            queued = Queued(
                sid=fields[b"sid"].decode(), epoch=int(fields[b"epoch"]), num_prompt_tokens=int(fields[b"prompt"]),
                num_output_tokens=max(0, int(fields[b"output"])), priority=int(fields[b"priority"]),
                arrival_ms=int(fields[b"arrival"]), strikes=int(fields[b"strikes"]), offered=offered,
                key=fields.get(b"key", b"").decode(), start_by_ms=int(fields.get(b"start_by", 0)),
                first_by_ms=int(fields.get(b"first_by", 0)), end_by_ms=int(fields.get(b"end_by", 0)),
            )  # fmt: skip
        except (KeyError, ValueError):
            log.error("a queue entry is not ours, left alone: %s", sorted(fields))
            return
        self.core.on_queued(queued, self._clock())

    async def read_inbox(self, block_ms: int) -> int:
        """Reports, answers of stores, and hints on the events stream."""
        reader = self.reader
        entries = await reader.read(block_ms)
        if reader is not self.reader:
            return 0  # another life has begun: this was for the old one
        for entry in entries:
            if b"sid" in entry.fields:
                self._queue(entry.fields, offered=True)
                continue
            try:
                message = decode(entry.fields[b"m"]) if b"m" in entry.fields else None
            except ProtocolError as e:
                log.error("%s: %s", entry.stream, e)
                continue
            if isinstance(message, Event):
                self._on_event(message)
            elif message is not None:
                self.core.on_message(message, self._clock())
        self._handled = {s: i for s, i in reader.last.items() if s != "events"}
        if entries:
            await self.pump()
        return len(entries)

    def _on_event(self, event: Event) -> None:
        if event.kind == "cancelled":
            self.core.on_cancelled(event.id, self._clock())
            return
        if event.kind == "left":
            self.fleet.on_left(event.id)
        if event.id != self.incarnation:
            self._scan_now.set()

    async def scan(self) -> None:
        async with self._scanning:
            await self.fleet.scan(self.core, self.incarnation)
        await self.pump()

    # --- actions -----------------------------------------------------------------------------------------------------

    async def pump(self) -> None:
        """Carries out what the core decides, until it decides nothing more. One at a time, so that changes of block
        ownership reach plan streams and stores in the order in which they were decided."""
        self._pump_again = True
        self._pumped.set()
        if self._pump_lock.locked():
            return
        async with self._pump_lock:
            while self._pump_again or self._todo:
                self._pump_again = False
                self._todo += self.core.decide(self._clock())
                while self._todo:
                    todo = self._todo
                    num_done = await self._executor.carry_out(todo, self.core)
                    self._pump_again = True
                    if self._todo is todo:  # the same life. Not before: if the reply is lost, it is done again
                        for _ in range(num_done):
                            todo.popleft()

    def on_redis_lost(self) -> None:
        """It may be another one that answers next."""
        self.fleet.distrust_leases()
        self.core.agree_anew()

    # --- the process -------------------------------------------------------------------------------------------------

    async def run(self, stop: Stop) -> None:
        if not await once("start", self.begin_life, stop):
            return
        self._scan_now.set()
        await run_until_stopped(
            [
                forever("queue", self._queue_loop, stop),
                forever("inbox", lambda: self.read_inbox(2000), stop, self.on_redis_lost),
                forever("heartbeat", self._beat_loop, stop),
                forever("scan", self._scan_loop, stop),
                forever("tick", self._tick_loop, stop),
            ],
            stop,
        )
        await farewell(self._leave())

    async def _leave(self) -> None:
        for worker in list(self.core.workers):
            await self.scripts.drop_lease("run", worker, self.incarnation)
        await self.membership.leave()

    async def _queue_loop(self) -> None:
        if not self.core.workers:
            await asyncio.sleep(TICK_S)
            return
        await self.read_queue(2000)

    async def _beat_loop(self) -> None:
        await asyncio.sleep(IDLE_REFRESH_MS / 1000)
        await self.heartbeat()

    async def _scan_loop(self) -> None:
        await wait_for_event(self._scan_now, IDLE_REFRESH_MS / 1000)
        self._scan_now.clear()
        await self.scan()

    async def _tick_loop(self) -> None:
        """Timers of the core: calls to repeat, leaders waited for in vain, workers that are silent. Asleep while
        nothing waits or runs."""
        views = self.core.workers.values()
        busy = self.core.queue or len(self.core.calls) or any(v.store == "" for v in views)
        active = busy or any(v.running for v in views)
        if active:
            await asyncio.sleep(TICK_S if self.core.hears_of_all(self._clock()) else SILENT_TICK_S)
        else:
            await wait_for_event(self._pumped, IDLE_TICK_S)
        self._pumped.clear()
        if not self.core.hears_of_all(self._clock()):
            self._scan_now.set()  # a lease that has run out is noticed now, not at the next regular look
        if active:  # also for the deadlines of what runs
            await self.pump()
        if busy or self._clock() >= self._claimed_at + CLAIM_IDLE_MS / 1000:
            self._claimed_at = self._clock()
            await self.claim()
