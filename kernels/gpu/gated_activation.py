"""Triton: gate, activation and quantisation of the feed-forward part (see `kernels.gated_activation`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gated_activation import GELU_CUBIC, GELU_SCALE, gated_activation, gated_activation_scaled
from kernels.gpu.launch import CompileCase, launch, on_paper
from kernels.gpu.scaled_rows import carrier, empty_scaled, row_warps, store_scaled
from kernels.scaled_rows import LIMITS, SMALLEST, ScaledRows

COLUMNS = 1024  # a program, where a row's values need not be known together


@triton.jit
def _gated_kernel(
    gate_up_ptr,  # float [M, 2 F], rows stride apart
    y_ptr,  # float, int8 or uint8 [M, F]
    scale_ptr,  # float32 [M, F / GROUP], or None
    num_columns,  # F
    stride,
    ACTIVATION: tl.constexpr,
    GELU_SCALE: tl.constexpr,
    GELU_CUBIC: tl.constexpr,
    LIMIT: tl.constexpr,  # 0: y is not quantised
    SMALLEST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y = f(gate) * up; a program has BLOCK columns of one row, all of them where y is quantised."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    places = gate_up_ptr + row * stride + columns
    gate = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(places + num_columns, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu":
        y = gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * 0.5 * up
    else:
        exponent = gate
        if ACTIVATION == "gelu_tanh":
            exponent = 2.0 * GELU_SCALE * (gate + GELU_CUBIC * gate * gate * gate)
        y = gate / (1.0 + tl.exp(-exponent)) * up
    if LIMIT == 0:
        tl.store(y_ptr + row * num_columns + columns, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        store_scaled(y, y_ptr, scale_ptr, row, num_columns, LIMIT, SMALLEST, GROUP, BLOCK)


def gated_activation_triton(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    num_rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(num_rows, columns, dtype=gate_up.dtype, device=gate_up.device)
    _launch(gate_up, y, None, activation, 0.0, None, min(COLUMNS, triton.next_power_of_2(columns)))
    return y


def gated_activation_scaled_triton(
    gate_up: torch.Tensor, activation: str, to: torch.dtype, group: int | None
) -> ScaledRows:
    columns = gate_up.shape[1] // 2
    out = empty_scaled(gate_up[:, :columns], to, group)
    block = triton.next_power_of_2(columns)
    _launch(gate_up, out.q.view(carrier(to)), out.scale, activation, LIMITS[to], group, block)
    return out


def _launch(
    gate_up: torch.Tensor, y: torch.Tensor, scale: torch.Tensor | None, activation: str, limit: float,
    group: int | None, block: int,
) -> None:  # fmt: skip
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    num_rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    launch(
        _gated_kernel, (num_rows, triton.cdiv(columns, block)), (gate_up, y, scale, columns, gate_up.stride(0)),
        num_warps=row_warps(block), ACTIVATION=activation, GELU_SCALE=GELU_SCALE, GELU_CUBIC=GELU_CUBIC, LIMIT=limit,
        SMALLEST=SMALLEST, GROUP=group or block, BLOCK=block,
    )  # fmt: skip


def _case(
    columns: int,
    activation: str,
    to: torch.dtype | None = None,
    group: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> CompileCase:
    x = on_paper(512, 2 * columns, dtype=dtype)
    name = f"{columns} {dtype} {activation} to {to}, group {group}"
    if to is None:
        return CompileCase(name, lambda: gated_activation(x, activation))
    return CompileCase(name, lambda: gated_activation_scaled(x, activation, to, group))


COMPILE_CASES = (
    _case(14336, "silu"),
    _case(1536, "silu", dtype=torch.float16),
    _case(14336, "gelu_tanh"),
    _case(14336, "gelu"),
    _case(14336, "silu", torch.float8_e4m3fn),
    _case(2048, "silu", torch.float8_e4m3fn, 128),
    _case(14336, "silu", torch.int8),
)
