"""Triton: quantise rows to eight bits (see `kernels.scaled_rows`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import CompileCase, launch, on_paper
from kernels.gpu.numbers import scaled
from kernels.scaled_rows import LIMITS, SMALLEST, ScaledRows, scale_rows


@triton.jit
def _scale_rows_kernel(
    x_ptr,  # float [M, K], rows x_stride apart
    q_ptr,  # int8 or uint8 [M, K]
    scale_ptr,  # float32 [M, K / GROUP]
    num_columns,
    x_stride,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """q, scale = scaled(x), one row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < num_columns
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    store_scaled(x, q_ptr, scale_ptr, row, num_columns, LIMIT, SMALLEST, GROUP, BLOCK)


@triton.jit
def store_scaled(
    x,  # float32 [BLOCK], 0 beyond num_columns
    q_ptr,
    scale_ptr,
    row,
    num_columns,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantise one row and store it. GROUP columns share a scale; BLOCK for all."""
    code, scale = scaled(tl.reshape(x, [BLOCK // GROUP, GROUP]), LIMIT, SMALLEST)
    columns = tl.arange(0, BLOCK)
    tl.store(q_ptr + row * num_columns + columns, tl.reshape(code, [BLOCK]), mask=columns < num_columns)
    groups = tl.arange(0, BLOCK // GROUP)
    num_groups = tl.cdiv(num_columns, GROUP)
    tl.store(scale_ptr + row * num_groups + groups, scale, mask=groups < num_groups)


def scale_rows_triton(x: torch.Tensor, to: torch.dtype, group: int | None) -> ScaledRows:
    num_rows, columns = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = empty_scaled(x, to, group)
    block = triton.next_power_of_2(columns)
    args = (x, out.q.view(carrier(to)), out.scale, columns, x.stride(0))
    launch(
        _scale_rows_kernel, (num_rows,), args, num_warps=row_warps(block), LIMIT=LIMITS[to], SMALLEST=SMALLEST,
        GROUP=group or block, BLOCK=block,
    )  # fmt: skip
    return out


def empty_scaled(x: torch.Tensor, to: torch.dtype, group: int | None) -> ScaledRows:
    """Room for the rows of x [M, K], quantised."""
    num_rows, columns = x.shape
    q = torch.empty(num_rows, columns, dtype=carrier(to), device=x.device).view(to)
    return ScaledRows(q, torch.empty(num_rows, columns // (group or columns), dtype=torch.float32, device=x.device))


def carrier(to: torch.dtype) -> torch.dtype:
    """The type as which kernels store it: 8-bit floats are no type of every GPU's."""
    return torch.uint8 if to is torch.float8_e4m3fn else to


def row_warps(block: int) -> int:
    """Warps for a program that holds a row of so many columns in registers."""
    return min(16, max(1, block // 512))


def _case(columns: int, dtype: torch.dtype, to: torch.dtype, group: int | None = None) -> CompileCase:
    x = on_paper(512, columns, dtype=dtype)
    return CompileCase(f"{columns} {dtype} to {to}, group {group}", lambda: scale_rows(x, to, group))


COMPILE_CASES = (
    _case(4096, torch.bfloat16, torch.float8_e4m3fn),
    _case(7168, torch.bfloat16, torch.float8_e4m3fn, 128),
    _case(14336, torch.bfloat16, torch.int8),
    _case(576, torch.float16, torch.int8),
)
