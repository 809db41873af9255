"""Triton: rotary embedding in place, from tables (see `kernels.rope`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import CompileCase, launch, on_paper
from kernels.rope import rope_at


@triton.jit
def _rope_kernel(
    x_ptr,  # float [N, H, D], changed
    positions_ptr,  # int32 [N]
    cos_ptr,  # float32 [P, R / 2]
    sin_ptr,
    num_heads,
    half,  # R / 2
    row_stride,
    head_stride,
    STEP: tl.constexpr,  # from a pair's number to its first column: 1, or 2 where pairs are interleaved
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """a, b = a cos - b sin, b cos + a sin; a program turns HEADS heads of one token."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row).to(tl.int64)
    pairs = tl.arange(0, HALF)
    inside = pairs < half
    cos = tl.load(cos_ptr + position * half + pairs, mask=inside, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position * half + pairs, mask=inside, other=0.0)[None, :]
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mask = (heads < num_heads)[:, None] & inside[None, :]
    first = x_ptr + row * row_stride + heads[:, None].to(tl.int64) * head_stride + pairs[None, :] * STEP
    if STEP == 1:
        second = first + half
    else:
        second = first + 1
    a = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(second, mask=mask, other=0.0).to(tl.float32)
    tl.store(first, (a * cos - b * sin).to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(second, (b * cos + a * sin).to(x_ptr.dtype.element_ty), mask=mask)


def rope_at_triton(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> None:
    num_rows, num_heads, _ = x.shape
    if x.stride(2) != 1:
        raise ValueError("rope_at: a head's columns must lie side by side")
    heads = min(16, triton.next_power_of_2(num_heads))
    args = (x, positions, cos.contiguous(), sin.contiguous(), num_heads, cos.shape[1], x.stride(0), x.stride(1))
    launch(
        _rope_kernel, (num_rows, triton.cdiv(num_heads, heads)), args, num_warps=4, STEP=2 if interleaved else 1,
        HEADS=heads, HALF=triton.next_power_of_2(cos.shape[1]),
    )  # fmt: skip


def _case(heads: int, dim: int, rotary: int, interleaved: bool, dtype: torch.dtype = torch.bfloat16) -> CompileCase:
    x = on_paper(64, heads + 8, dim, dtype=dtype)[:, :heads]  # queries and keys, of rows that hold values too
    tables = [on_paper(8192, rotary // 2, dtype=torch.float32) for _ in range(2)]
    positions = on_paper(64, dtype=torch.int32)
    name = f"{heads} heads, {rotary} of {dim} {dtype}{', interleaved' if interleaved else ''}"
    return CompileCase(name, lambda: rope_at(x, positions, tables[0], tables[1], interleaved))


COMPILE_CASES = (
    _case(40, 128, 128, False),
    _case(40, 128, 64, False),
    _case(1, 64, 64, True),
    _case(12, 64, 64, False, torch.float16),
)
