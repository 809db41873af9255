"""Triton: what attention is made of: tiles of the cache, which keys a row sees, and parts of keys that are merged."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.attention import MOST_PART_BYTES, AttentionBatch
from kernels.gpu.launch import launch
from kernels.gpu.numbers import from_e4m3, from_int8

# Below so many programs a launch is spread over parts of the keys, as is one in which a few would have most to do. The
# result is the same either way.
FEW_PROGRAMS = 256


@triton.jit
def cached_tile(
    ptr,
    scale_ptr,
    rows,
    mask,
    d,
    q_dtype: tl.constexpr,
    FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ALONG: tl.constexpr,
):
    """Cache rows as floats of q's type, [DIM, KEYS] if ALONG is 1, else [KEYS, DIM]; and what they are scaled by."""
    places = tl.expand_dims(rows * HEAD_DIM, 1 - ALONG) + tl.expand_dims(d, ALONG)
    inside = tl.expand_dims(mask, 1 - ALONG) & tl.expand_dims(d < HEAD_DIM, ALONG)
    x = tl.load(ptr + places, mask=inside, other=0)
    scale = tl.full(rows.shape, 1.0, tl.float32)
    if FORMAT != 0:
        scale = tl.load(scale_ptr + rows, mask=mask, other=0.0)
    if FORMAT == 1:
        x = from_int8(x)
    if FORMAT == 2:
        x = from_e4m3(x)
        scale = scale * 256.0
    return x.to(q_dtype), scale


@triton.jit
def merged(top, weight, total, other_top, other_weight, other_total, WIDE: tl.constexpr):
    """The softmax sums of two parts, (maximum, weight, weighted values), as those of one. In one order of roundings."""
    new_top = tl.maximum(top, other_top)
    safe = tl.where(new_top == -float("inf"), 0.0, new_top)
    a, b = tl.exp2(top - safe), tl.exp2(other_top - safe)
    new_weight = tl.fma(weight, a, other_weight * b)
    if WIDE:  # a row of values for each of many rows
        a, b = a[:, None], b[:, None]
    return new_top, new_weight, tl.fma(total, a, other_total * b)


@triton.jit
def visible(
    keys,
    inside,
    end,
    begin,
    draft,
    bits,
    WINDOWED: tl.constexpr,
    TREE: tl.constexpr,
):
    """Which of the keys each row sees, [ROWS, KEYS]; draft: their numbers in a draft, negative before it."""
    seen = keys[None, :] < end[:, None]
    if WINDOWED:
        seen = seen & (keys[None, :] >= begin[:, None])
    if TREE:
        bit = (bits[:, None] >> tl.minimum(tl.maximum(draft, 0), 63).to(tl.int64)[None, :]) & 1
        seen = tl.where((draft < 0)[None, :], seen, (bit == 1) & inside[None, :])
    return seen


def few_programs(num_programs: int, batch: AttentionBatch, num_heads: int, num_parts: int, dim: int) -> bool:
    """Whether a launch is spread over parts of the keys."""
    part_bytes = 4 * batch.num_rows * num_heads * num_parts * dim
    return num_parts > 1 and (batch.uneven or num_programs < FEW_PROGRAMS) and part_bytes <= MOST_PART_BYTES


@triton.jit(do_not_specialize=("first_row", "num_parts"))
def _merge_kernel(
    totals_ptr,  # float32 [rows, Hq, parts, D]
    stats_ptr,  # float32 [rows, Hq, parts, 2]
    sinks_ptr,  # float32 [Hq], or None
    positions_ptr,  # int32 [rows]
    ends_ptr,
    out_ptr,  # float [N, Hq, D]
    first_row,
    num_heads,
    num_parts,
    window,
    PART: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """One row and head: its parts, in order, as `_attention_kernel` merges them."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = 0
    if WINDOWED:
        first = tl.maximum(tl.load(positions_ptr + row) - window + 1, 0)
    d = tl.arange(0, DIM)
    inside = d < HEAD_DIM
    top = tl.full([], -float("inf"), tl.float32)
    weight = tl.full([], 0.0, tl.float32)
    if sinks_ptr is not None:
        top = tl.load(sinks_ptr + head) * 1.4426950408889634
        weight = tl.full([], 1.0, tl.float32)
    total = tl.zeros([DIM], tl.float32)
    for part in range(first // PART, tl.cdiv(tl.load(ends_ptr + row), PART)):
        index = (row * num_heads + head) * num_parts + part
        part_top, part_weight = tl.load(stats_ptr + index * 2), tl.load(stats_ptr + index * 2 + 1)
        part_total = tl.load(totals_ptr + index * HEAD_DIM + d, mask=inside, other=0.0)
        top, weight, total = merged(top, weight, total, part_top, part_weight, part_total, False)
    total = total / tl.where(weight == 0.0, 1.0, weight)
    out = out_ptr + ((first_row + row) * num_heads + head) * HEAD_DIM + d
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)


def merge_parts(
    totals: torch.Tensor, stats: torch.Tensor, sinks: torch.Tensor | None, positions: torch.Tensor,
    ends: torch.Tensor, out: torch.Tensor, first_row: int, window: int, shape: dict[str, Any],
) -> None:  # fmt: skip
    num_rows, num_heads, num_parts, dim = totals.shape
    args = (totals, stats, sinks, positions, ends, out, first_row, num_heads, num_parts, window)
    launch(_merge_kernel, (num_rows, num_heads), args, num_warps=1 if dim <= 128 else 2, **shape)
