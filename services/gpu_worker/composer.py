"""Which tokens of which sequences the next step computes. *Pure*: the running set in, chunks out.

Every decoding sequence first, one token each; then prefill chunks in the order of admission, as far as the budget goes.
While somebody decodes, prefill is bounded by time too (`max_prefill_tokens`), so that a long prompt stalls nobody. How
a prompt is cut does not change what is drawn. A sequence that runs alone takes turns with the others. Of the tokens of
prompts whose log-probabilities are asked for a step has few, since each of them needs a row of logits.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from services.gpu_worker.batch import Chunk, Sequence

MAX_SCORES = 64  # rows of logits in a step, beside those that tokens are drawn from


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds of one step; prefill_chunk is that of one sequence."""

    max_num_batched_tokens: int
    max_num_seqs: int
    prefill_chunk: int

    def within(self, other: Budget) -> Budget:
        return Budget(
            min(self.max_num_batched_tokens, other.max_num_batched_tokens),
            min(self.max_num_seqs, other.max_num_seqs),
            min(self.prefill_chunk, other.prefill_chunk),
        )


def compose(
    ready: Seq[Sequence], budget: Budget, *, block_size: int, max_prefill_tokens: int, turn: int
) -> list[Chunk]:
    """Chunks of the next step. ready: in order of admission, each with a slot for its next token. turn: any number
    that rises by one a step. Empty only if ready is."""
    mates = _mates(ready, turn)
    num_decoding = min(budget.max_num_seqs, budget.max_num_batched_tokens)
    decoding: list[Sequence] = []
    others: list[Sequence] = []
    for seq in mates:
        (decoding if seq.num_remaining == 1 and seq.draws else others).append(seq)
    chunks = [Chunk(s, s.next_position, 1, True) for s in decoding[:num_decoding]]
    num_tokens = budget.max_num_batched_tokens - len(chunks)
    if chunks:
        num_tokens = min(num_tokens, max_prefill_tokens)
    num_scores = MAX_SCORES
    for seq in others:
        if num_tokens <= 0 or len(chunks) >= budget.max_num_seqs:
            break
        remaining = seq.num_remaining
        room = len(seq.block_ids) * block_size - seq.next_position
        count = min(seq.most_tokens(num_scores), room, budget.prefill_chunk, num_tokens)
        if count < 1:
            continue
        chunks.append(Chunk(seq, seq.next_position, count, seq.draws and count == remaining))
        num_tokens -= count
        num_scores -= len(chunks[-1].scored)
    return chunks


def _mates(ready: Seq[Sequence], turn: int) -> Seq[Sequence]:
    """Those that may share the step; each sequence that runs alone is a group of its own."""
    alone = [[s] for s in ready if s.alone]
    if not alone:
        return ready
    groups = [[s for s in ready if not s.alone], *alone]
    groups = [g for g in groups if g]
    return groups[turn % len(groups)]
