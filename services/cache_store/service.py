"""The cache store's shell: takes pool leases, reads calls, sends answers.

Every method is one step that may be repeated or lost half way; what blocks are whose is in `store_core`. A life that
lapses (or loses its stream) forgets every pool: another store may own them by now.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from services.cache_store.fleet_store import FleetStore
from services.cache_store.metrics_defs import StoreMetrics
from services.cache_store.store_core import Reply, StoreCore
from shared import metrics
from shared.bus import Entry, StreamReader
from shared.leases import IDLE_LEASE_MS, IDLE_REFRESH_MS, Lapsed, Membership, StreamLost, new_incarnation
from shared.protocol import Event, Member
from shared.records import Records
from shared.runtime import Stop, farewell, forever, once, run_until_stopped, wait_for_event
from shared.scripts import Scripts
from shared.sharing import is_member_dead, share_leases
from shared.store_calls import FleetCall
from shared.wire import ProtocolError, decode, encode
from shared.worker_protocol import ListInventory

log = logging.getLogger(__name__)


class StoreService:
    """redis: for commands; `blocking` and `heartbeat` are clients of their own (see shared.bus)."""

    def __init__(
        self, redis: Any, model: str, *, incarnation: str = "", blocking: Any = None, heartbeat: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.redis = redis
        self.scripts = Scripts(redis, model)
        self.records = Records(redis, self.scripts.prefix)
        self.metrics = StoreMetrics()
        self.fleet = FleetStore(lambda: self.incarnation)  # outlives a life: nothing in it is owned
        self._has_answers = asyncio.Event()
        self._blocking = blocking or redis
        self._beat = Scripts(heartbeat or redis, model)
        self._clock = clock
        self._next_incarnation = incarnation
        self._said_gone: set[str] = set()  # and are still a member or an owner
        self._trusted_from = float("-inf")
        self._scan_now = asyncio.Event()
        self._scanning = asyncio.Lock()

    @property
    def incarnation(self) -> str:
        return self.membership.incarnation

    async def start(self) -> None:
        await self.begin_life()
        await self.scan()

    async def begin_life(self) -> None:
        """With no pools; the old one stays what it is until its successor has joined, under one name however often that
        is repeated. Nothing may fail once it has: a repeat would be another incarnation."""
        incarnation = self._next_incarnation = self._next_incarnation or new_incarnation("store")
        newest = await self.redis.xrevrange(self.scripts.key("events"), count=1)
        events = newest[0][0].decode() if newest else "0-0"
        membership = Membership(self._beat, Member(kind="store", incarnation=incarnation), [f"cache:{incarnation}"])
        last = await membership.join()
        self._next_incarnation = ""
        self.membership = membership
        self.core = StoreCore(incarnation)
        self._terms: dict[str, int] = {}
        self.reader = StreamReader(self._blocking, self.scripts.prefix, last | {"events": events})
        self._unsent: deque[tuple[str, list[bytes]]] = deque()  # answers, by the caller's stream
        self._answered: dict[str, str] = {}  # what is handled when they have been sent
        self._handled = dict(last)

    def distrust_leases(self) -> None:
        self._trusted_from = self._clock() + IDLE_LEASE_MS / 1000

    async def read(self, block_ms: int) -> int:
        """Handles calls and inventories, and sends the answers, to each caller in the order of its calls.

        Answers stay until they are sent: what is left out is repeated by its sender, but only after later calls."""
        reader, num_entries = self.reader, 0
        if not self._unsent:
            entries = await reader.read(block_ms)
            if reader is not self.reader:
                return 0  # another life has begun: this was for the old one
            num_entries = len(entries)
            self._answer(entries)
        unsent = self._unsent
        while unsent:
            stream, replies = unsent[0]
            await self.scripts.send(stream, *replies)
            unsent.popleft()
        if reader is self.reader:
            self._handled |= self._answered
        return num_entries

    def _answer(self, entries: list[Entry]) -> None:
        answers: dict[str, list[bytes]] = {}
        for entry in entries:
            for stream, reply in self._handle(entry):
                answers.setdefault(stream, []).append(encode(reply))
            if entry.stream in self._handled:
                self._answered[entry.stream] = entry.id
        self._unsent += answers.items()

    def _handle(self, entry: Entry) -> list[Reply]:
        try:
            message = decode(entry.fields[b"m"]) if b"m" in entry.fields else None
            if isinstance(message, Event):
                self._on_event(message)
                return []
            if isinstance(message, FleetCall):
                self._has_answers.set()
                return [*self.fleet.handle(message)]
            return self.core.handle(message) if message is not None else []
        except ProtocolError as e:
            log.error("%s: %s", entry.stream, e)
            return []

    def _on_event(self, event: Event) -> None:
        if event.kind == "left":
            self._said_gone.add(event.id)
        if event.kind in ("joined", "left") and event.id != self.incarnation:
            self._scan_now.set()

    async def scan(self) -> None:
        """Takes, keeps and hands over pool leases; asks workers of new pools what they hold.

        One at a time: what one look has taken, another that began earlier would give up."""
        async with self._scanning:
            await self._scan(self.membership)

    async def _scan(self, life: Membership) -> None:
        said_gone = set(self._said_gone)
        members = await self.records.members()
        alive = {i: m for i, (m, leased) in members.items() if leased}
        workers = {i: m for i, m in alive.items() if m.kind == "worker"}
        leases = await self.records.leases(sorted(workers))
        trusted = self._clock() >= self._trusted_from
        changes = await share_leases(
            self.scripts, "pool", self.incarnation, mine=self._terms, owners={w: o for w, (_, o, _) in leases.items()},
            num_replicas=sum(m.kind == "store" for m in alive.values()),
            is_dead=is_member_dead(alive, self._said_gone, trusted),
        )  # fmt: skip
        self._said_gone -= said_gone.difference(members, *(owners[:2] for owners in leases.values()))
        if life is not self.membership:
            return  # the leases were taken under the name of a life that is over
        for worker in changes.lost:
            self._terms.pop(worker, None)
            self.core.close_pool(worker)
        self._terms |= changes.gained
        for worker, term in self._terms.items():
            await self._open(workers[worker], term)

    async def _open(self, member: Member, term: int) -> None:
        """Until the worker has told all its blocks: asked again at each scan, which is harmless."""
        worker = member.incarnation
        if not self.core.open_pool(worker, term, member.num_blocks, member.block_size, member.variant):
            return
        question = ListInventory(pool_term=term, reply_to=f"cache:{self.incarnation}")
        if await self.scripts.plan("pool", worker, term, [encode(question)]) == "ok":
            await self.scripts.announce(Event(kind="pool", id=worker))

    async def heartbeat(self) -> None:
        try:
            await self.membership.refresh(self._handled)
        except (Lapsed, StreamLost) as e:
            log.warning("this life is over (%s %s); starting a new one", type(e).__name__, e)
            self._said_gone.add(self.incarnation)
            await self.scripts.gone("store", self.incarnation)
            await self.start()
            return
        self.metrics.observe(self.core, self.fleet)
        await metrics.publish(self._beat.redis, self.scripts.prefix, "store", self.incarnation, self.metrics.registry)

    async def run(self, stop: Stop) -> None:
        if not await once("start", self.begin_life, stop):
            return
        self._scan_now.set()
        await run_until_stopped(
            [
                forever("calls", lambda: self.read(2000), stop, self.distrust_leases),
                forever("heartbeat", self._beat_loop, stop),
                forever("scan", self._scan_loop, stop),
                forever("learn", self.learn, stop),
            ],
            stop,
        )
        await farewell(self._leave())

    async def learn(self) -> None:
        """A piece of the answers that have come, between other things."""
        await self._has_answers.wait()
        if not self.fleet.learn_piece():
            self._has_answers.clear()
        await asyncio.sleep(0)

    async def _leave(self) -> None:
        for worker in list(self._terms):
            await self.scripts.drop_lease("pool", worker, self.incarnation)
        await self.membership.leave()

    async def _beat_loop(self) -> None:
        await asyncio.sleep(IDLE_REFRESH_MS / 1000)
        await self.heartbeat()

    async def _scan_loop(self) -> None:
        await wait_for_event(self._scan_now, IDLE_REFRESH_MS / 1000)
        self._scan_now.clear()
        await self.scan()
