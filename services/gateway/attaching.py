"""Which requests this gateway is the reader of, and how that changes hands: attach, detach, cancel.

A client's attach always wins: the reader before it, here or at another gateway, ends or (where calls share an answer)
goes on by looking into the log. Attach numbers decide what is old. What Redis must hear of an ending is owed until it
has. Knows neither HTTP nor text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from services.gateway.open_request import Moved, OpenRequest, RequestLost
from services.gateway.redis_calls import Owed, in_time
from services.gateway.request_ids import prompt_rid
from services.gateway.request_table import RequestTable
from shared.bus import LOST, backoff
from shared.protocol import Outcome
from shared.records import Records, RequestRecord
from shared.scripts import Attached, Scripts
from shared.wire import decode_as, sequence_id, split_sequence_id

log = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 6.0  # of all tries
LEAVE_WAIT_MS = 10_000  # how long clients may take to come back to another gateway when this one stops
READER_LOOK_S = 2.0  # between two looks whether another gateway lives that answers what is followed here
MAX_ATTACHMENTS = 10_000  # of one request; each of them reads its log from the beginning
CANCELLED = Outcome(reason="cancelled")


# A repeated call is told these endings again: they lie in the request itself, or somebody wanted them.
STAYING_CODES = ("context_length_exceeded", "invalid_request", "poison_request", "cancelled")


class TooManyAttachments(Exception):
    """This request has been taken up so often that it is not any more."""


class Attaching:
    """incarnation: the gateway's present one. `leaving`: this gateway stops, so that clients leave it against their
    will."""

    def __init__(
        self, scripts: Scripts, records: Records, table: RequestTable, owed: Owed, incarnation: Callable[[], str]
    ) -> None:
        self._scripts = scripts
        self._records = records
        self._table = table
        self._owed = owed
        self._incarnation = incarnation
        self.leaving = False

    async def find(self, rid: str) -> list[RequestRecord]:
        """The records of a call, one a prompt; none when one of them has expired."""
        first = await in_time(self._records.request(rid))
        if first is None:
            return []
        found = [first]
        for number in range(1, first.spec.num_prompts):
            record = await in_time(self._records.request(prompt_rid(rid, number)))
            if record is None:
                return []
            found.append(record)
        return found

    async def give_way(self, rid: str, records: Sequence[RequestRecord], repeat_key: str) -> bool:
        """Whether a repeat of this call is to be another try, since the call has failed; then its key is free."""
        for number, record in enumerate(records):
            for choice in range(record.spec.num_choices):
                sequence = await in_time(self._records.sequence(sequence_id(prompt_rid(rid, number), choice)))
                if sequence is not None and sequence.outcome and _has_failed(decode_as(Outcome, sequence.outcome)):
                    await in_time(self._scripts.free_key(repeat_key, rid))
                    return True
        return False

    # --- attach --------------------------------------------------------------------------------------------------

    async def become_reader(self, request: OpenRequest) -> None:
        """A client's attach. RequestLost: the record has expired; Moved: another attach came later; TooManyAttachments.

        To be run in a task of its own: only the answer tells what there is to detach when the client has gone.
        """
        request.gateway, request.attach, request.following = self._incarnation(), 0, False
        if (other := self._table.find(request.rid)) is not None:
            self._table.remove(other)
            other.displace()
            if other.following:
                self._table.follow(other)
        self._table.add(request)
        request.fall_behind()
        try:
            attached = await self._ask(request)
        except BaseException:
            self.give_up(request)
            raise
        if attached.status != "ok":
            self._drop(request)
            raise RequestLost
        self._take_answer(request, attached)

    def follow_again(self, request: OpenRequest) -> None:
        """It has tried in vain to become the reader."""
        request.following = True
        self._table.follow(request)

    async def is_unread(self, request: OpenRequest) -> bool:
        """Has its reader left, or died with its gateway? Either is cancelled after a while."""
        if "" in request.readers:
            return True
        now = time.monotonic()
        if now < request.reader_seen_at + READER_LOOK_S:
            return False
        request.reader_seen_at = now
        try:
            return bool(request.readers - await in_time(self._records.alive("gateway", request.readers)))
        except LOST:
            return False

    async def _ask(self, request: OpenRequest) -> Attached:
        async with asyncio.timeout(ATTACH_TIMEOUT_S):
            async for _ in backoff():
                try:
                    return await in_time(self._scripts.attach(request.rid, request.gateway))
                except LOST as e:
                    log.warning("an attach to %s is repeated: %s", request.rid, e)
        raise AssertionError("unreachable: backoff never ends")

    def _take_answer(self, request: OpenRequest, attached: Attached) -> None:
        number = max(number for _, number, _ in attached.choices)
        request.ended_before = frozenset(i for i, (state, _, _) in enumerate(attached.choices) if state == "done")
        if (current := self._table.find(request.rid)) is not request:
            if current is not None and current.attach < number:  # whose own answer may still be on its way
                current.attach = number
            if not request.shared:
                raise Moved
            return  # it has been following since
        request.attach = max(request.attach, number)
        request.admitted = True
        if number > MAX_ATTACHMENTS:
            self.client_left(request)
            raise TooManyAttachments
        if request.moved_number > request.attach:
            self.moved(request, request.moved_number)
        elif request.abandoned:
            self.client_left(request)

    def give_up(self, request: OpenRequest) -> None:
        """It is not known whether this gateway is its reader; if so, nobody waits for it here."""
        self._drop(request)
        sids = [sequence_id(request.rid, i) for i in range(request.num_choices)]
        self._owed.add(f"disown {request.rid}", lambda: self._disown(sids))

    def _drop(self, request: OpenRequest) -> None:
        if request in self._table:
            self._table.remove(request)

    async def attach_again(self, request: OpenRequest) -> None:
        """After this gateway has come back as a new incarnation; it loses to a client's attach. One whose reply was
        lost is repeated under the same name first: its answer tells the number."""
        while request.gateway != self._incarnation():
            name = request.attaching = request.attaching or self._incarnation()
            attached = await in_time(self._scripts.attach(request.rid, name, request.attach))
            if request not in self._table:
                return  # closed while asking: its cancel asks once more
            if attached.status == "lost":
                self.moved(request, request.attach + 1)
                return
            if attached.status != "ok":
                if request.kept is not None and await in_time(
                    request.kept.restore(name, request.attach, request.resume_ms)
                ):
                    continue
                request.end(RequestLost())
                return
            request.attach, request.gateway, request.attaching = attached.choices[0][1], name, ""
            request.fall_behind()

    def moved(self, request: OpenRequest, number: int) -> None:
        """Another gateway is the reader, by an attach of this number."""
        if request.displace(number) and request.following:
            self._drop(request)
            self._table.follow(request)

    # --- ends ----------------------------------------------------------------------------------------------------

    def forget(self, request: OpenRequest) -> None:
        """It is another's now."""
        self._drop(request)
        self._table.follow_no_more(request)

    def client_left(self, request: OpenRequest) -> None:
        """What still runs of it ends, at once or when the time is over in which the client may come back."""
        wait_ms = max(request.resume_ms, LEAVE_WAIT_MS) if self.leaving else request.resume_ms
        if not wait_ms:
            self.close(request, CANCELLED)
            return
        self._end(request, lambda: self._scripts.detach(request.open_sids, request.attach, wait_ms))

    def close(self, request: OpenRequest, outcome: Outcome) -> None:
        """Nobody waits for this request any more; what still runs of it ends with the outcome. May be repeated."""
        self._end(request, lambda: self._scripts.cancel_if(request.open_sids, request.attach, outcome))

    def _end(self, request: OpenRequest, call: Callable[[], Awaitable[object]]) -> None:
        if request not in self._table:
            self._table.follow_no_more(request)
            return
        if request.attach == 0:
            request.abandoned = True  # its answer is on its way, and will tell what there is to end
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
            await call()

        self._owed.add(f"close {request.rid}", tell)

    def disown(self, sid: str) -> None:
        """Tokens that nobody here waits for: late ones of an ended request, or of one that was admitted or attached to
        after that had been given up, which must not run for nobody."""
        rid = split_sequence_id(sid)[0]
        if not self._table.ended_lately(rid):
            self._owed.add(f"disown {sid}", lambda: self._disown([sid]))

    async def _disown(self, sids: Sequence[str]) -> None:
        readers, _ = await self._records.readers(sids)
        for sid, reader in readers.items():
            if reader.gateway != self._incarnation() or self._table.find(split_sequence_id(sid)[0]) is not None:
                continue
            may_return = LEAVE_WAIT_MS if reader.attach > 1 else 0  # a client has asked for it, and may ask again
            if wait_ms := max(reader.resume_ms, may_return):
                await self._scripts.detach([sid], reader.attach, wait_ms)
            else:
                await self._scripts.cancel_if([sid], reader.attach, CANCELLED)

    async def cancel(self, rid: str, num_choices: int) -> None:
        """Whoever reads it."""
        for sid in [sequence_id(rid, i) for i in range(num_choices)]:
            record = await in_time(self._records.sequence(sid))
            if record is not None and record.state != "done":
                await in_time(self._scripts.cancel_if([sid], record.attach, CANCELLED))


def _has_failed(outcome: Outcome) -> bool:
    """Without an answer, and through no fault of the request."""
    return outcome.reason not in ("stop", "length") and (outcome.code or outcome.reason) not in STAYING_CODES
