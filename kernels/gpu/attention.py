"""Triton: attention over the paged cache (see `kernels.attention`): one kernel that attends, one that merges parts."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.attention import (
    WHOLE,
    AttentionBatch,
    AttentionOptions,
    attention,
    attention_batch,
)
from kernels.gpu.attention_parts import cached_tile, few_programs, merge_parts, merged, visible
from kernels.gpu.launch import KIB, CompileCase, launch, on_paper, target_of
from kernels.gpu.scaled_rows import carrier
from kernels.kv_cache import KvCache

LOG2E = math.log2(math.e)
FORMATS = {torch.int8: 1, torch.float8_e4m3fn: 2}


@triton.jit(do_not_specialize=("first_row", "num_parts", "table_stride"))
def _attention_kernel(
    q_ptr,  # float [N, Hq, D]
    k_ptr,  # float, int8 or uint8 [blocks, Hkv, BLOCK_SIZE, D]
    v_ptr,
    k_scale_ptr,  # float32 [blocks, Hkv, BLOCK_SIZE], or None
    v_scale_ptr,
    sinks_ptr,  # float32 [Hq], or None
    block_tables_ptr,  # int32 [S, table_stride]
    seq_lens_ptr,  # int32 [S]
    row_starts_ptr,  # int32 [S + 1]
    tile_seqs_ptr,  # int32 [tiles]
    tile_tokens_ptr,
    positions_ptr,  # int32 [rows of the batch]
    ends_ptr,
    tree_ptr,  # int64 [rows of the batch], or None
    out_ptr,  # float [N, Hq, D]
    totals_ptr,  # float32 [rows of the batch, Hq, parts, D], or None: then out is written
    stats_ptr,  # float32 [rows of the batch, Hq, parts, 2]
    first_row,
    num_kv_heads,
    num_parts,
    table_stride,
    q_row_stride,
    q_head_stride,
    scale,  # times log2 e
    window,
    softcap,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    WHOLE: tl.constexpr,  # one part has all keys
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,  # of the cache: 0 floats, 1 int8, 2 e4m3
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """ROWS query rows of one KV head over all their keys, or over those of one part."""
    kv_head = tl.program_id(1)
    seq = tl.load(tile_seqs_ptr + tl.program_id(0)).to(tl.int64)
    start = tl.load(row_starts_ptr + seq)
    num_rows, length = tl.load(row_starts_ptr + seq + 1) - start, tl.load(seq_lens_ptr + seq)
    m = tl.arange(0, ROWS)
    token = tl.load(tile_tokens_ptr + tl.program_id(0)) + m // GROUP
    head = kv_head * GROUP + m % GROUP
    known = (m < ROWS // GROUP * GROUP) & (token < num_rows)
    row = (start + token).to(tl.int64)
    d = tl.arange(0, DIM)
    places = (row * q_row_stride + head * q_head_stride)[:, None] + d[None, :]
    q = tl.load(q_ptr + places, mask=known[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    end = tl.load(ends_ptr + row - first_row, mask=known, other=0)
    last = tl.max(end, 0)
    first, begin, bits = 0, end, end
    if WINDOWED:
        begin = tl.load(positions_ptr + row - first_row, mask=known, other=0) - window + 1
        first = tl.maximum(tl.min(tl.where(known, begin, length), 0), 0)
    if tree_ptr is not None:
        bits = tl.load(tree_ptr + row - first_row, mask=known, other=0)
    if totals_ptr is not None:
        first_part = tl.program_id(2)
        last_part = tl.minimum(first_part + 1, tl.cdiv(last, PART))
        if first >= (first_part + 1) * PART:
            last_part = first_part
    else:
        first_part, last_part = first // PART, tl.cdiv(last, PART)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None and totals_ptr is None:
        top = tl.load(sinks_ptr + head, mask=known, other=0.0) * 1.4426950408889634
        weight += 1.0
    total = tl.zeros([ROWS, DIM], tl.float32)
    for part in range(first_part, last_part):
        if WHOLE:
            part_top, part_weight, part_total = top, weight, total
        else:
            part_top = tl.full([ROWS], -float("inf"), tl.float32)
            part_weight = tl.zeros([ROWS], tl.float32)
            part_total = tl.zeros([ROWS, DIM], tl.float32)
        part_last = tl.minimum(part * PART + PART, last)
        for tile in range(tl.maximum(part * PART, first // KEYS * KEYS), part_last, KEYS):
            keys = tile + tl.arange(0, KEYS)
            inside = keys < part_last
            block = tl.load(block_tables_ptr + seq * table_stride + keys // BLOCK_SIZE, mask=inside, other=0)
            cache_rows = (block.to(tl.int64) * num_kv_heads + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE
            k, k_scale = cached_tile(k_ptr, k_scale_ptr, cache_rows, inside, d, q.dtype, FORMAT, HEAD_DIM, 1)
            scores = tl.dot(q, k, input_precision=PRECISION) * (k_scale * scale)[None, :]
            if CAPPED:
                # tanh, with the logarithm's base in scale taken out and put back
                scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 / softcap)))) * 1.4426950408889634
            draft = keys - (length - num_rows)
            seen = visible(keys, inside, end, begin, draft, bits, WINDOWED, tree_ptr is not None)
            scores = tl.where(seen, scores, -float("inf"))
            new_top = tl.maximum(part_top, tl.max(scores, 1))
            safe = tl.where(new_top == -float("inf"), 0.0, new_top)
            p, shrink = tl.exp2(scores - safe[:, None]), tl.exp2(part_top - safe)
            part_weight = tl.fma(part_weight, shrink, tl.sum(p, 1))
            v, v_scale = cached_tile(v_ptr, v_scale_ptr, cache_rows, inside, d, q.dtype, FORMAT, HEAD_DIM, 0)
            if FORMAT != 0:
                p = p * v_scale[None, :]
            part_total = tl.dot(p.to(q.dtype), v, part_total * shrink[:, None], input_precision=PRECISION)
            part_top = new_top
        if WHOLE or totals_ptr is not None:
            top, weight, total = part_top, part_weight, part_total
        else:
            top, weight, total = merged(top, weight, total, part_top, part_weight, part_total, True)

    columns = known[:, None] & (d < HEAD_DIM)[None, :]
    num_heads = num_kv_heads * GROUP
    if totals_ptr is None:
        total = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
        out = out_ptr + (row * num_heads + head)[:, None] * HEAD_DIM + d[None, :]
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=columns)
    elif last_part > first_part:
        index = ((row - first_row) * num_heads + head) * num_parts + first_part
        tl.store(totals_ptr + index[:, None] * HEAD_DIM + d[None, :], total, mask=columns)
        tl.store(stats_ptr + index * 2, top, mask=known)
        tl.store(stats_ptr + index * 2 + 1, weight, mask=known)


def attention_triton(
    q: torch.Tensor, cache: KvCache, batch: AttentionBatch, options: AttentionOptions, out: torch.Tensor
) -> None:
    q = q if q.stride(2) == 1 else q.contiguous()
    num_heads, dim = q.shape[1:]
    num_kv_heads = cache.k.shape[1]
    num_tiles, num_parts = batch.tile_seqs.shape[0], -(-batch.longest // batch.part)
    totals = stats = None
    if few_programs(num_tiles * num_kv_heads, batch, num_heads, num_parts, dim):
        totals = torch.empty(batch.num_rows, num_heads, num_parts, dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(batch.num_rows, num_heads, num_parts, 2, dtype=torch.float32, device=q.device)
    window, cap = options.window or 0, options.softcap or 0.0
    padded = triton.next_power_of_2(dim)
    shape = {"PART": batch.part, "HEAD_DIM": dim, "DIM": padded, "WINDOWED": options.window is not None}
    args = (
        q, cache.k.view(carrier(cache.k.dtype)), cache.v.view(carrier(cache.v.dtype)), cache.k_scale, cache.v_scale,
        options.sinks, batch.block_tables, batch.seq_lens, batch.row_starts, batch.tile_seqs, batch.tile_tokens,
        batch.positions, batch.ends, batch.tree, out, totals, stats, batch.first_row, num_kv_heads, num_parts,
        batch.block_tables.stride(0), q.stride(0), q.stride(1), options.scale * LOG2E, window, cap,
    )  # fmt: skip
    keys, in_flight = _shape(q, batch.tile_rows, padded, cache.quantized)
    launch(
        _attention_kernel, (num_tiles, num_kv_heads, 1 if totals is None else num_parts), args, all_registers=True,
        GROUP=num_heads // num_kv_heads, ROWS=batch.tile_rows, KEYS=keys, WHOLE=batch.part == WHOLE,
        BLOCK_SIZE=cache.k.shape[2], FORMAT=FORMATS.get(cache.k.dtype, 0), CAPPED=options.softcap is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", **in_flight, **shape,
    )  # fmt: skip
    if totals is not None and stats is not None:
        merge_parts(totals, stats, options.sinks, batch.positions, batch.ends, out, batch.first_row, window, shape)


def _shape(q: torch.Tensor, tile_rows: int, padded: int, quantized: bool) -> tuple[int, dict[str, Any]]:
    """Keys of a tile, and warps and tiles in flight, as registers and shared memory allow (found by compiling)."""
    target, floats = target_of(q), q.dtype == torch.float32
    if target.backend == "hip":
        keys = 32 if quantized or padded > 128 or floats else 64
        return keys, {"num_warps": 4, "num_stages": 1 if padded > 128 else 2}
    if floats:  # multiplied without matrix units, from registers
        return 16, {"num_warps": 8 if padded <= 128 else 16, "num_stages": 2}
    wide = tile_rows * padded >= 32 * 128 or (quantized and tile_rows * padded >= 16 * 128)
    stages = 2 if target.shared_bytes < 128 * KIB else 3
    return 64 if padded <= 128 else 32, {"num_warps": 8 if wide else 4, "num_stages": stages}


def _case(
    name: str,
    heads: tuple[int, int] = (32, 8),
    dim: int = 128,
    cached: torch.dtype = torch.bfloat16,
    dtype: torch.dtype = torch.bfloat16,
    rows: int = 1,
    tree: bool = False,
    fast: bool = False,
    sinks: bool = False,
    length: int = 4096,
    window: int | None = None,
    softcap: float | None = None,
    mma: str = "mma.sync",
) -> CompileCase:
    """Eight sequences; few KV heads or long chunks make one launch, else it is cut into parts."""
    num_heads, num_kv_heads = heads
    q = on_paper(8 * rows, num_heads + 2 * num_kv_heads, dim, dtype=dtype)[:, :num_heads]
    k = on_paper(1000, num_kv_heads, 16, dim, dtype=cached)
    scale = on_paper(1000, num_kv_heads, 16, dtype=torch.float32) if cached in FORMATS else None
    options = AttentionOptions(dim**-0.5, window, softcap, on_paper(num_heads, dtype=torch.float32) if sinks else None)

    def call() -> torch.Tensor:
        batch = attention_batch(
            [rows] * 8, [length] * 8, [range(length // 16)] * 8, num_heads // num_kv_heads, fast=fast,
            tree=[(0, 0)] * 8 * rows if tree else None, device="meta",
        )  # fmt: skip
        return attention(q, KvCache(k, k, scale, scale), batch, options)

    expected = {"sm_80": "mma.sync", "sm_89": "mma.sync", "sm_90": mma, "gfx942": "mfma"} if dtype.itemsize == 2 else {}
    return CompileCase(f"{name}, {num_heads}/{num_kv_heads} heads of {dim}, {cached}", call, expected)


COMPILE_CASES = (
    _case("decode", fast=True),
    _case("decode", cached=torch.float8_e4m3fn, fast=True),
    _case("decode", cached=torch.int8, fast=True),
    _case("decode", (9, 3), 64, torch.float16, torch.float16, fast=True),
    _case("decode", (32, 32), 80, fast=True),
    _case("decode", (32, 32), 96),
    _case("decode, window, cap", (16, 8), 256, window=4096, softcap=50.0),
    _case("decode, window, sinks", (64, 8), 64, window=128, sinks=True),
    _case("decode", cached=torch.float32, dtype=torch.float32),
    _case("decode", (16, 8), 256, torch.float32, torch.float32),
    _case("draft of 8", rows=8),
    _case("draft of 8", cached=torch.int8, rows=8),
    _case("tree of 16", rows=16, tree=True),
    _case("tree of 16", cached=torch.float8_e4m3fn, rows=16, tree=True),
    _case("chunk", rows=512),
    _case("chunk, fast", rows=512, fast=True, mma="wgmma"),
    _case("chunk, fast", cached=torch.float8_e4m3fn, rows=512, fast=True, mma="wgmma"),
    _case("chunk, fast, window, cap", (16, 8), 256, rows=512, fast=True, window=4096, softcap=50.0, mma="wgmma"),
)
