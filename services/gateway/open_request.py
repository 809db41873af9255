"""One request that this gateway answers: what has arrived for it, in order, and what is missing.

Owns positions, which decide what is new: what arrives twice is dropped, what is missing is read from the durable token
log, and so is everything when more has piled up than the bound because the client reads slowly. The reader of the
gateway's stream puts arrivals in and never waits; only the response's own task takes them out, and only it waits for
the log. Knows neither HTTP nor text.
"""

from __future__ import annotations

import asyncio
from collections import deque

from shared.protocol import Outcome, TokenChunk, decode_as, sequence_id
from shared.records import Records
from shared.scripts import Admission

MAX_QUEUED_BYTES = 256 * 1024  # of encoded chunks; a client that is further behind is served from the log

Event = tuple[int, TokenChunk | Outcome]  # of a choice; an Outcome is its last


class Moved(Exception):
    """Another gateway answers this request by now: the response ends here, without an ending that would be false."""


class RequestLost(Exception):
    """Redis no longer has what was promised: the record has expired, or the log is shorter than what was seen."""


class OpenRequest:
    """`attach` is the attach number under which `gateway` (an incarnation of this process) is the reader."""

    def __init__(self, rid: str, num_choices: int, gateway: str, wake: asyncio.Event) -> None:
        self.rid = rid
        self.num_choices = num_choices
        self.gateway = gateway
        self.attach = 1
        self.attaching = ""  # the name of a re-attach whose answer is not known yet
        self.in_redis = True  # a record may exist: false once an admission was surely refused
        self.admitted = False
        self.abandoned = False  # the client left before the admission was answered
        self.admission: Admission | None = None  # what `admit` said
        self.open_choices = set(range(num_choices))
        self.positions = [0] * num_choices  # tokens taken, a choice
        self._num_chunks = [0] * num_choices
        self._needed = [0] * num_choices  # what the log must reach, since it was announced
        self._arrived: deque[tuple[int, bool, bytes]] = deque()
        self.num_bytes = 0
        self.behind = False
        self.ended: Exception | None = None
        self.wake = wake

    @property
    def open_sids(self) -> list[str]:
        return [sequence_id(self.rid, choice) for choice in sorted(self.open_choices)]

    def arrive(self, choice: int, is_outcome: bool, data: bytes) -> None:
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
        """As `take`, for a request that is behind; when reading fails it still is, and it is for the caller to wake."""
        self.behind = False  # from here on arrivals are kept again: they may go beyond what is read now
        found = []
        try:
            for choice in sorted(self.open_choices):
                sid = sequence_id(self.rid, choice)
                # The record before the log: if it says done, the log that is read after it is complete.
                record = await records.sequence(sid)
                found.append((choice, record, await records.log(sid, self._num_chunks[choice])))
        except BaseException:
            self._forget_arrived()
            raise
        events: list[Event] = []
        for choice, record, chunks in found:
            if record is None:
                raise RequestLost
            events += self._take_logged(choice, chunks, record.outcome if record.state == "done" else b"")
        return events

    def _take_logged(self, choice: int, chunks: list[TokenChunk], outcome: bytes) -> list[Event]:
        events: list[Event] = []
        for chunk in chunks:
            events += self._take_chunk(choice, chunk)
        if outcome:
            events += self._take_outcome(choice, decode_as(Outcome, outcome))
        if self.positions[choice] < self._needed[choice]:
            raise RequestLost
        return events

    def _take_chunk(self, choice: int, chunk: TokenChunk) -> list[Event]:
        if chunk.first != self.positions[choice]:
            self._require(choice, chunk.first + len(chunk.ids))
            return []
        self.positions[choice] += len(chunk.ids)
        self._num_chunks[choice] += 1
        return [(choice, chunk)]

    def _take_outcome(self, choice: int, outcome: Outcome) -> list[Event]:
        if outcome.num_tokens > self.positions[choice]:
            self._require(choice, outcome.num_tokens)
            return []
        self.open_choices.discard(choice)
        return [(choice, outcome)]

    def _require(self, choice: int, position: int) -> None:
        """A repeat needs nothing; what lies further on means that something between was missed."""
        if position > self.positions[choice]:
            self._needed[choice] = position
            self.fall_behind()
