"""Medusa heads as a source of guesses: keeps what the output head read for the latest rows of each sequence."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch

from services.gpu_worker.batch import Chunk, Sequence
from services.gpu_worker.speculative.draft_model import strength_of
from services.gpu_worker.speculative.native_eagle import Guess
from services.gpu_worker.speculative.proposer import NOTHING, Proposal
from services.gpu_worker.speculative.row_cost import RowCost

NOTHING_KNOWN = 1 << 30  # tokens behind


@dataclass(frozen=True, slots=True)
class _Latest:
    """first: the token that the first row is of; those of drafts follow."""

    seq: Sequence
    first: int
    rows: torch.Tensor


class Medusa(Protocol):
    """`NativeMedusa`, or `GpuMedusa`."""

    num_heads: int

    def guess(self, sequences: Seq[Sequence], rows: torch.Tensor, counts: Seq[int]) -> list[list[Guess]]: ...


class MedusaProposer:
    """A `BatchProposer`, that is never behind; `take` is told of every step of the target that went well."""

    def __init__(self, heads: Medusa, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_drafts = heads.num_heads
        self._heads = heads
        self._clock = clock
        self._cost = RowCost()
        self._latest: dict[str, _Latest] = {}

    def take(self, chunks: Seq[Chunk], taps: torch.Tensor) -> None:
        """taps [rows, 1, hidden_size]: of the chunks' rows. A copy of a few keeps no whole step in memory."""
        row = 0
        for chunk in chunks:
            end, last = row + chunk.num_rows, chunk.start + chunk.count - 1
            rows = taps[row + chunk.count - 1 : end, 0].clone()
            self._latest[chunk.seq.sid] = _Latest(chunk.seq, last, rows)
            row = end

    def forget(self, seq: Sequence) -> None:
        latest = self._latest.get(seq.sid)
        if latest is not None and latest.seq is seq:
            del self._latest[seq.sid]

    def num_behind(self, seq: Sequence) -> int:
        return NOTHING_KNOWN if self._row(seq) is None else 1

    def seconds(self, num_sequences: int, num_drafts: int) -> float:
        return num_drafts * self._cost.seconds(num_sequences)

    def catch_up_seconds(self, num_tokens: int) -> float:
        return 0.0

    def propose(self, sequences: Seq[Sequence], most: Seq[int], num_tokens: int) -> list[Proposal]:
        found: list[Proposal] = [NOTHING] * len(sequences)
        rows = {i: row for i, seq in enumerate(sequences) if (row := self._row(seq)) is not None and most[i]}
        if not rows:
            return found
        counts = [most[i] for i in rows]
        started = self._clock()
        guesses = self._heads.guess([sequences[i] for i in rows], torch.stack(list(rows.values())), counts)
        self._cost.observe(len(rows), (self._clock() - started) / min(self.max_drafts, max(counts)))
        for i, own in zip(rows, guesses, strict=True):
            found[i] = Proposal(tuple(g.token_id for g in own), tuple(strength_of(g.logprob) for g in own))
        return found

    def _row(self, seq: Sequence) -> torch.Tensor | None:
        """Of the last token but one: of the last nothing is computed."""
        latest = self._latest.get(seq.sid)
        if latest is None or latest.seq is not seq:
            return None
        place = len(seq.token_ids) - 2 - latest.first
        return latest.rows[place] if 0 <= place < len(latest.rows) else None
