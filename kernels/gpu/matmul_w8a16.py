"""Triton: product of a weight of 8-bit floats with activations as they are (see `kernels.matmul_w8a16`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import CompileCase, on_paper
from kernels.gpu.numbers import from_e4m3
from kernels.gpu.scaled_rows import carrier
from kernels.gpu.split_k import BEST_MMA, VARYING, plan_of, program_tile, store_product
from kernels.matmul_w8a8 import GROUP, ScaledWeight
from kernels.matmul_w8a16 import matmul_w8a16
from kernels.routing import Routing, choices_of, rows_of


@triton.jit(do_not_specialize=VARYING)
def _matmul_w8a16_kernel(
    y_ptr,  # float [M, N]
    bias_ptr,  # float [N], or None
    parts_ptr,  # float32 [splits, M, N], or None: then y is written
    slots_ptr,
    experts_ptr,
    num_tiles,
    num_tokens,
    num_rows,
    num_splits,
    x_ptr,  # float [rows of x, K], x_stride apart
    w_ptr,  # bits of e4m3 as uint8 [all rows, K]; all rows: N, or those of all experts
    w_scale_ptr,  # float32 [groups, all rows]
    all_rows,
    num_columns,
    x_stride,
    split_columns,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    CHOICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPED: tl.constexpr,  # a scale for each COLUMNS columns
    PRECISION: tl.constexpr,
):
    """y = x W^T + bias: ROWS rows of W with TOKENS rows of x, over one split of the columns or all, one by one."""
    token, source, row, place, works = program_tile(
        slots_ptr, experts_ptr, num_tiles, num_tokens, num_rows, ROWS, TOKENS, CHOICES
    )
    is_token, is_row = token < num_tokens, row < num_rows
    k = tl.arange(0, COLUMNS)
    w_rows = w_ptr + place.to(tl.int64)[:, None] * num_columns
    x_rows = x_ptr + source.to(tl.int64)[None, :] * x_stride
    first = tl.program_id(1)
    last = tl.where(works, num_splits, first)
    if parts_ptr is not None:
        last = tl.where(works, first + 1, first)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for split in range(first, last):
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
        for start in range(split * split_columns, tl.minimum((split + 1) * split_columns, num_columns), COLUMNS):
            inside = start + k < num_columns
            w = tl.load(w_rows + (start + k)[None, :], mask=is_row[:, None] & inside[None, :], other=0)
            x = tl.load(x_rows + (start + k)[:, None], mask=inside[:, None] & is_token[None, :], other=0.0)
            w = from_e4m3(w).to(x.dtype)
            if GROUPED:
                w_scale = tl.load(w_scale_ptr + start // COLUMNS * all_rows + place, mask=is_row, other=0.0) * 256.0
                acc = tl.fma(tl.dot(w, x, input_precision=PRECISION), w_scale[:, None], acc)
            else:
                acc = tl.dot(w, x, acc, input_precision=PRECISION)
        if not GROUPED:
            acc = acc * (tl.load(w_scale_ptr + place, mask=is_row, other=0.0) * 256.0)[:, None]
        if ONE_SPLIT:
            total = acc
        else:
            total += acc
    store_product(total, y_ptr, bias_ptr, parts_ptr, first, token, row, num_tokens, num_rows)


def matmul_w8a16_triton(
    x: torch.Tensor, weight: ScaledWeight, bias: torch.Tensor | None, to: torch.dtype, routing: Routing | None = None
) -> torch.Tensor:
    """With routing W has the rows of all experts, and x a row for each token or for each pair."""
    x = x if x.stride(1) == 1 else x.contiguous()
    columns, rows = x.shape[1], weight.out_features
    plan = plan_of(x, rows_of(rows, routing), columns, GROUP, to, routing)
    args = (
        x, weight.q.view(carrier(weight.q.dtype)), weight.scale, rows, columns, x.stride(0), plan.splits.columns,
    )  # fmt: skip
    plan.launch(
        _matmul_w8a16_kernel, args, bias=bias,
        stage_bytes=(plan.tile.rows + plan.tile.tokens * x.element_size()) * GROUP,
        unfused=weight.group is None,  # a product with a scale is rounded before it is added, by whichever kernel
        CHOICES=choices_of(x, routing), COLUMNS=GROUP, GROUPED=weight.group is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    return plan.y


def _case(num_tokens: int, rows: int, columns: int, group: int | None = None) -> CompileCase:
    x = on_paper(num_tokens, columns, dtype=torch.bfloat16)
    scale = on_paper(columns // group if group else 1, rows, dtype=torch.float32)
    weight = ScaledWeight(on_paper(rows, columns, dtype=torch.float8_e4m3fn), scale)
    name = f"{num_tokens} x {rows} x {columns}, group {group}"
    return CompileCase(name, lambda: matmul_w8a16(x, weight), BEST_MMA)


COMPILE_CASES = (
    _case(1, 4096, 4096),
    _case(64, 28672, 4096),
    _case(8192, 4096, 14336),
    _case(1, 7168, 2048, 128),
    _case(64, 7168, 2048, 128),
    _case(8192, 7168, 2048, 128),
)
