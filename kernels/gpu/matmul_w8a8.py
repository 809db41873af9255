"""Triton: product of weights and activations in eight bits (see `kernels.matmul_w8a8`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import CompileCase, on_paper, target_of
from kernels.gpu.numbers import from_e4m3
from kernels.gpu.scaled_rows import carrier
from kernels.gpu.split_k import BEST_MMA, VARYING, plan_of, program_tile, store_product
from kernels.matmul_w8a8 import GROUP, ScaledWeight, matmul_w8a8
from kernels.routing import Routing, choices_of, rows_of
from kernels.scaled_rows import ScaledRows

INTEGERS, E4M3, E4M3_AS_HALVES = 0, 1, 2


@triton.jit(do_not_specialize=VARYING)
def _matmul_w8a8_kernel(
    y_ptr,  # float [M, N]
    bias_ptr,  # float [N], or None
    parts_ptr,  # float32 [splits, M, N], or None: then y is written
    slots_ptr,
    experts_ptr,
    num_tiles,
    num_tokens,
    num_rows,
    num_splits,
    x_ptr,  # int8, or bits of e4m3 as uint8, [rows of x, K]
    x_scale_ptr,  # float32 [rows of x, groups]
    w_ptr,  # as x [all rows, K]; all rows: N, or those of all experts
    w_scale_ptr,  # float32 [groups, all rows]
    all_rows,
    num_columns,
    split_columns,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    CHOICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUPED: tl.constexpr,  # a scale for each COLUMNS columns
):
    """y = x W^T + bias: ROWS rows of W with TOKENS rows of x, over one split of the columns or all, one by one."""
    token, source, row, place, works = program_tile(
        slots_ptr, experts_ptr, num_tiles, num_tokens, num_rows, ROWS, TOKENS, CHOICES
    )
    is_token, is_row = token < num_tokens, row < num_rows
    k = tl.arange(0, COLUMNS)
    w_rows = w_ptr + place.to(tl.int64)[:, None] * num_columns
    x_rows = x_ptr + source.to(tl.int64)[None, :] * num_columns
    first = tl.program_id(1)
    last = tl.where(works, num_splits, first)
    if parts_ptr is not None:
        last = tl.where(works, first + 1, first)
    num_groups = num_columns // COLUMNS if GROUPED else 1
    unit: tl.constexpr = 65536.0 if FORMAT == 2 else 1.0
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for split in range(first, last):
        acc = tl.zeros([ROWS, TOKENS], tl.int32 if FORMAT == 0 and not GROUPED else tl.float32)
        for start in range(split * split_columns, tl.minimum((split + 1) * split_columns, num_columns), COLUMNS):
            inside = start + k < num_columns
            w = tl.load(w_rows + (start + k)[None, :], mask=is_row[:, None] & inside[None, :], other=0)
            x = tl.load(x_rows + (start + k)[:, None], mask=inside[:, None] & is_token[None, :], other=0)
            if FORMAT == 0:
                part = tl.dot(w, x, out_dtype=tl.int32)
            elif FORMAT == 1:
                # A sum of COLUMNS products: the units for 8-bit floats keep fewer bits than float32 has.
                part = tl.dot(w.to(tl.float8e4nv, bitcast=True), x.to(tl.float8e4nv, bitcast=True))
            else:
                part = tl.dot(from_e4m3(w), from_e4m3(x))
            if GROUPED:
                group = start // COLUMNS
                w_scale = tl.load(w_scale_ptr + group * all_rows + place, mask=is_row, other=0.0) * unit
                x_scale = tl.load(x_scale_ptr + source.to(tl.int64) * num_groups + group, mask=is_token, other=0.0)
                acc = tl.fma(part.to(tl.float32) * w_scale[:, None], x_scale[None, :], acc)
            else:
                acc += part
        if not GROUPED:
            w_scale = tl.load(w_scale_ptr + place, mask=is_row, other=0.0) * unit
            x_scale = tl.load(x_scale_ptr + source, mask=is_token, other=0.0)
            acc = acc.to(tl.float32) * w_scale[:, None] * x_scale[None, :]
        if ONE_SPLIT:
            total = acc
        else:
            total += acc
    store_product(total, y_ptr, bias_ptr, parts_ptr, first, token, row, num_tokens, num_rows)


def matmul_w8a8_triton(
    x: ScaledRows, weight: ScaledWeight, bias: torch.Tensor | None, to: torch.dtype, routing: Routing | None = None
) -> torch.Tensor:
    """With routing W has the rows of all experts, and x a row for each token or for each pair."""
    columns, rows, kind = x.q.shape[1], weight.out_features, carrier(weight.q.dtype)
    form = _format(x.q, weight.q.dtype)
    few = form == E4M3_AS_HALVES and target_of(x.q).multiplies_by_warp  # what they are made of takes registers
    plan = plan_of(x.q, rows_of(rows, routing), columns, GROUP, to, routing, most=32 if few else 64)
    args = (
        x.q.contiguous().view(kind), x.scale.contiguous(), weight.q.view(kind), weight.scale, rows, columns,
        plan.splits.columns,
    )  # fmt: skip
    plan.launch(
        _matmul_w8a8_kernel, args, bias=bias, stage_bytes=(plan.tile.rows + plan.tile.tokens) * GROUP,
        unfused=weight.group is None,  # a product with a scale is rounded before it is added, by whichever kernel
        CHOICES=choices_of(x.q, routing), COLUMNS=GROUP, FORMAT=form,
        GROUPED=weight.group is not None,
    )  # fmt: skip
    return plan.y


def _format(x: torch.Tensor, dtype: torch.dtype) -> int:
    """8-bit floats are multiplied as such where the device has that, else as float16, which hold them exactly."""
    if dtype is torch.int8:
        return INTEGERS
    return E4M3 if target_of(x).multiplies_e4m3 else E4M3_AS_HALVES


def _case(num_tokens: int, rows: int, columns: int, dtype: torch.dtype, group: int | None = None) -> CompileCase:
    x = on_paper(num_tokens, columns, dtype=torch.bfloat16)
    scale = on_paper(columns // group if group else 1, rows, dtype=torch.float32)
    weight = ScaledWeight(on_paper(rows, columns, dtype=dtype), scale)
    name = f"{num_tokens} x {rows} x {columns} {dtype}, group {group}"
    mma = BEST_MMA | ({"sm_100": "mma.sync"} if dtype is torch.int8 else {})
    return CompileCase(name, lambda: matmul_w8a8(x, weight), mma)


COMPILE_CASES = (
    _case(1, 4096, 4096, torch.float8_e4m3fn),
    _case(64, 28672, 4096, torch.float8_e4m3fn),
    _case(8192, 4096, 14336, torch.float8_e4m3fn),
    _case(1, 7168, 2048, torch.float8_e4m3fn, 128),
    _case(64, 7168, 2048, torch.float8_e4m3fn, 128),
    _case(8192, 7168, 2048, torch.float8_e4m3fn, 128),
    _case(1, 4096, 4096, torch.int8),
    _case(64, 28672, 4096, torch.int8),
    _case(8192, 4096, 14336, torch.int8),
)
