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

from services.scheduler.actions import Action, Assign, Call, CheckPlaced, Finish, Plan, ReadRecord, Requeue
from services.scheduler.core import SchedulerCore
from services.scheduler.fleet import Fleet
from services.scheduler.metrics_defs import SchedulerMetrics
from services.scheduler.sequence import Queued
from shared import metrics
from shared.bus import StreamReader
from shared.leases import IDLE_REFRESH_MS, Lapsed, Membership, StreamLost, new_incarnation
from shared.protocol import Event, Member, ProtocolError, decode, encode, pack_ids, split_sequence_id
from shared.records import Records
from shared.runtime import Stop, forever, run_until_stopped, wait_for_event
from shared.scripts import SCHEDULER_GROUP, Scripts

log = logging.getLogger(__name__)

CLAIM_IDLE_MS = 1000
TICK_S = 0.2  # while there is work
IDLE_TICK_S = 1.0


class SchedulerService:
    """redis: for commands; `blocking` and `heartbeat` are clients of their own (see shared.bus)."""

    def __init__(
        self, redis: Any, model: str, *, incarnation: str = "", prefix_caching: bool = True, max_strikes: int = 2,
        blocking: Any = None, heartbeat: Any = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.redis = redis
        self.scripts = Scripts(redis, model)
        self.records = Records(redis, self.scripts.prefix)
        self._blocking = blocking or redis
        self._beat = Scripts(heartbeat or redis, model)
        self._clock = clock
        self._prefix_caching = prefix_caching
        self._max_strikes = max_strikes
        self.fleet = Fleet(redis, self.scripts, self.records, clock, max_strikes)
        self.metrics = SchedulerMetrics()
        self._pump_lock = asyncio.Lock()
        self._pump_again = False
        self._todo: deque[Action] = deque()
        self._scan_now = asyncio.Event()
        self._pumped = asyncio.Event()  # since the last tick
        self._claimed_at = -math.inf
        self._next_incarnation = incarnation
        self._executors: dict[type[Action], Callable[[Any], Any]] = {
            ReadRecord: self._read_record, Call: self._call, Plan: self._plan, Assign: self._assign,
            Requeue: self._requeue, Finish: self._finish, CheckPlaced: self._check_placed,
        }  # fmt: skip

    # --- one life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begins a new life: nothing of an old one is valid."""
        incarnation = self._next_incarnation or new_incarnation("scheduler")
        self._next_incarnation = ""
        try:
            stream = self.scripts.key("requests")
            await self.redis.xgroup_create(stream, SCHEDULER_GROUP, id="0", mkstream=True)
        except ResponseError as e:
            if "BUSYGROUP" not in str(e):
                raise
        self.core = SchedulerCore(incarnation, self._prefix_caching, self._max_strikes)
        self._todo.clear()
        self.membership = Membership(
            self._beat, Member(kind="scheduler", incarnation=incarnation), [f"inbox:{incarnation}"]
        )
        last = await self.membership.join()
        newest = await self.redis.xrevrange(self.scripts.key("events"), count=1)
        events = newest[0][0].decode() if newest else "0-0"
        self.reader = StreamReader(self._blocking, self.scripts.prefix, last | {"events": events})
        self._handled = dict(last)
        await self.scan()

    @property
    def incarnation(self) -> str:
        return self.membership.incarnation

    async def heartbeat(self) -> None:
        """Refreshes the lease; a life that has lapsed, or lost its inbox, ends and another begins."""
        try:
            await self.membership.refresh(self._handled)
        except (Lapsed, StreamLost) as e:
            log.warning("this life is over (%s %s); starting a new one", type(e).__name__, e)
            self.fleet.on_left(self.incarnation)
            await self.scripts.gone("scheduler", self.incarnation)
            await self.start()
            return
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
        reply = await self._blocking.xreadgroup(
            SCHEDULER_GROUP, self.incarnation, {self.scripts.key("requests"): ">"}, count=256, block=block_ms or None
        )
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
        reply = await self.redis.xautoclaim(
            self.scripts.key("requests"), SCHEDULER_GROUP, self.incarnation, CLAIM_IDLE_MS, count=64
        )
        for _, fields in reply[1]:
            if fields:
                self._queue(fields)
        if reply[1]:
            await self.pump()

    def _queue(self, fields: dict[bytes, bytes]) -> None:
        try:
            queued = Queued(
                sid=fields[b"sid"].decode(), epoch=int(fields[b"epoch"]), num_prompt_tokens=int(fields[b"prompt"]),
                num_output_tokens=int(fields[b"output"]), priority=int(fields[b"priority"]),
                arrival_ms=int(fields[b"arrival"]), strikes=int(fields[b"strikes"]),
            )  # fmt: skip
        except (KeyError, ValueError):
            log.error("a queue entry is not ours, left alone: %s", sorted(fields))
            return
        self.core.on_queued(queued)

    async def read_inbox(self, block_ms: int) -> int:
        """Reports, answers of stores, and hints on the events stream."""
        reader = self.reader
        entries = await reader.read(block_ms)
        for entry in entries:
            try:
                message = decode(entry.fields[b"m"]) if b"m" in entry.fields else None
            except ProtocolError as e:
                log.error("%s: %s", entry.stream, e)
                continue
            if isinstance(message, Event):
                self._on_event(message)
            elif message is not None:
                self.core.on_message(message, self._clock())
        if reader is self.reader:
            self._handled = {s: i for s, i in reader.last.items() if s != "events"}
        if entries:
            await self.pump()
        return len(entries)

    def _on_event(self, event: Event) -> None:
        if event.kind == "cancelled":
            self.core.on_cancelled(event.id)
            return
        if event.kind == "left":
            self.fleet.on_left(event.id)
        if event.id != self.incarnation:
            self._scan_now.set()

    async def scan(self) -> None:
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
                    action = self._todo[0]
                    await self._executors[type(action)](action)
                    self._pump_again = True
                    if self._todo and self._todo[0] is action:  # not before: if its reply is lost, it is done again
                        self._todo.popleft()

    async def _read_record(self, action: ReadRecord) -> None:
        rid, _ = split_sequence_id(action.sid)
        record = await self.records.request(rid)
        if record is None:
            self.core.on_record(action.sid, None, b"")
            return
        queued = self.core.queue.get(action.sid)
        ids = record.prompt
        if queued is not None and queued.epoch > 0:
            for chunk in await self.records.log(action.sid):
                ids += pack_ids(chunk.ids)
        self.core.on_record(action.sid, ids, record.spec.salt)

    async def _call(self, action: Call) -> None:
        key = self.scripts.key(f"cache:{action.store}")
        if await self.redis.xadd(key, {"m": encode(action.message)}, nomkstream=True) is None:
            self.core.set_store(action.message.worker, "", 0)  # it reads no more; the scan finds its successor

    async def _plan(self, action: Plan) -> None:
        status = await self.scripts.plan("run", action.worker, action.term, [encode(c) for c in action.changes])
        if status != "ok":
            self.core.lose_worker(action.worker)
            self._scan_now.set()

    async def _assign(self, action: Assign) -> None:
        status = await self.scripts.assign(
            action.sid, action.epoch, action.worker, action.term, encode(action.admit)
        )  # fmt: skip
        self.core.on_assigned(action.sid, action.epoch, action.worker, status, self._clock())

    async def _requeue(self, action: Requeue) -> None:
        await self.scripts.requeue(action.sid, action.epoch)

    async def _finish(self, action: Finish) -> None:
        await self.scripts.finish(action.sid, action.outcome, action.epoch)

    async def _check_placed(self, action: CheckPlaced) -> None:
        for sid in await self.records.placed_on(action.worker):
            record = await self.records.sequence(sid)
            if record is None or record.state != "placed" or record.worker != action.worker:
                continue
            if (sid, record.epoch) not in action.shown:
                await self.scripts.requeue(sid, record.epoch)

    # --- the process -------------------------------------------------------------------------------------------------

    async def run(self, stop: Stop) -> None:
        await self.start()
        await run_until_stopped(
            [
                forever("queue", self._queue_loop, stop),
                forever("inbox", lambda: self.read_inbox(2000), stop, self.fleet.distrust_leases),
                forever("heartbeat", self._beat_loop, stop),
                forever("scan", self._scan_loop, stop),
                forever("tick", self._tick_loop, stop),
            ],
            stop,
        )
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
        if busy or any(v.running for v in views):
            await asyncio.sleep(TICK_S)
        else:
            await wait_for_event(self._pumped, IDLE_TICK_S)
        self._pumped.clear()
        if not self.core.hears_of_all(self._clock()):
            self._scan_now.set()  # a lease that has run out is noticed now, not at the next regular look
        if busy:
            await self.pump()
        if busy or self._clock() >= self._claimed_at + CLAIM_IDLE_MS / 1000:
            self._claimed_at = self._clock()
            await self.claim()
