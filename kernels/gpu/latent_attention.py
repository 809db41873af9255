"""Triton: attention over a cache of latents (see `kernels.latent_attention`); parts are merged by `attention_parts`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention import AttentionBatch, attention_batch
from kernels.gpu.attention import FORMATS, LOG2E
from kernels.gpu.attention_parts import cached_tile, few_programs, merge_parts, merged, visible
from kernels.gpu.launch import CompileCase, launch, on_paper
from kernels.gpu.scaled_rows import carrier
from kernels.kv_cache import KvCache
from kernels.latent_attention import latent_attention

ROWS = 32  # query rows of a program: heads of a token, or few heads of several
KEYS = 32
SLICE = 64  # columns of queries and keys that are multiplied at a time: all of them would fill the registers


@triton.jit(do_not_specialize=("first_row", "num_parts", "table_stride"))
def _latent_attention_kernel(
    q_ptr,  # float [N, H, C]
    cache_ptr,  # float, int8 or uint8 [blocks, BLOCK_SIZE, C]
    scale_ptr,  # float32 [blocks, BLOCK_SIZE], or None
    block_tables_ptr,  # int32 [S, table_stride]
    seq_lens_ptr,  # int32 [S]
    row_starts_ptr,  # int32 [S + 1]
    tile_seqs_ptr,  # int32 [tiles]
    tile_tokens_ptr,
    ends_ptr,  # int32 [rows of the batch]
    tree_ptr,  # int64 [rows of the batch], or None
    out_ptr,  # float [N, H, RANK]
    totals_ptr,  # float32 [rows of the batch, H, parts, RANK], or None: then out is written
    stats_ptr,  # float32 [rows of the batch, H, parts, 2]
    first_row,
    num_heads,
    num_parts,
    table_stride,
    q_row_stride,
    q_head_stride,
    scale,  # times log2 e
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,  # C
    SLICE: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,  # of RANK, up to a power of two: values are read, and summed, in two halves
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,  # of the cache: 0 floats, 1 int8, 2 e4m3
    PRECISION: tl.constexpr,
):
    """ROWS query rows, each a token with one of GROUP heads, over all their keys, or over those of one part."""
    seq = tl.load(tile_seqs_ptr + tl.program_id(0)).to(tl.int64)
    start = tl.load(row_starts_ptr + seq)
    num_rows, length = tl.load(row_starts_ptr + seq + 1) - start, tl.load(seq_lens_ptr + seq)
    m = tl.arange(0, ROWS)
    token = tl.load(tile_tokens_ptr + tl.program_id(0)) + m // GROUP
    head = tl.program_id(1) * GROUP + m % GROUP
    known = (m < ROWS // GROUP * GROUP) & (token < num_rows) & (head < num_heads)
    row = (start + token).to(tl.int64)
    kind: tl.constexpr = q_ptr.dtype.element_ty
    q_rows = q_ptr + (row * q_row_stride + head * q_head_stride)[:, None]
    end = tl.load(ends_ptr + row - first_row, mask=known, other=0)
    last, bits = tl.max(end, 0), end
    if tree_ptr is not None:
        bits = tl.load(tree_ptr + row - first_row, mask=known, other=0)
    first_part, last_part = 0, tl.cdiv(last, PART)
    if totals_ptr is not None:
        first_part = tl.program_id(2)
        last_part = tl.minimum(first_part + 1, last_part)
    c, d = tl.arange(0, SLICE), tl.arange(0, HALF)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, HALF], tl.float32)
    total_b = tl.zeros([ROWS, HALF], tl.float32)
    for part in range(first_part, last_part):
        part_top = tl.full([ROWS], -float("inf"), tl.float32)
        part_weight = tl.zeros([ROWS], tl.float32)
        part_total = tl.zeros([ROWS, HALF], tl.float32)
        part_total_b = tl.zeros([ROWS, HALF], tl.float32)
        part_last = tl.minimum(part * PART + PART, last)
        for tile in range(part * PART, part_last, KEYS):
            keys = tile + tl.arange(0, KEYS)
            inside = keys < part_last
            block = tl.load(block_tables_ptr + seq * table_stride + keys // BLOCK_SIZE, mask=inside, other=0)
            rows = block.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
            scores = tl.zeros([ROWS, KEYS], tl.float32)
            for first in range(0, COLUMNS, SLICE):
                column = first + c
                q = tl.load(q_rows + column[None, :], mask=known[:, None] & (column < COLUMNS)[None, :], other=0.0)
                k, k_scale = cached_tile(cache_ptr, scale_ptr, rows, inside, column, q.dtype, FORMAT, COLUMNS, 1)
                scores = tl.dot(q, k, scores, input_precision=PRECISION)
            v, v_scale = cached_tile(cache_ptr, scale_ptr, rows, inside, d, kind, FORMAT, COLUMNS, 0)
            scores = scores * (v_scale * scale)[None, :]
            seen = visible(keys, inside, end, end, keys - (length - num_rows), bits, False, tree_ptr is not None)
            scores = tl.where(seen, scores, -float("inf"))
            new_top = tl.maximum(part_top, tl.max(scores, 1))
            safe = tl.where(new_top == -float("inf"), 0.0, new_top)
            p, shrink = tl.exp2(scores - safe[:, None]), tl.exp2(part_top - safe)
            part_weight = tl.fma(part_weight, shrink, tl.sum(p, 1))
            if FORMAT != 0:
                p = p * v_scale[None, :]
            part_total = tl.dot(p.to(kind), v, part_total * shrink[:, None], input_precision=PRECISION)
            v, v_scale = cached_tile(cache_ptr, scale_ptr, rows, inside, HALF + d, kind, FORMAT, COLUMNS, 0)
            part_total_b = tl.dot(p.to(kind), v, part_total_b * shrink[:, None], input_precision=PRECISION)
            part_top = new_top
        if totals_ptr is not None:
            top, weight, total, total_b = part_top, part_weight, part_total, part_total_b
        else:
            _, _, total = merged(top, weight, total, part_top, part_weight, part_total, True)
            top, weight, total_b = merged(top, weight, total_b, part_top, part_weight, part_total_b, True)

    near, far = known[:, None] & (d < RANK)[None, :], known[:, None] & (HALF + d < RANK)[None, :]
    if totals_ptr is None:
        whole = tl.where(weight == 0.0, 1.0, weight)[:, None]
        out = out_ptr + (row * num_heads + head)[:, None] * RANK + d[None, :]
        tl.store(out, (total / whole).to(kind), mask=near)
        tl.store(out + HALF, (total_b / whole).to(kind), mask=far)
    elif last_part > first_part:
        index = ((row - first_row) * num_heads + head) * num_parts + first_part
        totals = totals_ptr + index[:, None] * RANK + d[None, :]
        tl.store(totals, total, mask=near)
        tl.store(totals + HALF, total_b, mask=far)
        tl.store(stats_ptr + index * 2, top, mask=known)
        tl.store(stats_ptr + index * 2 + 1, weight, mask=known)


def latent_attention_triton(
    q: torch.Tensor, cache: KvCache, batch: AttentionBatch, scale: float, out: torch.Tensor
) -> None:
    q = q if q.stride(2) == 1 else q.contiguous()
    num_heads, columns, rank = q.shape[1], q.shape[2], out.shape[2]
    group = min(num_heads, ROWS)
    num_parts = -(-batch.longest // batch.part)
    grid = (batch.tile_seqs.shape[0], triton.cdiv(num_heads, group))
    totals = stats = None
    if few_programs(grid[0] * grid[1], batch, num_heads, num_parts, rank):
        totals = torch.empty(batch.num_rows, num_heads, num_parts, rank, dtype=torch.float32, device=q.device)
        stats = torch.empty(batch.num_rows, num_heads, num_parts, 2, dtype=torch.float32, device=q.device)
    padded = max(32, triton.next_power_of_2(rank))
    args = (
        q, cache.k.view(carrier(cache.k.dtype)), cache.k_scale, batch.block_tables, batch.seq_lens, batch.row_starts,
        batch.tile_seqs, batch.tile_tokens, batch.ends, batch.tree, out, totals, stats, batch.first_row, num_heads,
        num_parts, batch.block_tables.stride(0), q.stride(0), q.stride(1), scale * LOG2E,
    )  # fmt: skip
    launch(
        _latent_attention_kernel, (*grid, 1 if totals is None else num_parts), args, all_registers=True, GROUP=group,
        ROWS=ROWS, KEYS=KEYS, PART=batch.part, COLUMNS=columns, SLICE=SLICE, RANK=rank, HALF=padded // 2,
        BLOCK_SIZE=cache.k.shape[2], FORMAT=FORMATS.get(cache.k.dtype, 0),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=8, num_stages=2,
    )  # fmt: skip
    if totals is not None and stats is not None:
        shape = {"PART": batch.part, "HEAD_DIM": rank, "DIM": padded, "WINDOWED": False}
        merge_parts(totals, stats, None, batch.positions, batch.ends, out, batch.first_row, 0, shape)


def _case(
    name: str, num_heads: int, rows: int = 1, cached: torch.dtype = torch.bfloat16, tree: bool = False,
    length: int = 4096,
) -> CompileCase:  # fmt: skip
    """Eight sequences, with latents of DeepSeek's size."""
    q = on_paper(8 * rows, num_heads, 576, dtype=torch.bfloat16)
    out = on_paper(8 * rows, num_heads, 512, dtype=torch.bfloat16)
    k = on_paper(1000, 1, 16, 576, dtype=cached)
    scale = on_paper(1000, 1, 16, dtype=torch.float32) if cached in FORMATS else None

    def call() -> None:
        batch = attention_batch(
            [rows] * 8, [length] * 8, [range(length // 16)] * 8, num_heads,
            tree=[(0, 0)] * 8 * rows if tree else None, device="meta",
        )  # fmt: skip
        latent_attention(q, KvCache(k, k, scale, scale), batch, 0.1, out)

    mma = {"sm_80": "mma.sync", "sm_89": "mma.sync", "sm_90": "mma.sync", "gfx942": "mfma"}
    return CompileCase(f"{name}, {num_heads} heads, {cached}", call, mma)


COMPILE_CASES = (
    _case("decode", 128),
    _case("decode", 16),
    _case("decode", 128, cached=torch.int8),
    _case("decode", 16, cached=torch.float8_e4m3fn),
    _case("draft of 8", 128, rows=8),
    _case("tree of 16", 128, rows=16, tree=True),
    _case("tree of 16", 128, rows=16, cached=torch.int8, tree=True),
    _case("chunk", 128, rows=512),
    _case("chunk", 16, rows=512, cached=torch.float8_e4m3fn),
)
