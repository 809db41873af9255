"""The gateway's side of Redis: requests go in by `admit`, tokens come back on the stream `out:<incarnation>`.

Owns the gateway's incarnation, its stream and which requests it is the reader of; makes sure that Redis hears of every
response that ended here (client gone, stop string found), however often that has to be repeated. Every step may be
driven by hand: submit, read, refresh, settle, take. Knows neither HTTP nor text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from redis.asyncio import Redis

from services.gateway.admission import DrainMeter, refused, unavailable
from services.gateway.open_request import Event, Moved, OpenRequest, RequestLost
from services.gateway.redis_calls import CALL_TIMEOUT_S, CannotWrite, Owed, in_time
from services.gateway.request_table import RequestTable
from shared.bus import LOST, StreamReader, backoff
from shared.leases import IDLE_REFRESH_MS, Lapsed, Membership, StreamLost, new_incarnation
from shared.protocol import Member, Outcome, RequestSpec, sequence_id, split_sequence_id
from shared.records import Records
from shared.scripts import UNLIMITED, Admission, KeyLimits, Scripts

log = logging.getLogger(__name__)

ADMIT_TIMEOUT_S = 6.0  # of all tries; longer than Redis takes to restart
RETRY_TAKE_S = 0.25
BORN = b"born"  # written by a `join`, also by one that comes late
CANCELLED = Outcome(reason="cancelled")

T = TypeVar("T")


class Inflight:
    """max_requests and max_tokens bound the whole deployment's queue, not this gateway's share of it."""

    def __init__(
        self, redis: Redis, scripts: Scripts, records: Records, *, incarnation: str = "", max_requests: int,
        max_tokens: int, retention_ms: int, key_limits: KeyLimits = UNLIMITED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._redis = redis
        self._scripts = scripts
        self._records = records
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._retention_ms = retention_ms
        self._key_limits = key_limits
        self._clock = clock
        self._drained = DrainMeter()
        self._membership = self._new_membership(incarnation)
        self._joined = False
        self._refresh_at = 0.0
        self._reader: StreamReader | None = None
        self._table = RequestTable()
        self._owed = Owed()
        self._tasks: set[asyncio.Task[Any]] = set()

    def _new_membership(self, incarnation: str = "") -> Membership:
        member = Member(kind="gateway", incarnation=incarnation or new_incarnation("gateway"))
        return Membership(self._scripts, member, [f"out:{member.incarnation}"])

    @property
    def incarnation(self) -> str:
        return self._membership.incarnation

    @property
    def requests(self) -> list[OpenRequest]:
        """Those that are open."""
        return self._table.all()

    async def idle(self) -> None:
        """Returns when no request is open."""
        await self._table.empty()

    # --- going in ------------------------------------------------------------------------------------------------

    async def submit(self, spec: RequestSpec, prompt: bytes, owner: str, wake: asyncio.Event) -> OpenRequest:
        """Admits a request whose arrivals set `wake`; TryLater when it is refused or Redis does not answer.

        The caller owes a `close`, unless this raises. A caller that is cancelled here leaves nothing behind: the
        admission is awaited by a task of its own, since only its answer tells what there is to cancel.
        """
        request = OpenRequest(spec.rid, spec.num_choices, self.incarnation, wake)
        try:
            await self._detached(self._admit(request, spec, prompt, owner))
        except asyncio.CancelledError:
            request.abandoned = True
            if request.admitted:
                self.close(request)
            raise
        return request

    def _detached(self, call: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """The call in a task of its own: it goes on when the caller is cancelled, who notices that at once. (Within a
        call, redis-py can lose a cancel on Python 3.11, where it waits for its socket with `asyncio.wait_for`.)"""
        task = asyncio.ensure_future(call)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return asyncio.shield(task)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone

    async def _admit(self, request: OpenRequest, spec: RequestSpec, prompt: bytes, owner: str) -> None:
        self._table.add(request)
        try:
            admission = await self._ask_admission(request, spec, prompt, owner)
        except BaseException as e:
            self.close(request)
            if isinstance(e, CannotWrite):
                raise unavailable("the server is out of memory or storage", "storage_full", 5) from None
            if isinstance(e, TimeoutError):
                raise unavailable("the queue does not answer", "queue_unreachable") from None
            raise
        self._drained.read(admission.num_left, self._clock())
        request.admission = admission
        if not admission.accepted:
            request.in_redis = False
            self.close(request)
            raise refused(admission, spec.num_prompt_tokens, self._drained)
        request.admitted = True
        if request.abandoned:
            self.close(request)

    async def _ask_admission(self, request: OpenRequest, spec: RequestSpec, prompt: bytes, owner: str) -> Admission:
        """Repeats with the same id while replies are lost: `admit` does a thing once."""
        is_first = True
        async with asyncio.timeout(ADMIT_TIMEOUT_S):
            async for _ in backoff():
                try:
                    admission = self._scripts.admit(
                        [(spec, prompt)], gateway=request.gateway, owner=owner, priority=0,
                        max_requests=self._max_requests, max_tokens=self._max_tokens, retention_ms=self._retention_ms,
                        key_limits=self._key_limits,
                    )  # fmt: skip
                    return await in_time(admission)
                except CannotWrite:
                    request.in_redis = not is_first  # if not the first, an earlier one may have run
                    raise
                except LOST as e:
                    is_first = False
                    log.warning("admission of %s is repeated: %s", request.rid, e)
        raise AssertionError("unreachable: backoff never ends")

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
        arrivals = 0
        for entry in entries:
            for field, data in entry.fields.items():
                self._dispatch(field, data)
            arrivals += len(entry.fields)
        return arrivals

    def _dispatch(self, field: bytes, data: bytes) -> None:
        if field == BORN:
            return
        mark = field[:1]
        sid = field[1:] if mark in (b"!", b">") else field
        route = self._table.route(sid)
        if route is None:
            if mark not in (b"!", b">"):
                self._disown(sid.decode())
            return
        request, choice = route
        if mark == b">":
            request.end(Moved())
            return
        request.arrive(choice, mark == b"!", data)

    async def take(self, request: OpenRequest) -> list[Event]:
        """What is new of a request (see `OpenRequest.take`); while Redis is away, nothing, and it is woken again."""
        if not request.behind:
            return request.take()
        try:
            return await self._detached(in_time(request.read_log(self._records)))
        except LOST:
            asyncio.get_running_loop().call_later(RETRY_TAKE_S, request.wake.set)
            return []

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
                await self._attach_again(request)
        self._refresh_at = self._clock() + IDLE_REFRESH_MS / 1000

    async def _attach_again(self, request: OpenRequest) -> None:
        """A re-attach whose reply was lost is repeated under the same name first: its answer tells the number."""
        while request.gateway != self.incarnation:
            name = request.attaching = request.attaching or self.incarnation
            attached = await in_time(self._scripts.attach(request.rid, name, request.attach))
            if request not in self._table:
                return  # closed while asking: its cancel asks once more
            if attached.status != "ok":
                request.end(Moved() if attached.status == "lost" else RequestLost())
                return
            request.attach, request.gateway, request.attaching = attached.choices[0][1], name, ""
            request.fall_behind()

    # --- ending --------------------------------------------------------------------------------------------------

    def finish(self, request: OpenRequest, choice: int, outcome: Outcome) -> None:
        """This gateway has found the end of a choice (a stop string): the worker need not go on."""
        request.open_choices.discard(choice)
        sid = sequence_id(request.rid, choice)

        self._owed.add(f"finish {sid}", lambda: self._scripts.finish(sid, outcome))

    def close(self, request: OpenRequest, outcome: Outcome = CANCELLED) -> None:
        """Nobody waits for this request any more; what still runs of it ends with the outcome. May be repeated."""
        if request not in self._table:
            return
        self._table.remove(request)
        if not request.in_redis or not request.open_choices or request.ended:
            return

        async def tell() -> None:
            if request.attaching:
                attached = await self._scripts.attach(request.rid, request.attaching, request.attach)
                if attached.status != "ok":
                    return
                request.attach, request.attaching = attached.choices[0][1], ""
            await self._scripts.cancel_if(request.open_sids, request.attach, outcome)

        self._owed.add(f"close {request.rid}", tell)

    def _disown(self, sid: str) -> None:
        """Tokens that nobody here waits for: late ones of an ended request, or of one that was admitted after its
        admission had been given up, which must not run for nobody."""
        if self._table.ended_lately(split_sequence_id(sid)[0]):
            return

        async def tell() -> None:
            record = await self._records.sequence(sid)
            if record is not None and record.state != "done" and record.gateway == self.incarnation:
                await self._scripts.cancel_if([sid], record.attach, CANCELLED)

        self._owed.add(f"disown {sid}", tell)

    async def settle_next(self) -> None:
        """Waits until Redis has yet to hear something, and tells it; what it does not answer stays owed."""
        await self._owed.wait()
        await self._owed.settle()

    async def settle(self) -> None:
        await self._owed.settle()

    async def leave(self) -> None:
        """Cancels what is open and says that this incarnation is over."""
        for request in self.requests:
            self.close(request)
        await self.settle()
        await self._membership.leave()
