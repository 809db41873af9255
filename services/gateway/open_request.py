"""One request that this gateway answers: what has arrived for it, in order, and what is missing.

Owns positions, which decide what is new: what arrives twice is dropped, what is missing is read from the durable token
log, and so is everything when more has piled up than the bound because the client reads slowly. The reader of the
gateway's stream puts arrivals in and never waits; only the response's own task takes them out, and only it waits for
the log. Knows neither HTTP nor text.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from services.gateway.kept import Kept
from shared.protocol import Outcome, TokenChunk
from shared.records import Records
from shared.scripts import Admission
from shared.wire import decode_as, sequence_id

MAX_QUEUED_BYTES = 256 * 1024  # of encoded chunks; a client that is further behind is served from the log
PAGE_CHUNKS = 256  # of a choice's log that are read at once

Event = tuple[int, TokenChunk | Outcome]  # of a choice; an Outcome is its last


class Moved(Exception):
    """Another gateway answers this request by now: the response ends here, without an ending that would be false."""


class RequestLost(Exception):
    """Redis no longer has what was promised: the record has expired, or the log is shorter than what was seen."""


class OpenRequest:
    """`attach` is the attach number under which `gateway` (an incarnation of this process) is the reader; 0 while that
    is being asked. resume_ms: how long the request goes on when its client has left. shared: other calls may ask for
    the same answer, so when another connection becomes the reader this one goes on `following`: it looks into the log
    every now and then, and ends nothing."""

    def __init__(
        self, rid: str, num_choices: int, gateway: str, wake: asyncio.Event, *, attach: int = 1, resume_ms: int = 0,
        shared: bool = False, log_start: int = 0,
    ) -> None:  # fmt: skip
        self.rid = rid
        self.num_choices = num_choices
        self.gateway = gateway
        self.attach = attach
        self.resume_ms = resume_ms
        self.shared = shared
        self.following = False
        self.readers: frozenset[str] = frozenset()  # gateways, when the log was last read; "": nobody
        self.reader_seen_at = 0.0  # monotonic time of the last look whether those live
        self.moved_number = 0  # of the newest attach elsewhere that was told
        self.ended_before: frozenset[int] = frozenset()  # choices that were done when this gateway attached
        self.attaching = ""  # the name of a re-attach whose answer is not known yet
        self.in_redis = True  # a record may exist: false once an admission was surely refused
        self.admitted = False
        self.abandoned = False  # the client left before the admission was answered
        self.admission: Admission | None = None  # what `admit` said
        self.kept: Kept | None = None  # where Redis may forget it
        self.open_choices = set(range(num_choices))
        self.positions = [log_start] * num_choices  # in the logs, up to which tokens were taken
        self._num_chunks = [0] * num_choices
        self._read_twice: set[int] = set()  # choices whose log is being read from its beginning, after a loss
        self._needed = [log_start] * num_choices  # what the log must reach, since it was announced
        self._arrived: deque[tuple[int, bool, bytes]] = deque()
        self.num_bytes = 0
        self.heard_at = [0.0] * num_choices  # monotonic time of a choice's last arrival; 0: nothing has come yet
        self.behind = False
        self.ended: Exception | None = None
        self.wake = wake

    @property
    def open_sids(self) -> list[str]:
        return [sequence_id(self.rid, choice) for choice in sorted(self.open_choices)]

    def arrive(self, choice: int, is_outcome: bool, data: bytes) -> None:
        self.heard_at[choice] = time.monotonic()
        if self.behind:
            return  # the log has it
        self._arrived.append((choice, is_outcome, data))
        self.num_bytes += len(data)
        if self.num_bytes > MAX_QUEUED_BYTES:
            self.fall_behind()
        self.wake.set()

    def fall_behind(self) -> None:
        """What has arrived is forgotten: record and log have to be read."""
        self._forget_arrived()
        self.wake.set()

    def _forget_arrived(self) -> None:
        self._arrived.clear()
        self.num_bytes = 0
        self.behind = True

    def displace(self, number: int = 0) -> bool:
        """Another connection is the reader (by attach `number`, if it is another gateway's); False if that was so
        before this one became it, or may have been: then the answer to its attach will tell."""
        self.moved_number = max(self.moved_number, number)
        if number and (self.attach == 0 or number <= self.attach):
            return False
        if self.shared:
            self.following = True
            self.fall_behind()
        else:
            self.end(Moved())
        return True

    def end(self, why: Exception) -> None:
        """The next `take` raises this."""
        self.ended = why
        self.wake.set()

    def take(self) -> list[Event]:
        """What has newly arrived, in order. Moved, RequestLost, or ProtocolError: nothing more will come."""
        if self.ended is not None:
            raise self.ended
        events: list[Event] = []
        while self._arrived:
            choice, is_outcome, data = self._arrived.popleft()
            self.num_bytes -= len(data)
            if choice not in self.open_choices:
                continue
            if is_outcome:
                events += self._take_outcome(choice, decode_as(Outcome, data))
            else:
                events += self._take_chunk(choice, decode_as(TokenChunk, data))
        return events

    async def read_log(self, records: Records) -> list[Event]:
        """As `take`, for a request that is behind; when reading fails it still is, and it is for the caller to wake. It
        also still is, and is awake, where the log has more than a page."""
        if self.ended is not None:
            raise self.ended
        self.behind = False  # from here on arrivals are kept again: they may go beyond what is read now
        found = []
        try:
            for choice in sorted(self.open_choices):
                sid = sequence_id(self.rid, choice)
                # The record before the log: if it says done, the log that is read after it is complete.
                record = await records.sequence(sid)
                found.append((choice, record, await records.log(sid, self._num_chunks[choice], PAGE_CHUNKS)))
        except BaseException:
            self._forget_arrived()
            raise
        if any(record is None for _, record, _ in found):
            if self.kept is None or not await self.kept.restore(self.gateway, self.attach, self.resume_ms):
                raise RequestLost
            self.fall_behind()
            return []
        if any(len(chunks) == PAGE_CHUNKS for _, _, chunks in found):
            self.fall_behind()
        self.readers = frozenset(record.gateway for _, record, _ in found if record and record.state != "done")
        events: list[Event] = []
        for choice, record, chunks in found:
            assert record is not None
            is_last_page = len(chunks) < PAGE_CHUNKS
            self._needed[choice] = max(self._needed[choice], record.num_tokens)
            events += self._take_logged(choice, chunks)
            if record.state == "done" and is_last_page:
                events += self._take_outcome(choice, decode_as(Outcome, record.outcome))
            if self.positions[choice] < self._needed[choice] and is_last_page:
                self._read_again(choice)
        return events

    def _read_again(self, choice: int) -> None:
        """The log lacks what was announced. A Redis that has lost the last moment (a replica that took over) has its
        log written again from there, in other chunks: they are looked for once from the beginning."""
        if choice in self._read_twice:
            raise RequestLost
        self._read_twice.add(choice)
        self._num_chunks[choice] = 0
        self.fall_behind()

    def _take_logged(self, choice: int, chunks: list[TokenChunk]) -> list[Event]:
        events: list[Event] = []
        for chunk in chunks:
            num_chunks = self._num_chunks[choice] + 1
            events += self._take_chunk(choice, chunk)
            self._num_chunks[choice] = num_chunks  # also of one that repeats what was taken
        if self.positions[choice] >= self._needed[choice]:
            self._read_twice.discard(choice)
        return events

    def _take_chunk(self, choice: int, chunk: TokenChunk) -> list[Event]:
        if chunk.first < self.positions[choice] < chunk.first + len(chunk.ids):
            chunk = chunk.after(self.positions[choice])
        if chunk.first != self.positions[choice]:
            self._require(choice, chunk.first + len(chunk.ids))
            return []
        self.positions[choice] += len(chunk.ids)
        if self.following or not self.heard_at[choice]:  # else what is read of the log came when it arrived
            self.heard_at[choice] = time.monotonic()
        self._num_chunks[choice] += 1
        if self.kept is not None:
            self.kept.taken(choice, chunk)
        return [(choice, chunk)]

    def _take_outcome(self, choice: int, outcome: Outcome) -> list[Event]:
        if outcome.num_tokens >= 0 and outcome.num_tokens > self.positions[choice]:
            self._require(choice, outcome.num_tokens)
            return []
        self.close_choice(choice, outcome)
        return [(choice, outcome)]

    def close_choice(self, choice: int, outcome: Outcome) -> None:
        """Nothing more is waited for of this choice: it has ended so, or its text has."""
        self.open_choices.discard(choice)
        if self.kept is not None:
            self.kept.taken(choice, outcome)

    def _require(self, choice: int, position: int) -> None:
        """A repeat needs nothing; what lies further on means that something between was missed."""
        if position > self.positions[choice]:
            self._needed[choice] = position
            self.fall_behind()
