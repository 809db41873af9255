"""Heads as a source of guesses: keeps what the target's layers read until the head has read it.

The head's KV lies under the target's block ids. It sees a sequence from its first token on, or, where the head has not
read a cached prefix, from the first token that is computed: of those before there is nothing to read. What is kept is
bounded: where the head is not asked for long, the sequence for which most is kept gives up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import torch

from services.gpu_worker.batch import Chunk, Sequence
from services.gpu_worker.speculative.draft_blocks import DraftBlocks
from services.gpu_worker.speculative.draft_model import strength_of
from services.gpu_worker.speculative.native_eagle import Guess, Wanted
from services.gpu_worker.speculative.proposer import NOTHING, Proposal
from services.gpu_worker.speculative.row_cost import RowCost
from shared.speculative_config import MAX_SPECULATIVE_TOKENS

MAX_KEPT_ROWS = 8192  # of all sequences
FEW_OTHERS = 256  # rows of a step, that may be kept with a sequence's own until its next
FAR_BEHIND = 1 << 30
FEW_ROWS = 8  # of a sequence, that a step with drafts leaves


class Head(Protocol):
    later_s: float  # of the latest call: what all tokens but the first of each took
    aside_s: float  # and what it has done once, so that those to come are quicker

    def guess(self, wanted: Seq[Wanted]) -> list[list[Guess]]: ...


@dataclass(slots=True)
class _Read:
    """A sequence as far as the head has read it: slots from base to num_read. kept: first token, and what was read for
    it and those that follow, in the order in which it was computed."""

    seq: Sequence
    base: int
    num_read: int
    num_noted: int  # whole blocks, in DraftBlocks
    block_ids: list[int]  # that the head has written to
    kept: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    num_kept: int = 0
    drafts_from: int = 0  # behind the last that was kept and is no draft
    drafts: tuple[int, ...] = ()
    is_given_up: bool = False

    @property
    def end(self) -> int:
        """Behind the last token that was kept. Drafts that were wrong are none, nor what stands in their place."""
        end, ids = self.drafts_from, self.seq.token_ids
        for token_id in self.drafts:
            if end >= len(ids) or ids[end] != token_id:
                break
            end += 1
        return end

    def keep(self, chunk: Chunk, rows: torch.Tensor) -> None:
        """Most are read before the next come; those that are not leave what else their step has computed."""
        start = chunk.start
        self.drafts_from, self.drafts = start + chunk.count, chunk.draft.ids
        if self.is_given_up:
            return
        if self.kept and (own := self.kept[-1][1]).nbytes < own.untyped_storage().nbytes():
            self.kept[-1] = self.kept[-1][0], own.clone()
        self.kept.append((start, rows))
        self.num_kept += len(rows)

    def give_up(self) -> None:
        self.is_given_up, self.kept, self.num_kept = True, [], 0

    def rows(self, end: int) -> torch.Tensor | None:
        """Of the tokens from num_read up to `end`; None where one is missing. What was computed later counts: what
        was computed for drafts is computed again where they were wrong."""
        first, count = self.num_read, end - self.num_read
        if count < 1 or not self.kept:
            return None
        latest, rows = self.kept[-1]
        if latest <= first and end <= latest + len(rows):
            return rows[first - latest : end - latest]
        out = self.kept[0][1].new_empty(count, *self.kept[0][1].shape[1:])
        have = torch.zeros(count, dtype=torch.bool)
        for start, rows in self.kept:
            low, high = max(start, first), min(start + len(rows), end)
            if low < high:
                out[low - first : high - first] = rows[low - start : high - start]
                have[low - first : high - first] = True
        return out if bool(have.all()) else None

    def has_read(self, end: int) -> None:
        """Once it has read all tokens but the last, what is left was computed for drafts that were wrong."""
        self.num_read = end
        is_left = end < len(self.seq.token_ids) - 1
        self.kept = [(start, rows) for start, rows in self.kept if is_left and start + len(rows) > end]
        self.num_kept = sum(len(rows) for _, rows in self.kept)


class HeadProposer:
    """A `BatchProposer`; `take` is told of every step of the target that went well."""

    def __init__(self, head: Head, block_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._head = head
        self._size = block_size
        self._clock = clock
        self._first_cost = RowCost()  # of the first guess of so many, or of so many rows that are read
        self._later_cost = RowCost()  # of each that follows
        self._blocks = DraftBlocks()
        self.max_drafts = MAX_SPECULATIVE_TOKENS
        self.wants: Callable[[Sequence], bool] = lambda seq: True
        self.wants_any: Callable[[], bool] = lambda: True
        self._read: dict[str, _Read] = {}

    def wants_rows(self, chunks: Seq[Chunk]) -> bool:
        """Of a step: is there one whose rows are wanted?"""
        return self.wants_any() and any(self._wants(chunk.seq) for chunk in chunks)

    def _wants(self, seq: Sequence) -> bool:
        return seq.params.num_speculative_tokens != 0 and self.wants(seq)

    def take(self, chunks: Seq[Chunk], taps: torch.Tensor) -> None:
        """taps [rows, taps, hidden_size]: what was read for the chunks' rows."""
        row = 0
        for chunk in chunks:
            own = taps[row : row + chunk.num_rows]
            row += chunk.num_rows
            if self._wants(chunk.seq):
                self._of(chunk).keep(chunk, own if len(taps) - len(own) <= FEW_OTHERS else own.clone())
        readers = list(self._read.values())
        while sum(read.num_kept for read in readers) > MAX_KEPT_ROWS:
            max(readers, key=lambda read: read.num_kept).give_up()

    def _of(self, chunk: Chunk) -> _Read:
        """One of which something was not kept begins anew behind it."""
        seq = chunk.seq
        read = self._read.get(seq.sid)
        if read is None or read.seq is not seq or chunk.start > read.end:
            held, size = self._blocks.num_held(seq.block_ids, seq.keys), self._size
            base, first = 0, chunk.start
            if held * size < chunk.start:
                base = first = -(-chunk.start // size) * size
            read = _Read(seq, base, first, 0 if base else held, list(seq.block_ids))
            self._read[seq.sid] = read
        return read

    def forget(self, seq: Sequence) -> None:
        read = self._read.get(seq.sid)
        if read is not None and read.seq is seq:
            del self._read[seq.sid]

    def num_behind(self, seq: Sequence) -> int:
        read = self._read.get(seq.sid)
        if (
            read is None
            or read.seq is not seq
            or read.is_given_up
            or not read.num_read < len(seq.token_ids) - 1 <= read.end
        ):
            return FAR_BEHIND
        return len(seq.token_ids) - 1 - read.num_read

    def seconds(self, num_sequences: int, num_drafts: int) -> float:
        """A later guess finds the head's weights in a cache; until one was made it counts as half of a first."""
        first_s, later_s = self._first_cost.seconds(num_sequences), self._later_cost.seconds(num_sequences)
        return first_s + (num_drafts - 1) * (later_s or first_s / 2)

    def catch_up_seconds(self, num_tokens: int) -> float:
        return self._first_cost.seconds(num_tokens)

    def propose(self, sequences: Seq[Sequence], most: Seq[int], num_tokens: int) -> list[Proposal]:
        found: list[Proposal] = [NOTHING] * len(sequences)
        wanted: dict[int, tuple[_Read, Wanted]] = {}
        for i in sorted(range(len(sequences)), key=lambda i: self.num_behind(sequences[i])):
            if self.num_behind(sequences[i]) == FAR_BEHIND:
                continue
            read = self._read[sequences[i].sid]
            if (own := self._wanted(read, most[i], 1 + max(0, num_tokens))) is not None:
                wanted[i] = read, own
                num_tokens -= len(own.taps) - 1
        if not wanted:
            return found
        asked = [own for _, own in wanted.values()]
        started = self._clock()
        guesses = self._head.guess(asked)
        self._learn_cost(asked, max(0.0, self._clock() - started - self._head.aside_s))
        for (i, (read, own)), ids in zip(wanted.items(), guesses, strict=True):
            self._note(read, own)
            found[i] = Proposal(tuple(g.token_id for g in ids), tuple(strength_of(g.logprob) for g in ids))
        return found

    def _wanted(self, read: _Read, count: int, num_tokens: int) -> Wanted | None:
        seq, last = read.seq, len(read.seq.token_ids) - 1
        end = min(last, read.num_read + num_tokens)
        rows = read.rows(end) if self._follow_blocks(read) else None
        if rows is None:
            read.give_up()
            return None
        room = len(seq.block_ids) * self._size - end
        return Wanted(seq, read.num_read, rows, min(count, 1 + room) if end == last else 0, read.base)

    def _follow_blocks(self, read: _Read) -> bool:
        """A block may have become another one, equal to it, which the head has read or not."""
        seq, first, num_blocks = read.seq, read.base // self._size, -(-read.num_read // self._size)
        is_same = read.block_ids[first:num_blocks] == seq.block_ids[first:num_blocks]
        for index in range(num_blocks if is_same else first, num_blocks):
            new = seq.block_ids[index]
            is_held = read.base == 0 and index < len(seq.keys) and self._blocks.holds(new, seq.keys[index])
            if read.block_ids[index] != new and not is_held:
                return False
        read.block_ids[:] = seq.block_ids
        return True

    def _note(self, read: _Read, own: Wanted) -> None:
        """The head has read these; sealed blocks that it has read whole serve others too."""
        seq, size = read.seq, self._size
        end = own.first + len(own.taps)
        self._blocks.write(seq.block_ids[own.first // size : -(-(end + own.count) // size)])
        read.has_read(end)
        while read.base == 0 and read.num_noted < min(len(seq.keys), read.num_read // size):
            self._blocks.fill(seq.block_ids[read.num_noted], seq.keys[read.num_noted])
            read.num_noted += 1

    def _learn_cost(self, wanted: Seq[Wanted], seconds: float) -> None:
        """Of guesses one after the other, or of a text that is read. What is done around them is the first one's."""
        num_rows, places = sum(len(own.taps) for own in wanted), max(1, *(own.count for own in wanted))
        is_long = num_rows > FEW_ROWS * len(wanted)
        later_s = min(seconds, self._head.later_s) if places > 1 else 0.0
        self._first_cost.observe(num_rows if is_long else len(wanted), seconds - later_s)
        if places > 1:
            self._later_cost.observe(len(wanted), later_s / (places - 1))
