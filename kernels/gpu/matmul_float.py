"""Triton: product with a weight of floats (see `kernels.matmul_float`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import CompileCase, on_paper, target_of
from kernels.gpu.split_k import BEST_MMA, VARYING, plan_of, program_tile, store_product
from kernels.matmul_float import FloatWeight, matmul_float
from kernels.routing import Routing, choices_of, rows_of

COLUMNS = 64  # a step, at most


@triton.jit(do_not_specialize=VARYING)
def _matmul_float_kernel(
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
    w_ptr,  # float [N, K], or one of each expert
    num_columns,
    x_stride,
    split_columns,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    CHOICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y = x W^T + bias: ROWS rows of W with TOKENS rows of x, over one split of the columns or all, one by one."""
    token, source, row, place, works = program_tile(
        slots_ptr, experts_ptr, num_tiles, num_tokens, num_rows, ROWS, TOKENS, CHOICES
    )
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
            column = start + k
            inside = column < num_columns
            w = tl.load(w_rows + column[None, :], mask=(row < num_rows)[:, None] & inside[None, :], other=0.0)
            x = tl.load(x_rows + column[:, None], mask=inside[:, None] & (token < num_tokens)[None, :], other=0.0)
            acc = tl.dot(w, x, acc, input_precision=PRECISION)
        if ONE_SPLIT:
            total = acc
        else:
            total += acc
    store_product(total, y_ptr, bias_ptr, parts_ptr, first, token, row, num_tokens, num_rows)


def matmul_float_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, to: torch.dtype, routing: Routing | None = None
) -> torch.Tensor:
    """With routing W has the rows of all experts, and x a row for each token or for each pair."""
    x = x if x.stride(1) == 1 else x.contiguous()
    weight, columns = weight.contiguous(), x.shape[1]
    plan = plan_of(x, rows_of(weight.shape[0], routing), columns, COLUMNS, to, routing, most=128)
    step = _step(x)
    plan.launch(
        _matmul_float_kernel, (x, weight, columns, x.stride(0), plan.splits.columns), bias=bias,
        stage_bytes=(plan.tile.rows + plan.tile.tokens) * step * x.element_size(), CHOICES=choices_of(x, routing),
        COLUMNS=step, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    return plan.y


def _step(x: torch.Tensor) -> int:
    """Columns, as many as registers allow (found by compiling)."""
    if x.dtype == torch.float32:
        return COLUMNS // 4
    return COLUMNS // 2 if target_of(x).multiplies_by_warp else COLUMNS


def _case(num_tokens: int, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> CompileCase:
    x, weight = on_paper(num_tokens, columns, dtype=dtype), FloatWeight(on_paper(rows, columns, dtype=dtype))
    return CompileCase(
        f"{num_tokens} x {rows} x {columns} {dtype}",
        lambda: matmul_float(x, weight),
        BEST_MMA if dtype.itemsize == 2 else {},
    )


COMPILE_CASES = (
    _case(1, 4096, 4096),
    _case(32, 28672, 4096),
    _case(64, 4096, 14336),
    _case(512, 28672, 4096),
    _case(8192, 4096, 14336),
    _case(1, 576, 1536, torch.float16),
    _case(1, 4096, 4096, torch.float32),
    _case(8192, 4096, 14336, torch.float32),
)
