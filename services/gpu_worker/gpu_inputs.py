"""A step as tensors on a GPU: what it reads lies side by side, so that one transfer, for which nobody waits, brings it.

The rows of a step are the chunks' tokens, chunks of one token first: these and the longer ones are two launches of
attention, as their tiles are different.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.attention import AttentionBatch, attention_batch
from services.gpu_worker.attention_plan import Geometry
from services.gpu_worker.batch import Chunk
from services.gpu_worker.block_tables import BlockTables
from services.gpu_worker.step_inputs import check_tokens, input_ids

ALIGNMENT = 16  # bytes: what kernels take for granted of a pointer


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """N rows, of which S are sampled."""

    token_ids: torch.Tensor  # int64 [N]; on the host -1 - i: what sample i of the step before draws
    positions: torch.Tensor  # int32 [N]
    slots: torch.Tensor  # int64 [N], see `kernels.kv_cache`
    sample_rows: torch.Tensor  # int64 [S]
    batches: tuple[AttentionBatch, ...]  # their rows, one after the other, are the N rows

    def tensors(self) -> list[torch.Tensor]:
        own = [self.token_ids, self.positions, self.slots, self.sample_rows]
        return own + [t for batch in self.batches for t in _tensors(batch).values()]

    def with_tensors(self, tensors: Iterable[torch.Tensor]) -> DeviceInputs:
        """Others in the place of `tensors`."""
        given = iter(tensors)
        own = [next(given) for _ in range(4)]
        batches = []
        for batch in self.batches:
            fields: dict[str, Any] = {name: next(given) for name in _tensors(batch)}
            batches.append(dataclasses.replace(batch, **fields))
        return DeviceInputs(own[0], own[1], own[2], own[3], tuple(batches))


def _tensors(batch: AttentionBatch) -> dict[str, torch.Tensor]:
    values = ((f.name, getattr(batch, f.name)) for f in dataclasses.fields(batch))
    return {name: value for name, value in values if isinstance(value, torch.Tensor)}


def order_of(chunks: Seq[Chunk]) -> list[int]:
    """In which their rows lie."""
    return sorted(range(len(chunks)), key=lambda i: chunks[i].num_rows > 1)  # stable


def build_inputs(
    chunks: Seq[Chunk], geometry: Geometry, drawn_before: Mapping[int, int] | None = None, *, fast: bool = False,
    tables: BlockTables | None = None,
) -> tuple[DeviceInputs, tuple[int, ...]]:  # fmt: skip
    """On the host, and the number of the chunk of each sample row. SequenceError for a chunk that lies outside the
    vocabulary, the context, its tokens or its blocks.

    drawn_before: of a step in flight, id() of each sequence that it draws for, and the number of its sample row.
    fast: see `attention_batch`. tables: of the steps before.
    """
    before = drawn_before or {}
    tables = BlockTables() if tables is None else tables
    for chunk in chunks:
        check_tokens(chunk, geometry, num_drawing=id(chunk.seq) in before)
    order = order_of(chunks)
    token_ids: list[int] = []
    samples: list[tuple[int, int]] = []  # row, number of its chunk
    for i in order:
        chunk, first_row = chunks[i], len(token_ids)
        token_ids += input_ids(chunk)
        if len(token_ids) < first_row + chunk.num_rows:
            token_ids.append(-1 - before[id(chunk.seq)])
        samples += [(first_row + row, i) for row in chunk.logit_rows]
    ordered = [chunks[i] for i in order]
    batches = tuple(_batches(ordered, geometry, tables, fast))
    tables.keep([c.seq for c in chunks])
    positions = np.array([p for c in ordered for p in range(c.start, c.start + c.num_rows)], dtype=np.int32)
    inputs = DeviceInputs(
        torch.tensor(token_ids, dtype=torch.int64),
        torch.from_numpy(positions),
        torch.tensor([s for c in ordered for s in _slots(c, geometry.block_size)], dtype=torch.int64),
        torch.tensor([row for row, _ in samples], dtype=torch.int64),
        batches,
    )
    return inputs, tuple(i for _, i in samples)


def _slots(chunk: Chunk, block_size: int) -> list[int]:
    blocks = chunk.seq.block_ids
    return [
        blocks[p // block_size] * block_size + p % block_size for p in range(chunk.start, chunk.start + chunk.num_rows)
    ]


def _batches(chunks: Seq[Chunk], geometry: Geometry, tables: BlockTables, fast: bool) -> Iterable[AttentionBatch]:
    first_row = 0
    for part in ([c for c in chunks if c.num_rows == 1], [c for c in chunks if c.num_rows > 1]):
        if not part:
            continue
        rows, lengths = [c.num_rows for c in part], [c.start + c.num_rows for c in part]
        nums = [-(-n // geometry.block_size) for n in lengths]
        table = torch.from_numpy(tables.table([c.seq for c in part], nums, geometry.num_blocks))
        group = geometry.num_heads // geometry.num_kv_heads
        yield attention_batch(rows, lengths, table, group, first_row=first_row, fast=fast)
        first_row += sum(rows)


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the tensors side by side, each aligned."""
    return sum(-(-t.numel() * t.itemsize // ALIGNMENT) * ALIGNMENT for t in tensors)


def upload(tensors: Seq[torch.Tensor], device: torch.device, into: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Contiguous tensors of the host on the device, copied at once and perhaps later: keep nothing, wait for nothing.

    into: uint8 on the device, to be overwritten.
    """
    size = num_bytes(tensors)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, tensor in zip(_views(host, tensors), tensors, strict=True):
        part.copy_(tensor)
    there = torch.empty(size, dtype=torch.uint8, device=device) if into is None else into[:size]
    there.copy_(host, non_blocking=True)
    return _views(there, tensors)


def _views(buffer: torch.Tensor, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    views, start = [], 0
    for like in tensors:
        part = buffer[start : start + like.numel() * like.itemsize]
        views.append(part.view(like.dtype).view(like.shape))
        start += num_bytes([like])
    return views
