"""What a worker tells cache stores of its answers and asks them of others', beside steps and commits.

Owns when, and which store; what is known and what is to be told is in `speculative/fleet.py`. A tenant's statistics are
with one of the stores that live, chosen by a hash of both names, so that few tenants move when a store comes or goes.
Any message may be lost: an answer is then not learnt, and what has changed is asked for again with the next request.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq

from services.gpu_worker.admission import Admission
from services.gpu_worker.running_set import Change
from services.gpu_worker.speculative.fleet import Fleet, Told, is_shared
from shared.records import Records
from shared.runtime import wait_for_event
from shared.scripts import Scripts
from shared.store_calls import MAX_FLEET_ASKS, FleetCall, FleetChanges
from shared.suffix_table import unpack_words
from shared.wire import encode

PERIOD_S = 2.0  # between messages, but for a tenant of whom nothing is known yet
MAX_TOLD_BYTES = 1 << 16  # in a period
MAX_TENANTS = 4096  # whose versions are remembered
MAX_HEARD = 64  # replies that have not been taken in; the oldest are left out
PUT_WORDS = 1024  # at a time: about a millisecond


class FleetLink:
    """Of one process, through all of its lives."""

    def __init__(
        self, fleet: Fleet, scripts: Scripts, records: Records, *, period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.fleet = fleet
        self._scripts = scripts
        self._records = records
        self._period_s = period_s
        self._clock = clock
        self._next_at = float("-inf")
        self._due = asyncio.Event()
        self._urgent = asyncio.Event()
        self._wanted: OrderedDict[bytes, None] = OrderedDict()
        self._versions: OrderedDict[bytes, tuple[str, int]] = OrderedDict()  # of a tenant's table: whose, and which
        self._heard: deque[FleetChanges] = deque(maxlen=MAX_HEARD)
        self._has_heard = asyncio.Event()

    def notice(self, change: Change | FleetChanges) -> None:
        """Something has come by the plan: what a store answers, or a sequence to which its tenant's statistics may be
        of use."""
        if isinstance(change, FleetChanges):
            self._heard.append(change)
            self._has_heard.set()
        elif isinstance(change.admission, Admission) and is_shared(change.admission.params):
            self._saw(change.admission)

    def _saw(self, admission: Admission) -> None:
        tenant = self.fleet.tenant_of(admission.salt)
        is_new = tenant not in self._versions
        if self.fleet.use(tenant):
            self._versions[tenant] = ("", 0)
            if len(self._versions) > MAX_TENANTS:
                self._versions.popitem(last=False)
        self._want(tenant, at_once=is_new)

    def _want(self, tenant: bytes, at_once: bool) -> None:
        self._wanted[tenant] = None
        self._due.set()
        if at_once:
            self._urgent.set()

    async def turn(self, worker: Callable[[], str], is_busy: Callable[[], bool]) -> None:
        """Waits until there is something to say or to ask, and does; with nothing going on it waits for a request.

        worker: under which name; is_busy: does it run sequences?"""
        await self._due.wait()
        await wait_for_event(self._urgent, max(0.0, self._next_at - self._clock()))
        self._due.clear()
        self._urgent.clear()
        self._next_at = self._clock() + self._period_s
        wanted = [self._wanted.popitem(last=False)[0] for _ in range(min(MAX_FLEET_ASKS, len(self._wanted)))]
        told = self.fleet.take_ended(MAX_TOLD_BYTES)
        if wanted or told or self._wanted or is_busy():
            self._due.set()  # to look once more: what has been admitted ends
        if not wanted and not told:
            return
        for store, call in self._calls(worker(), await self._records.living("store"), told, wanted):
            await self._scripts.send(f"cache:{store}", encode(call))

    def _calls(
        self, worker: str, stores: Collection[str], told: Seq[Told], wanted: Seq[bytes]
    ) -> list[tuple[str, FleetCall]]:
        calls: dict[str, tuple[list[Told], list[tuple[bytes, int]]]] = {store: ([], []) for store in stores}
        if not calls:
            return []
        for each in told:
            calls[store_of(each[0], stores)][0].append(each)
        for tenant in wanted:
            store = store_of(tenant, stores)
            whose, version = self._versions.get(tenant, ("", 0))
            calls[store][1].append((tenant, version if whose == store else 0))
        return [
            (store, FleetCall(worker=worker, reply_to=f"plan:{worker}", answers=tuple(answers), asks=tuple(asks)))
            for store, (answers, asks) in calls.items()
            if answers or asks
        ]

    async def take_in(self) -> None:
        """What has been heard, a piece at a time; what was too much for one reply is asked for at once."""
        await self._has_heard.wait()
        self._has_heard.clear()
        while self._heard:
            changes = self._heard.popleft()
            words = unpack_words(changes.words)
            for first in range(0, len(words), PUT_WORDS):
                self.fleet.put(changes.tenant, words[first : first + PUT_WORDS])
                await asyncio.sleep(0)
            self._versions[changes.tenant] = (changes.store, changes.version)
            if not changes.is_all:
                self._want(changes.tenant, at_once=True)


def store_of(tenant: bytes, stores: Collection[str]) -> str:
    return max(stores, key=lambda store: hashlib.sha256(tenant + store.encode()).digest())
