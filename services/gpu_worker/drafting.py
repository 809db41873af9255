"""What a running set's drafter is asked, and what becomes of its drafts: slots, room in the step. *Pure.*

A step is drafted for in three parts, of which only the middle one takes long: what a model is to guess is planned under
the running set's lock, it guesses outside, and the drafts that the step takes are chosen under the lock again. Whoever
has left meanwhile has no part in the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from services.gpu_worker.batch import Chunk, Drafter, Drawn, EngineInfo, Sequence
from services.gpu_worker.block_map import BlockMap
from services.gpu_worker.composer import Budget
from services.gpu_worker.speculative.draft import NO_DRAFT, Draft


class NoDrafts:
    """The drafter of those that have none."""

    def rests(self, num_sequences: int) -> bool:
        return True

    def plan(self, chunks: Seq[Chunk], most: Seq[int], num_free: int) -> list[int]:
        return [0] * len(chunks)

    def think(self) -> None:
        return

    def draft(self, chunks: Seq[Chunk], most: Seq[int], num_free: int) -> list[Draft]:
        return [NO_DRAFT] * len(chunks)

    def expects(self, sequences: Seq[Sequence], most: Seq[int], num_free: int) -> bool:
        return False

    def observe(self, chunks: Seq[Chunk], drawn: Seq[Drawn], seconds: float) -> None:
        return

    def failed(self) -> None:
        return

    def forget(self, seq: Sequence) -> None:
        return


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step without its drafts. most: drafts of each chunk, if there may be any; num_free: of all."""

    chunks: Seq[Chunk]
    most: Seq[int]
    num_free: int


NOTHING = Prepared((), (), 0)


class Drafting:
    """take_spare gives a sequence a block more, if there is one."""

    def __init__(
        self, drafter: Drafter | None, info: EngineInfo, blocks: BlockMap, take_spare: Callable[[Sequence], bool]
    ) -> None:
        self.drafter: Drafter = drafter or NoDrafts()
        self._info = info
        self._blocks = blocks
        self._take_spare = take_spare

    def prepare(self, chunks: Seq[Chunk], budget: Budget, num_sequences: int, *, may_think: bool) -> Prepared:
        """Drafts are as many as the step has room for and each sequence slots, of which one spare block can give more.
        Tokens are drawn from no more rows than sequences may run, since memory is planned for so many. num_sequences:
        that run. may_think: who drafts may be asked now, not while a step is in flight: then `expects` is."""
        if not may_think or self.drafter.rests(num_sequences):
            return Prepared(chunks, (), 0)
        num_tokens, num_sampled = sum(c.count for c in chunks), sum(c.sample for c in chunks)
        num_free = max(0, min(budget.max_num_batched_tokens - num_tokens, budget.max_num_seqs - num_sampled))
        most = [self._most(c.seq, c.start + c.count, num_sequences) if c.sample else 0 for c in chunks]
        for chunk, count in zip(chunks, self.drafter.plan(chunks, most, num_free), strict=True):
            self._make_room(chunk.seq, chunk.start + chunk.count + count - 1)  # its last guess is not computed
        return Prepared(chunks, most, num_free)

    def with_drafts(self, prepared: Prepared, running: Collection[Sequence]) -> list[Chunk]:
        """The step's chunks, of those that still run."""
        ids = set(map(id, running))
        if not prepared.chunks:
            self.drafter.draft((), (), 0)  # who has left is forgotten
            return []
        if not prepared.most:
            return [c for c in prepared.chunks if id(c.seq) in ids]
        here = [(c, n) for c, n in zip(prepared.chunks, prepared.most, strict=True) if id(c.seq) in ids]
        chunks, most = [c for c, _ in here], [n for _, n in here]
        drafts = self.drafter.draft(chunks, most, prepared.num_free)
        chunks = [replace(c, draft=draft) if draft else c for c, draft in zip(chunks, drafts, strict=True)]
        for chunk in chunks:
            self._make_room(chunk.seq, chunk.start + chunk.num_rows)
        return chunks

    def _make_room(self, seq: Sequence, num_slots: int) -> None:
        if num_slots > len(seq.block_ids) * self._info.block_size:
            self._take_spare(seq)

    def _most(self, seq: Sequence, end: int, num_sequences: int, num_drawing: int = 0) -> int:
        """In a step that computes its tokens up to `end`, of which num_drawing are not known yet, though they will be.
        The last token that it may have is drawn and not computed, so it is no draft."""
        num_tokens = len(seq.token_ids) + num_drawing
        if end > num_tokens:
            return 0
        num_open = min(seq.params.max_tokens + seq.num_prompt_tokens, self._info.max_num_tokens) - num_tokens
        num_blocks = len(seq.block_ids) + (len(self._blocks.spares) > num_sequences)
        return max(0, min(num_open - 1, num_blocks * self._info.block_size - end))

    def expects(self, running: Collection[Sequence], budget: Budget) -> bool:
        """Would the next step have some, if the tokens of those in flight were known?"""
        if self.drafter.rests(len(running)):
            return False
        drawing = [s for s in running if s.num_drawing]
        most = [self._most(s, s.next_position + 1, len(running), s.num_drawing) for s in drawing]
        return self.drafter.expects(drawing, most, max(0, budget.max_num_seqs - len(drawing)))
