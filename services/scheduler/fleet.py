"""Which workers this scheduler leases, which incarnations are dead, and what is to be cleaned up after them.

Reads membership and leases, takes and drops leases, queues a dead worker's sequences again. Decides nothing about
single sequences otherwise.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from redis.exceptions import ResponseError

from services.scheduler.core import SchedulerCore
from services.scheduler.matching import Neighbour
from shared.leases import IDLE_LEASE_MS
from shared.protocol import Member, Outcome
from shared.records import Records
from shared.scripts import Scripts
from shared.sharing import is_member_dead, share_leases

log = logging.getLogger(__name__)

ORPHAN_GRACE_S = 10.0  # a dead gateway's clients have at least this long to re-attach elsewhere
STALL_S = 0.4  # an answer that takes longer: Redis stood still, and leases may have run out meanwhile
MAX_READERS = 512  # sequences whose gateway is looked up in one scan


class Fleet:
    """now: monotonic seconds. `core` is replaced when the scheduler begins a new life."""

    def __init__(
        self, redis: Any, scripts: Scripts, records: Records, clock: Callable[[], float] = time.monotonic,
        max_strikes: int = 2,
    ) -> None:  # fmt: skip
        self._redis = redis
        self._scripts = scripts
        self._records = records
        self._clock = clock
        self._max_strikes = max_strikes  # worker deaths after which a sequence runs alone; one more ends it
        self._trusted_from = -math.inf  # before this, a missing lease is no proof of death
        self._said_gone: set[str] = set()  # and are still a member or an owner
        self._gateways_lost: dict[str, tuple[float, float]] = {}  # noticed dead at, last named by a record at
        self._readers_from = ""

    def distrust_leases(self) -> None:
        """Redis was away: leases may have run out with nobody to blame, so nobody is dead for one lease time."""
        self._trusted_from = self._clock() + IDLE_LEASE_MS / 1000

    def on_left(self, incarnation: str) -> None:
        """It said so itself, or its supervisor did: no need to wait."""
        self._said_gone.add(incarnation)

    async def scan(self, core: SchedulerCore, me: str) -> None:
        """One look at everything; repeats harmlessly what another scheduler does at the same time."""
        asked_at, said_gone = self._clock(), set(self._said_gone)
        members = await self._records.members()
        if self._clock() - asked_at > STALL_S:
            self.distrust_leases()
        alive = {i: m for i, (m, leased) in members.items() if leased}
        dead = {i: m for i, (m, leased) in members.items() if not leased and self._is_dead(i)}
        workers = {i: m for i, m in alive.items() if m.kind == "worker"}
        num_schedulers = max(1, sum(m.kind == "scheduler" for m in alive.values()))
        leases = await self._records.leases(sorted(workers))
        await self._share(
            core, me, workers, {w: owner for w, (owner, _, _) in leases.items()}, num_schedulers, set(alive)
        )
        for worker in core.workers:
            _, store, pool_term = leases.get(worker, ("", "", 0))
            if store in alive:
                core.set_store(worker, store, pool_term)
        core.set_neighbours(await self._neighbours(core, workers, leases, set(alive)))
        for incarnation, member in dead.items():
            await self._clean_up(incarnation, member)
        await self._cancel_orphans(core)
        self._said_gone -= said_gone.difference(members, *(owners[:2] for owners in leases.values()))

    def _is_dead(self, incarnation: str) -> bool:
        return incarnation in self._said_gone or self._clock() >= self._trusted_from

    async def _share(
        self, core: SchedulerCore, me: str, workers: dict[str, Member], owners: dict[str, str], num_schedulers: int,
        alive: set[str],
    ) -> None:  # fmt: skip
        trusted = self._clock() >= self._trusted_from
        changes = await share_leases(
            self._scripts, "run", me, mine={w: v.term for w, v in core.workers.items()}, owners=owners,
            num_replicas=num_schedulers, is_dead=is_member_dead(alive, self._said_gone, trusted),
            may_drop=lambda worker: worker not in core.workers or not core.workers[worker].placing,
        )  # fmt: skip
        for worker in changes.lost:
            core.lose_worker(worker)
        for worker, term in changes.gained.items():
            core.gain_worker(workers[worker], term)
        for worker, view in core.workers.items():
            view.handing_over = worker in changes.surplus
            view.member = workers.get(worker, view.member)

    async def _neighbours(
        self, core: SchedulerCore, workers: dict[str, Member], leases: dict[str, tuple[str, str, int]], alive: set[str]
    ) -> list[Neighbour]:
        others = {w: (workers[w], *leases[w]) for w in leases if w not in core.workers and {*leases[w][:2]} <= alive}
        placed = await self._records.num_placed_on(sorted(others))
        return [Neighbour(*found, num_sequences=placed[worker]) for worker, found in others.items()]

    async def _clean_up(self, incarnation: str, member: Member) -> None:
        if member.kind == "worker":
            await self._clean_up_worker(incarnation)
        elif member.kind == "scheduler":
            await self._scripts.forget_scheduler(incarnation)
        else:
            await self._redis.hdel(self._scripts.key("members"), incarnation)

    async def _clean_up_worker(self, worker: str) -> None:
        placed = await self._records.placed_on(worker)
        for sid in placed:
            record = await self._records.sequence(sid)
            if record is None or record.state != "placed" or record.worker != worker:
                continue
            with _apart(sid):
                if record.strikes + 1 > self._max_strikes:
                    await self._condemn(sid, record.epoch, record.strikes + 1)
                else:
                    await self._scripts.requeue(sid, record.epoch, strikes=1)
        if placed:
            log.warning("worker %s is gone; %d sequences are queued again", worker, len(placed))
        await self._scripts.bury(worker)

    async def _condemn(self, sid: str, epoch: int, strikes: int) -> None:
        reason = f"{strikes} workers died while running this request"
        outcome = Outcome(reason="error", code="poison_request", message=reason)
        if await self._scripts.condemn(sid, epoch, outcome, reason, strikes):
            log.error("%s ends: %s", sid, reason)

    async def _cancel_orphans(self, core: SchedulerCore) -> None:
        """Of this scheduler's sequences those that nobody reads: whose client has left, for longer than its resume
        time; whose gateway has died, for longer than that and the grace time. Who reads what is in the records, so
        that nobody needs to remember gateways; a client that attaches meanwhile has another attach number."""
        sids = self._next_sids(core)
        if not sids:
            return
        readers, redis_ms = await self._records.readers(sids)
        await self._look_for_gateways({r.gateway for r in readers.values() if r.gateway})
        now = self._clock()
        for sid, reader in readers.items():
            if reader.gateway == "":
                is_due, code = redis_ms >= reader.orphan_at_ms, "client_gone"
            else:
                lost_s = now - self._gateways_lost.get(reader.gateway, (now, now))[0]
                is_due, code = lost_s >= max(ORPHAN_GRACE_S, reader.resume_ms / 1000), "gateway_gone"
            if is_due:
                with _apart(sid):
                    await self._scripts.cancel_if([sid], reader.attach, Outcome(reason="cancelled", code=code))

    async def _look_for_gateways(self, gateways: set[str]) -> None:
        """Remembers since when those that read something are known to be dead."""
        known = gateways | set(self._gateways_lost)
        alive = await self._records.alive("gateway", known)
        now = self._clock()
        lost = {}
        for gateway in known - alive:
            since, seen_at = self._gateways_lost.get(gateway, (now, now))
            seen_at = now if gateway in gateways else seen_at
            if self._is_dead(gateway) and now - seen_at < 2 * ORPHAN_GRACE_S:
                lost[gateway] = (since, seen_at)
        self._gateways_lost = lost

    def _next_sids(self, core: SchedulerCore) -> list[str]:
        """Some of this scheduler's sequences: in several scans, all."""
        sids = sorted({*core.queue, *(sid for view in core.workers.values() for sid in view.running)})
        later = [sid for sid in sids if sid > self._readers_from]
        chosen = (later or sids)[:MAX_READERS]
        self._readers_from = chosen[-1] if len(chosen) < len(sids) else ""
        return chosen


@contextmanager
def _apart(sid: str) -> Iterator[None]:
    """A script that fails for one sequence, whose record makes no sense, holds up no other."""
    try:
        yield
    except ResponseError as e:
        log.error("%s is left as it is, a script fails: %s", sid, e)
