"""Triton: RMS normalisation with residual and quantisation (see `kernels.rms_norm`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import CompileCase, launch, on_paper
from kernels.gpu.scaled_rows import carrier, empty_scaled, row_warps, store_scaled
from kernels.rms_norm import rms_norm, rms_norm_scaled
from kernels.scaled_rows import LIMITS, SMALLEST, ScaledRows


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # float [M, D], rows x_stride apart
    residual_ptr,  # float [M, D], rows residual_stride apart; changed; or None
    weight_ptr,  # float [D]
    y_ptr,  # float, int8 or uint8 [M, D]
    scale_ptr,  # float32 [M, D / GROUP], or None
    num_columns,
    x_stride,
    residual_stride,
    eps,
    LIMIT: tl.constexpr,  # 0: y is not quantised
    SMALLEST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """residual += x; y = residual / sqrt(mean(residual^2) + eps) * weight, one row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < num_columns
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        places = residual_ptr + row * residual_stride + columns
        total = (tl.load(places, mask=mask, other=0.0).to(tl.float32) + x).to(residual_ptr.dtype.element_ty)
        tl.store(places, total, mask=mask)
        x = total.to(tl.float32)
    mean = tl.sum(x * x, 0) / num_columns
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    y = x * (1.0 / tl.sqrt(mean + eps)) * weight
    if LIMIT == 0:
        tl.store(y_ptr + row * num_columns + columns, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        store_scaled(y, y_ptr, scale_ptr, row, num_columns, LIMIT, SMALLEST, GROUP, BLOCK)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, y, None, eps, 0.0, None)
    return y


def rms_norm_scaled_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    to: torch.dtype,
    group: int | None,
    residual: torch.Tensor | None,
) -> ScaledRows:
    out = empty_scaled(x, to, group)
    _launch(x, residual, weight, out.q.view(carrier(to)), out.scale, eps, LIMITS[to], group)
    return out


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    y: torch.Tensor,
    scale: torch.Tensor | None,
    eps: float,
    limit: float,
    group: int | None,
) -> None:
    columns = x.shape[-1]
    rows = x.reshape(-1, columns)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    if residual is not None:
        residual = residual.view(-1, columns)  # written to, so it must not become a copy
        if residual.stride(1) != 1:
            raise ValueError("rms_norm: a residual's rows must be contiguous")
    block = triton.next_power_of_2(columns)
    args = (
        rows, residual, weight, y, scale, columns, rows.stride(0), 0 if residual is None else residual.stride(0), eps,
    )  # fmt: skip
    launch(
        _rms_norm_kernel, (rows.shape[0],), args, num_warps=row_warps(block), LIMIT=limit, SMALLEST=SMALLEST,
        GROUP=group or block, BLOCK=block,
    )  # fmt: skip


def _case(columns: int, dtype: torch.dtype, residual: bool) -> CompileCase:
    x, weight = on_paper(512, columns, dtype=dtype), on_paper(columns, dtype=dtype)
    added = torch.empty_like(x) if residual else None
    return CompileCase(f"{columns} {dtype}{', residual' if residual else ''}", lambda: rms_norm(x, weight, 1e-5, added))


def _scaled_case(columns: int, to: torch.dtype, group: int | None = None) -> CompileCase:
    x, weight = on_paper(512, columns, dtype=torch.bfloat16), on_paper(columns, dtype=torch.bfloat16)
    return CompileCase(
        f"{columns} {x.dtype} to {to}, group {group}", lambda: rms_norm_scaled(x, weight, 1e-5, to, group, x.clone())
    )


COMPILE_CASES = (
    _case(4096, torch.bfloat16, residual=True),
    _case(128, torch.bfloat16, residual=False),  # queries and keys, head by head
    _case(8192, torch.float16, residual=True),
    _scaled_case(4096, torch.float8_e4m3fn),
    _scaled_case(7168, torch.float8_e4m3fn, 128),
    _scaled_case(4096, torch.int8),
)
