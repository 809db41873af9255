"""A step as the flat arrays that the native decoder reads. *Pure.*"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.gpu_worker.attention_plan import Geometry
from services.gpu_worker.batch import Chunk
from services.gpu_worker.step_inputs import check_chunk

Ints = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class NativeInputs:
    """N rows, the chunks' tokens one after the other."""

    token_ids: Ints  # [N]
    positions: Ints  # [N]
    row_blocks: Ints  # [N]: the block that a row's K and V go to
    spans: Ints  # [chunks, 4]: first row, rows, first position, place of its blocks in block_ids
    block_ids: Ints
    sample_rows: Ints  # [S]
    sample_chunks: tuple[int, ...]  # number of the chunk of each sample row


def build_native_inputs(chunks: Seq[Chunk], geometry: Geometry) -> NativeInputs:
    """SequenceError for a chunk that lies outside the vocabulary, the context, its tokens or its blocks."""
    token_ids: list[int] = []
    positions: list[int] = []
    row_blocks: list[int] = []
    spans: list[tuple[int, int, int, int]] = []
    block_ids: list[int] = []
    size = geometry.block_size
    for chunk in chunks:
        check_chunk(chunk, geometry)
        start, end, blocks = chunk.start, chunk.start + chunk.count, chunk.seq.block_ids
        spans.append((len(token_ids), chunk.count, start, len(block_ids)))
        token_ids += chunk.seq.token_ids[start:end]
        positions += range(start, end)
        row_blocks += [blocks[position // size] for position in range(start, end)]
        block_ids += blocks[: -(-end // size)]
    sampled = [i for i, chunk in enumerate(chunks) if chunk.sample]
    sample_rows = [spans[i][0] + spans[i][1] - 1 for i in sampled]
    return NativeInputs(
        token_ids=_ints(token_ids), positions=_ints(positions), row_blocks=_ints(row_blocks), spans=_ints(spans),
        block_ids=_ints(block_ids), sample_rows=_ints(sample_rows), sample_chunks=tuple(sampled),
    )  # fmt: skip


def _ints(values: Seq[int] | Seq[tuple[int, ...]]) -> Ints:
    return np.array(values, dtype=np.int32)
