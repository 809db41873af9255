"""Which query rows meet which keys in a step: index tensors for `kernels.paged_attention`. *Pure.*

Rows are put in groups of one sequence each (one row while decoding, `PREFILL_GROUP_ROWS` else), and every group meets
the tiles of its sequence's keys up to its last position, from the first that a sliding window shows. A group's shape
does not depend on its batch mates.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.paged_attention import TILE, QuerySpan, TilePlan

PREFILL_GROUP_ROWS = 32
PLAN_BYTES = 64 << 20  # of gathered keys, values and scores that one plan may take

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the index tensors depend on. The block num_blocks exists too and always holds zeros.

    decode_group_rows and row_multiple (of the rows of a matrix product) are the smallest with which a row's bits do
    not depend on the shape it is computed in, see `kernels.paged_attention.shapes_agree`.
    """

    num_blocks: int
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    decode_group_rows: int = 1
    row_multiple: int = 8
    window: int = 0  # keys that a row of a windowed layer sees; 0: no layer is windowed

    def padded_group_rows(self, group_rows: int) -> int:
        """Rows of a group in one KV head's matrix products: query rows times the query heads that share it."""
        rows = group_rows * (self.num_heads // self.num_kv_heads)
        return -(-rows // self.row_multiple) * self.row_multiple


def plan_attention(spans: Seq[QuerySpan], geometry: Geometry, window: int = 0) -> Iterator[TilePlan]:
    """Plans whose rows, one after the other, are the rows of the spans; spans of one row come first. window 0: rows see
    all keys before them."""
    single = [s for s in spans if s.num_rows == 1]
    yield from _plans_of(single, geometry.decode_group_rows, geometry, window)
    groups = [g for s in spans[len(single) :] for g in _cut(s, PREFILL_GROUP_ROWS)]
    yield from _plans_of(groups, PREFILL_GROUP_ROWS, geometry, window)


def _cut(span: QuerySpan, num_rows: int) -> Iterator[QuerySpan]:
    for done in range(0, span.num_rows, num_rows):
        count = min(num_rows, span.num_rows - done)
        yield QuerySpan(span.first_row + done, count, span.first_position + done, span.block_ids)


def _plans_of(groups: list[QuerySpan], group_rows: int, geometry: Geometry, window: int) -> Iterator[TilePlan]:
    """One plan as long as it stays within PLAN_BYTES, else several; a group is never split."""
    padded = geometry.padded_group_rows(group_rows)
    item_bytes = 4 * geometry.num_kv_heads * (2 * TILE * geometry.head_dim + padded * (TILE + 2 * geometry.head_dim))
    most_items = max(1, PLAN_BYTES // item_bytes)
    part: list[QuerySpan] = []
    num_items = 0
    for group in groups:
        tiles = (group.first_position + group.num_rows - 1) // TILE + 1 - _first_tile(group.first_position, window)
        if part and num_items + tiles > most_items:
            yield _plan(part, padded, geometry, window)
            part, num_items = [], 0
        part.append(group)
        num_items += tiles
    if part:
        yield _plan(part, padded, geometry, window)


def _first_tile(first_position: int, window: int) -> int:
    return max(0, first_position - window + 1) // TILE if window else 0


def _plan(groups: list[QuerySpan], padded: int, geometry: Geometry, window: int) -> TilePlan:
    first_rows, counts, first_positions = (
        np.array(values)
        for values in zip(*((g.first_row, g.num_rows, g.first_position) for g in groups), strict=True)
    )  # fmt: skip
    first_tiles = np.array([_first_tile(g.first_position, window) for g in groups])
    num_tiles = (first_positions + counts - 1) // TILE + 1 - first_tiles
    item_group = np.repeat(np.arange(len(groups)), num_tiles)
    first_items = np.cumsum(num_tiles) - num_tiles
    item_tile = np.arange(len(item_group)) - first_items[item_group] + first_tiles[item_group]

    heads, kv_heads = geometry.num_heads, geometry.num_kv_heads
    shared = heads // kv_heads
    # Row m of a group and KV head is query row m // shared, query head m % shared; rows past the end repeat the last.
    row_in_group = np.minimum(np.arange(padded) // shared, counts[:, None] - 1)  # [groups, M]
    query_head = np.arange(kv_heads)[:, None] * shared + np.arange(padded) % shared  # [Hkv, M]
    q_index = (first_rows[:, None] + row_in_group)[:, None, :] * heads + query_head  # [groups, Hkv, M]
    positions = first_positions[:, None] + row_in_group
    visible = positions[item_group] - item_tile[:, None] * TILE  # [items, M]: the last visible key of the tile
    key = np.arange(TILE)
    hidden = key > visible[:, None, :, None]
    if window:
        hidden |= key <= visible[:, None, :, None] - window
    span_tiles = np.minimum(np.arange(num_tiles.max()), num_tiles[:, None] - 1)
    return TilePlan(
        num_groups=len(groups),
        num_rows_padded=padded,
        q_index=_flat(q_index[item_group]),
        kv_index=_flat(_kv_index(groups, item_group, item_tile, int((first_tiles + num_tiles).max()), geometry)),
        mask=torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0))),
        item_group=torch.from_numpy(item_group),
        group_items=_flat(np.where(span_tiles == np.arange(num_tiles.max()), span_tiles, 0) + first_items[:, None]),
        out_index=_flat(np.concatenate([_out_rows(i, g.num_rows, padded, geometry) for i, g in enumerate(groups)])),
    )


def _kv_index(
    groups: list[QuerySpan], item_group: Index, item_tile: Index, most_tiles: int, geometry: Geometry
) -> Index:
    """[items, Hkv, blocks of a tile]: cache rows, whole blocks; a missing block is the zero block."""
    tile_blocks = TILE // geometry.block_size
    table = np.full((len(groups), most_tiles * tile_blocks), geometry.num_blocks)
    for row, group in zip(table, groups, strict=True):
        needed = -(-(group.first_position + group.num_rows) // geometry.block_size)
        row[:needed] = group.block_ids[:needed]
    blocks = table.reshape(len(groups), most_tiles, tile_blocks)[item_group, item_tile]
    index: Index = blocks[:, None, :] * geometry.num_kv_heads + np.arange(geometry.num_kv_heads)[:, None]
    return index


def _out_rows(group: int, num_rows: int, padded: int, geometry: Geometry) -> Index:
    """[rows of the group, Hq]: where each row and query head of the group lies in [groups, Hkv, M]."""
    shared = geometry.num_heads // geometry.num_kv_heads
    head = np.arange(geometry.num_heads)
    in_head = np.arange(num_rows)[:, None] * shared + head % shared
    return (group * geometry.num_kv_heads + head // shared) * padded + in_head


def _flat(index: Index) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(index).reshape(-1))
