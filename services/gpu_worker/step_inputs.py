"""A step as flat tensors: from chunks to token ids, positions, cache rows and attention plans. *Pure.*

The rows of a step are the chunks' tokens, chunks of one token first, as `attention_plan` wants them. Knows the pool's
geometry, nothing of the model's weights.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from kernels.matmul_dense import padded_rows
from kernels.paged_attention import QuerySpan, TilePlan
from services.gpu_worker.attention_plan import Geometry, Index, plan_attention
from services.gpu_worker.batch import Chunk


class SequenceError(ValueError):
    """A chunk that must not be computed; the message names the reason, sid the sequence to end for it."""

    def __init__(self, sid: str, reason: str) -> None:
        super().__init__(f"{sid}: {reason}")
        self.sid = sid
        self.reason = reason


@dataclass(frozen=True, slots=True)
class StepInputs:
    """N rows, filled up with tokens 0 at position 0 that no result or cache row comes from: padding, for products.

    sample_rows names the rows whose logits are wanted, sample_chunks of each the number of its chunk.
    """

    num_rows: int  # N
    token_ids: torch.Tensor  # int64 [N and padding]
    positions: torch.Tensor  # int64 [N and padding]
    kv_rows: torch.Tensor  # int64 [N * Hkv], see kernels/kv_write.py
    started_blocks: torch.Tensor  # int64
    plans: tuple[TilePlan, ...]  # their rows, one after the other, are the N rows
    window_plans: tuple[TilePlan, ...]  # the same for windowed layers
    sample_rows: torch.Tensor  # int64 [S]
    sample_chunks: tuple[int, ...]


def build_step_inputs(chunks: Seq[Chunk], geometry: Geometry) -> StepInputs:
    """SequenceError for a chunk that lies outside the vocabulary, the context, its tokens or its blocks."""
    for chunk in chunks:
        check_chunk(chunk, geometry)
    order = sorted(range(len(chunks)), key=lambda i: chunks[i].num_rows > 1)  # stable
    spans, first_row = [], 0
    for i in order:
        chunk = chunks[i]
        spans.append(QuerySpan(first_row, chunk.num_rows, chunk.start, tuple(chunk.seq.block_ids)))
        first_row += chunk.num_rows
    ids = [np.array(input_ids(chunks[i])) for i in order]
    positions = [np.arange(s.first_position, s.first_position + s.num_rows) for s in spans]
    slots = np.concatenate([_slots(s, p, geometry) for s, p in zip(spans, positions, strict=True)])
    sampled = [(span.first_row + row, i) for span, i in zip(spans, order, strict=True) for row in chunks[i].logit_rows]
    return StepInputs(
        num_rows=first_row,
        token_ids=_padded(ids, first_row),
        positions=_padded(positions, first_row),
        kv_rows=torch.from_numpy(_kv_rows(slots, geometry)),
        started_blocks=torch.from_numpy(slots[slots % geometry.block_size == 0] // geometry.block_size),
        plans=tuple(plan_attention(spans, geometry)),
        window_plans=tuple(plan_attention(spans, geometry, geometry.window)) if geometry.window else (),
        sample_rows=torch.tensor([row for row, _ in sampled], dtype=torch.int64),
        sample_chunks=tuple(i for _, i in sampled),
    )


def _padded(parts: list[Index], num_rows: int) -> torch.Tensor:
    padding = np.zeros(padded_rows(num_rows) - num_rows, dtype=np.int64)
    return torch.from_numpy(np.concatenate([*parts, padding]))


def input_ids(chunk: Chunk) -> list[int]:
    """What its rows compute, as far as that is known."""
    return [*chunk.seq.token_ids[chunk.start : chunk.start + chunk.count], *chunk.draft.ids]


def check_chunk(chunk: Chunk, geometry: Geometry, num_drawing: int = 0, *, trees: bool = False) -> None:
    """SequenceError. num_drawing: of its tokens, how many the step before is about to draw. trees: drafts may be."""
    end = check_tokens(chunk, geometry, num_drawing, trees=trees)
    check_blocks(chunk.seq.sid, chunk.seq.block_ids[: -(-end // geometry.block_size)], geometry.num_blocks)


def check_tokens(chunk: Chunk, geometry: Geometry, num_drawing: int = 0, *, trees: bool = False) -> int:
    """The end of its rows; SequenceError for all but which blocks they are stored in."""
    seq, end = chunk.seq, chunk.start + chunk.count
    if chunk.count < 1 or chunk.start < 0 or end > len(seq.token_ids) + num_drawing:
        raise SequenceError(seq.sid, f"tokens {chunk.start} to {end} of {len(seq.token_ids)}")
    if chunk.draft and not (chunk.sample and end == len(seq.token_ids)):
        raise SequenceError(seq.sid, f"drafts after {end} of {len(seq.token_ids)} tokens, of which none is drawn")
    if not (trees or chunk.draft.is_chain):
        raise SequenceError(seq.sid, "drafts beside each other, which this engine does not compute")
    end += len(chunk.draft)
    if end > geometry.max_model_len:
        raise SequenceError(seq.sid, f"{end} tokens are more than the context of {geometry.max_model_len}")
    if end > len(seq.block_ids) * geometry.block_size:
        raise SequenceError(seq.sid, f"{end} tokens do not fit in {len(seq.block_ids)} blocks")
    ids = input_ids(chunk)
    if ids and (min(ids) < 0 or max(ids) >= geometry.vocab_size):
        raise SequenceError(seq.sid, f"a token id is outside the vocabulary of {geometry.vocab_size}")
    return end


def check_blocks(sid: str, block_ids: Seq[int], num_blocks: int) -> None:
    if block_ids and (min(block_ids) < 0 or max(block_ids) >= num_blocks):
        raise SequenceError(sid, f"a block id is outside the pool of {num_blocks}")


def _slots(span: QuerySpan, positions: Index, geometry: Geometry) -> Index:
    blocks = np.array(span.block_ids)[positions // geometry.block_size]
    return blocks * geometry.block_size + positions % geometry.block_size


def _kv_rows(slots: Index, geometry: Geometry) -> Index:
    """Cache rows (block, head, offset) of every slot and head, slot by slot."""
    blocks, offsets = slots // geometry.block_size, slots % geometry.block_size
    heads = np.arange(geometry.num_kv_heads)
    rows = (blocks[:, None] * geometry.num_kv_heads + heads) * geometry.block_size + offsets[:, None]
    return np.asarray(rows.reshape(-1))
