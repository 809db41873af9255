"""The gateway's side of Redis: requests go in by `admit`, tokens come back on the stream `out:<incarnation>`.

Owns the gateway's incarnation and its stream; who reads what is `attaching.py`'s. Makes sure that Redis hears of every
response that ended here (client gone, stop string found), however often that has to be repeated. Every step may be
driven by hand: submit, attach, read, refresh, settle, take. Knows neither HTTP nor text.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from redis.asyncio import Redis

from services.gateway.admission import unavailable
from services.gateway.admitting import Admitting, Specs
from services.gateway.attaching import CANCELLED, Attaching, TooManyAttachments
from services.gateway.open_request import Event, Moved, OpenRequest, RequestLost
from services.gateway.redis_calls import CALL_TIMEOUT_S, Looks, Owed, in_time
from services.gateway.request_table import RequestTable
from shared.bus import LOST, StreamReader
from shared.leases import IDLE_REFRESH_MS, Lapsed, Membership, StreamLost, new_incarnation
from shared.protocol import Member, Outcome
from shared.records import Records, RequestRecord
from shared.scripts import NO_REPEAT, UNLIMITED, KeyLimits, Repeat, Scripts
from shared.wire import sequence_id

log = logging.getLogger(__name__)

RETRY_TAKE_S = 0.25
SEQUENCE_ID = re.compile(rb"[\w-]+\.\d+")
T = TypeVar("T")


class Inflight:
    """max_requests and max_tokens bound the whole deployment's queue, not this gateway's share of it."""

    def __init__(
        self, redis: Redis, scripts: Scripts, records: Records, *, incarnation: str = "", max_requests: int,
        max_tokens: int, retention_ms: int, key_limits: KeyLimits = UNLIMITED, volatile: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._redis = redis
        self._scripts = scripts
        self._records = records
        self._clock = clock
        self._admitting = Admitting(
            scripts, max_requests=max_requests, max_tokens=max_tokens, retention_ms=retention_ms,
            key_limits=key_limits, clock=clock, volatile=volatile,
        )  # fmt: skip
        self._membership = self._new_membership(incarnation)
        self._joined = False
        self._refresh_at = 0.0
        self._reader: StreamReader | None = None
        self._table = RequestTable()
        self._owed = Owed()
        self._looks = Looks()  # into the logs of requests that other connections read
        self._attaching = Attaching(scripts, records, self._table, self._owed, lambda: self.incarnation)
        self._tasks: set[asyncio.Task[Any]] = set()

    def _new_membership(self, name: str = "") -> Membership:
        member = Member(kind="gateway", incarnation=name or new_incarnation("gateway"))
        return Membership(self._scripts, member, [f"out:{member.incarnation}"])

    @property
    def incarnation(self) -> str:
        return self._membership.incarnation

    @property
    def requests(self) -> list[OpenRequest]:  # that are open
        return self._table.all()

    async def idle(self) -> None:
        """Returns when no request is open, nor followed."""
        await self._table.empty()

    # --- going in ------------------------------------------------------------------------------------------------

    async def submit(
        self, specs: Specs, owner: str, wake: asyncio.Event, *, resume_ms: int = 0, repeat: Repeat = NO_REPEAT
    ) -> list[OpenRequest]:
        """Admits the requests of a call, whose arrivals set `wake`: all, or none. TryLater when they are refused or
        Redis does not answer; Repeated when the call was there before.

        The caller owes each a `close` or `client_left`, unless this raises. A caller that is cancelled here owes none:
        the admission is awaited by a task of its own, since only its answer tells what there is to cancel.
        """

        opened = partial(OpenRequest, gateway=self.incarnation, wake=wake, resume_ms=resume_ms, shared=bool(repeat.key))
        requests = [opened(spec.rid, spec.num_choices, log_start=spec.log_start) for spec, _ in specs]
        try:
            await self._detached(self._admit(requests, specs, owner, repeat))
        except asyncio.CancelledError:
            for request in requests:
                request.abandoned = True
                if request.admitted:
                    self.client_left(request)
            raise
        return requests

    async def attach(
        self, rid: str, num_choices: int, wake: asyncio.Event, *, resume_ms: int = 0, shared: bool = False,
        log_start: int = 0,
    ) -> OpenRequest:  # fmt: skip
        """Takes up a request for a client. RequestLost: the record has expired. Moved: another attach came later.
        TryLater when Redis does not answer."""
        options = {"resume_ms": resume_ms, "log_start": log_start}
        request = OpenRequest(rid, num_choices, self.incarnation, wake, attach=0, shared=shared, **options)
        try:
            await self._detached(self._attaching.become_reader(request))
        except TimeoutError:
            raise unavailable("the queue does not answer", "queue_unreachable") from None
        except asyncio.CancelledError:
            request.abandoned = True
            self.client_left(request)
            raise
        return request

    async def find(self, rid: str) -> list[RequestRecord]:
        return await self._answered(self._attaching.find(rid))

    async def give_way(self, rid: str, records: list[RequestRecord], repeat_key: str) -> bool:
        return await self._answered(self._attaching.give_way(rid, records, repeat_key))

    async def _answered(self, call: Coroutine[Any, Any, T]) -> T:
        """TryLater when Redis does not answer."""
        try:
            return await self._detached(call)
        except LOST:
            raise unavailable("the queue does not answer", "queue_unreachable") from None

    def _detached(self, call: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """The call in a task of its own: it goes on when the caller is cancelled, who notices that at once."""
        task = asyncio.ensure_future(call)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return asyncio.shield(task)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone

    async def _admit(self, requests: list[OpenRequest], specs: Specs, owner: str, repeat: Repeat) -> None:
        for request in requests:
            self._table.add(request)
        try:
            await self._admitting.admit(requests, specs, owner, repeat)
        except BaseException:
            for request in requests:
                self.client_left(request)  # it may be there, and asked for again
            raise
        for request in requests:
            request.admitted = True
            if request.abandoned:
                self.client_left(request)

    # --- coming back ---------------------------------------------------------------------------------------------

    async def read(self, block_ms: int) -> int:
        """Hands out what the stream brings, waiting block_ms for it; the number of arrivals."""
        if self._reader is None:
            return 0
        try:
            entries = await in_time(self._reader.read(block_ms), CALL_TIMEOUT_S + block_ms / 1000)
        except LOST:
            self._refresh_at = 0.0  # Redis may come back without the stream
            raise
        for entry in entries:
            for field, data in entry.fields.items():
                self._dispatch(field, data)
        return sum(len(entry.fields) for entry in entries)

    def _dispatch(self, field: bytes, data: bytes) -> None:
        mark = field[:1]
        sid = field[1:] if mark in (b"!", b">") else field
        route = self._table.route(sid)
        if route is None:
            if SEQUENCE_ID.fullmatch(sid) and mark not in (b"!", b">"):  # not what `join` or a newer service writes
                self._attaching.disown(sid.decode())
            return
        request, choice = route
        if mark == b">":
            self._attaching.moved(request, int(data))
            return
        request.arrive(choice, mark == b"!", data)

    async def take(self, request: OpenRequest) -> list[Event]:
        """What is new of a request (see `OpenRequest.take`); while Redis is away, nothing, and it is woken again."""
        if not request.behind:
            return request.take()
        try:
            events = await self._detached(in_time(request.read_log(self._records)))
        except LOST:
            asyncio.get_running_loop().call_later(RETRY_TAKE_S, request.wake.set)
            return []
        if request.following and request.open_choices:
            await self._follow(request)
        return events

    async def _follow(self, request: OpenRequest) -> None:
        """Looks again a little later; takes up what nobody reads any more, so that it is not cancelled."""
        if await self._attaching.is_unread(request):
            try:
                await self._detached(self._attaching.become_reader(request))
            except (Moved, TimeoutError):
                self._attaching.follow_again(request)
            except (RequestLost, TooManyAttachments) as e:
                request.end(e)
        if request.following:
            self._looks.later(request.fall_behind, len(request.open_choices))

    # --- staying alive -------------------------------------------------------------------------------------------

    async def turn(self) -> None:
        """One turn of the loop that serves the stream and keeps the lease."""
        ms_left = max(0, int((self._refresh_at - self._clock()) * 1000)) if self._joined else 0
        await self.read(ms_left)
        if self._clock() >= self._refresh_at:
            await self.refresh()

    async def refresh(self) -> None:
        """Keeps the lease. When it or the stream was lost, a new incarnation attaches to every open request again."""
        if self._joined and self._reader is not None:
            try:
                await in_time(self._membership.refresh(self._reader.last))
            except (Lapsed, StreamLost) as e:
                log.warning("gateway %s: %s; starting again as a new incarnation", self.incarnation, repr(e))
                self._owed.add(f"gone {self.incarnation}", self._membership.leave)
                self._membership = self._new_membership()
                self._joined = False
        if not self._joined:
            last = await in_time(self._membership.join())
            self._reader = StreamReader(self._redis, self._scripts.prefix, last)
            self._joined = True
            for request in self.requests:
                if request.gateway == self.incarnation:
                    request.fall_behind()  # what was written before the stream was there is in the log alone
        for request in self.requests:
            if request.admitted and request.gateway != self.incarnation:
                await self._attaching.attach_again(request)
        self._refresh_at = self._clock() + IDLE_REFRESH_MS / 1000

    # --- ending --------------------------------------------------------------------------------------------------

    def finish(self, request: OpenRequest, choice: int, outcome: Outcome) -> None:
        """This gateway has found the end of a choice (a stop string): the worker need not go on."""
        request.close_choice(choice, outcome)
        sid = sequence_id(request.rid, choice)

        self._owed.add(f"finish {sid}", lambda: self._scripts.finish(sid, outcome))

    def end_if_never_placed(self, request: OpenRequest, choice: int, outcome: Outcome) -> None:
        """Redis decides whether it has been, and then the outcome comes back as any other."""
        sid = sequence_id(request.rid, choice)
        self._owed.add(f"end {sid}", lambda: self._scripts.finish(sid, outcome, epoch=0))

    def close(self, request: OpenRequest, outcome: Outcome = CANCELLED) -> None:
        """Nobody waits for this request any more; what still runs of it ends with the outcome. May be repeated."""
        self._attaching.close(request, outcome)

    def client_left(self, request: OpenRequest) -> None:
        """As `close`, but the client may come back if the request has a resume time, or this gateway is stopping."""
        self._attaching.client_left(request)

    def forget(self, request: OpenRequest) -> None:
        """Another connection answers it."""
        self._attaching.forget(request)

    async def cancel(self, rid: str, num_choices: int) -> None:
        """Ends a request whoever reads it; TryLater when Redis does not answer."""
        try:
            await self._detached(self._attaching.cancel(rid, num_choices))
        except LOST:
            raise unavailable("the queue does not answer", "queue_unreachable") from None

    async def settle_next(self) -> None:
        """Waits until Redis has yet to hear something, and tells it; what it does not answer stays owed."""
        await self._owed.wait()
        await self._owed.settle()

    async def settle(self) -> None:
        await self._owed.settle()

    def begin_to_leave(self) -> None:
        """From here on clients are gone against their will, and get time to come back elsewhere."""
        self._attaching.leaving = True

    async def leave(self) -> None:
        """Leaves what is open to whoever comes back for it, and says that this incarnation is over."""
        self.begin_to_leave()
        for request in self.requests:
            self.client_left(request)
        await self.settle()
        await self._membership.leave()
