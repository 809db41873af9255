"""Triton: product with a weight of floats (see `kernels.matmul_float`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import CompileCase, launch, on_paper, target_of
from kernels.gpu.split_k import (
    BEST_MMA,
    add_splits,
    empty_parts,
    program_tile,
    splits_of,
    stages_of,
    store_product,
    tile_of,
)
from kernels.matmul_float import FloatWeight, matmul_float

COLUMNS = 64  # a step


@triton.jit
def _matmul_float_kernel(
    x_ptr,  # float [M, K], rows x_stride apart
    w_ptr,  # float [N, K]
    bias_ptr,  # float [N], or None
    y_ptr,  # float [M, N]
    parts_ptr,  # float32 [splits, M, N], or None: then y is written
    num_tokens,
    num_rows,
    num_columns,
    x_stride,
    split_columns,
    num_splits,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y = x W^T + bias: ROWS rows of W with TOKENS rows of x, over one split of the columns or all, one by one."""
    tile_token, tile_row = program_tile(num_tokens, num_rows, TOKENS, ROWS)
    token, row = tile_token * TOKENS + tl.arange(0, TOKENS), tile_row * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    w_rows = w_ptr + row.to(tl.int64)[:, None] * num_columns
    x_rows = x_ptr + token.to(tl.int64)[None, :] * x_stride
    first = tl.program_id(1)
    last = num_splits
    if parts_ptr is not None:
        last = first + 1
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
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, to: torch.dtype
) -> torch.Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight.contiguous()
    (num_tokens, columns), rows = x.shape, weight.shape[0]
    y = torch.empty(num_tokens, rows, dtype=to, device=x.device)
    splits, tile = splits_of(rows, columns, COLUMNS), tile_of(num_tokens)
    num_programs = triton.cdiv(num_tokens, tile.tokens) * triton.cdiv(rows, tile.rows)
    parts = empty_parts(splits, num_programs, y)
    args = (x, weight, bias, y, parts, num_tokens, rows, columns, x.stride(0), splits.columns, splits.count)
    stage_bytes = (tile.rows + tile.tokens) * COLUMNS * x.element_size()
    launch(
        _matmul_float_kernel, (num_programs, 1 if parts is None else splits.count), args, one_mma=True,
        num_warps=tile.num_warps, num_stages=stages_of(target_of(x), stage_bytes), ROWS=tile.rows, TOKENS=tile.tokens,
        COLUMNS=COLUMNS,
        ONE_SPLIT=splits.count == 1 or parts is not None, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    if parts is not None:
        add_splits(parts, bias, y)
    return y


def _case(num_tokens: int, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> CompileCase:
    x, weight = on_paper(num_tokens, columns, dtype=dtype), FloatWeight(on_paper(rows, columns, dtype=dtype))
    return CompileCase(f"{num_tokens} x {rows} x {columns} {dtype}", lambda: matmul_float(x, weight), BEST_MMA)


COMPILE_CASES = (
    _case(1, 4096, 4096),
    _case(32, 28672, 4096),
    _case(64, 4096, 14336),
    _case(512, 28672, 4096),
    _case(8192, 4096, 14336),
    _case(1, 576, 1536, torch.float16),
)
