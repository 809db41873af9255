"""Positions decide: whatever is repeated, dropped, or overtaken by reading the log, each token comes once, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.open_request import MAX_QUEUED_BYTES, Event, OpenRequest, RequestLost
from shared.protocol import Outcome, TokenChunk
from shared.records import SequenceRecord
from shared.wire import decode_as, encode


class Sequence:
    """One sequence in Redis: its log, and what was written to the stream."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.num_tokens = 0
        self.outcome = b""
        self.while_reading: Callable[[], None] = lambda: None

    def commit(self, num_ids: int) -> bytes:
        ids = tuple(range(self.num_tokens, self.num_tokens + num_ids))
        self.chunks.append(encode(TokenChunk(first=self.num_tokens, ids=ids)))
        self.num_tokens += num_ids
        return self.chunks[-1]

    def rewrite(self, num_chunks: int) -> bytes:
        """Redis has lost the last chunks, and the worker writes their tokens again, with one more, in one chunk."""
        before = self.num_tokens
        for _ in range(min(num_chunks, len(self.chunks))):
            self.num_tokens -= len(decode_as(TokenChunk, self.chunks.pop()).ids)
        return self.commit(before - self.num_tokens + 1)

    async def sequence(self, sid: str) -> SequenceRecord:
        state = "done" if self.outcome else "placed"
        record = SequenceRecord(state, 1, "w", "g", 1, self.num_tokens, 0, 3, self.outcome)
        self.while_reading()
        return record

    async def log(self, sid: str, first_chunk: int, max_chunks: int) -> list[TokenChunk]:
        chunks = [decode_as(TokenChunk, data) for data in self.chunks[first_chunk:][:max_chunks]]
        self.while_reading()
        return chunks


def a_request() -> OpenRequest:
    return OpenRequest("r", 1, "g", asyncio.Event())


def take(request: OpenRequest, records: Any) -> list[Event]:
    return asyncio.run(request.read_log(records)) if request.behind else request.take()


def ids_of(events: list[Event]) -> list[int]:
    return [i for _, item in events if isinstance(item, TokenChunk) for i in item.ids]


OPERATIONS = st.lists(
    st.sampled_from(["deliver", "deliver", "lose", "repeat", "restart", "take", "take", "end", "forget"]), max_size=40
)


@given(OPERATIONS, st.lists(st.integers(1, 3), min_size=40, max_size=40), st.booleans())
def test_each_token_comes_once_and_in_order(operations: list[str], sizes: list[int], arrives_in_between: bool) -> None:
    request, sequence = a_request(), Sequence()
    seen: list[Event] = []

    def commit_while_reading() -> None:
        if arrives_in_between and not sequence.outcome and sequence.num_tokens < 200:
            request.arrive(0, False, sequence.commit(1))

    sequence.while_reading = commit_while_reading
    for operation, size in zip(operations, sizes, strict=False):
        if operation == "take":
            seen += take(request, sequence)
        elif operation == "restart":
            request.fall_behind()
        elif operation == "repeat" and sequence.chunks:
            request.arrive(0, False, sequence.chunks[size % len(sequence.chunks)])
        elif operation == "forget" and not sequence.outcome:
            chunk = sequence.rewrite(size)
            if size > 1:
                request.arrive(0, False, chunk)
        elif not sequence.outcome and operation in ("deliver", "lose", "end"):
            chunk = sequence.commit(size)
            if operation != "lose":
                request.arrive(0, False, chunk)
            if operation == "end":
                sequence.outcome = encode(Outcome(reason="length", num_tokens=sequence.num_tokens))
                request.arrive(0, True, sequence.outcome)
        assert request.num_bytes <= MAX_QUEUED_BYTES
    request.fall_behind()
    for _ in range(4):
        seen += take(request, sequence)
    assert ids_of(seen) == list(range(len(ids_of(seen))))
    assert len(ids_of(seen)) <= sequence.num_tokens
    if not arrives_in_between or sequence.outcome:
        assert len(ids_of(seen)) == sequence.num_tokens
    outcomes = [item for _, item in seen if isinstance(item, Outcome)]
    assert len(outcomes) == bool(sequence.outcome)
    assert not outcomes or isinstance(seen[-1][1], Outcome)


def test_a_gap_is_filled_from_the_log() -> None:
    request, sequence = a_request(), Sequence()
    sequence.commit(2)
    request.arrive(0, False, sequence.commit(1))
    assert take(request, sequence) == []
    assert ids_of(take(request, sequence)) == [0, 1, 2]


def test_a_log_that_was_written_again_in_other_chunks_goes_on_where_it_was() -> None:
    request, sequence = a_request(), Sequence()
    for _ in range(3):
        request.arrive(0, False, sequence.commit(2))
    assert ids_of(take(request, sequence)) == [0, 1, 2, 3, 4, 5]
    sequence.rewrite(2)  # of which the gateway hears nothing, since it is another incarnation by then
    sequence.commit(2)
    request.fall_behind()
    assert take(request, sequence) == []
    assert ids_of(take(request, sequence)) == [6, 7, 8]


def test_what_arrives_while_the_log_is_read_is_kept() -> None:
    request, sequence = a_request(), Sequence()
    sequence.commit(2)
    request.fall_behind()
    request.wake.clear()
    sequence.while_reading = lambda: request.arrive(0, False, sequence.commit(1))
    assert ids_of(take(request, sequence)) == [0, 1, 2]  # one came between reading record and log
    assert not request.behind
    assert request.wake.is_set()
    assert ids_of(take(request, sequence)) == [3]  # and one after that


def test_an_outcome_that_counts_more_than_was_seen_waits_for_the_log() -> None:
    request, sequence = a_request(), Sequence()
    sequence.commit(2)
    sequence.outcome = encode(Outcome(reason="stop", num_tokens=2))
    request.arrive(0, True, sequence.outcome)
    assert take(request, sequence) == []
    events = take(request, sequence)
    assert ids_of(events) == [0, 1]
    assert isinstance(events[-1][1], Outcome)


def test_a_log_shorter_than_what_was_announced_is_a_loss() -> None:
    request, sequence = a_request(), Sequence()
    sequence.commit(2)
    request.arrive(0, False, sequence.commit(1))
    sequence.chunks.pop()
    for _ in range(2):  # the second time it is read from its beginning
        assert take(request, sequence) in ([], [(0, TokenChunk(first=0, ids=(0, 1)))])
    with pytest.raises(RequestLost):
        take(request, sequence)


def test_who_follows_hears_of_each_token_by_the_log() -> None:
    """Nothing arrives for it: the time between tokens would be over while they come."""
    sequence, request = Sequence(), OpenRequest("r", 1, "g", asyncio.Event(), shared=True)
    request.displace()
    heard = []
    for _ in range(2):
        sequence.commit(1)
        take(request, sequence)
        request.fall_behind()
        heard.append(request.heard_at[0])
    assert 0 < heard[0] < heard[1]


def test_what_arrives_while_behind_is_not_kept() -> None:
    request = a_request()
    request.fall_behind()
    request.arrive(0, False, b"x" * 1000)
    assert request.num_bytes == 0
