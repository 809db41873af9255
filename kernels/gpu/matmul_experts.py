"""Triton: the sum of what experts give (see `kernels.matmul_experts`).

Products with experts are in the files of the weights' formats; what is compiled of them is here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import CompileCase, launch, on_paper
from kernels.gpu.matmul_a16 import on_paper_weight
from kernels.gpu.split_k import BEST_MMA
from kernels.matmul import DeviceWeight
from kernels.matmul_experts import add_experts, matmul_experts
from kernels.matmul_float import FloatWeight
from kernels.matmul_w8a8 import ScaledWeight
from kernels.routing import Routing

_BLOCK = 1024


@triton.jit
def _add_experts_kernel(
    parts_ptr,  # float [M, CHOICES, N]
    weights_ptr,  # float32 [M, CHOICES]
    y_ptr,  # float [M, N]
    num_columns,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y = sum over the choices of weight times part, in their order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < num_columns
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = token * CHOICES + choice
        part = tl.load(parts_ptr + pair * num_columns + column, mask=mask, other=0.0).to(tl.float32)
        total = tl.fma(part, tl.load(weights_ptr + pair), total)
    tl.store(y_ptr + token * num_columns + column, total.to(y_ptr.dtype.element_ty), mask=mask)


def add_experts_triton(parts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    (num_tokens, choices), columns = weights.shape, parts.shape[1]
    y = torch.empty(num_tokens, columns, dtype=parts.dtype, device=parts.device)
    grid = (num_tokens, triton.cdiv(columns, _BLOCK))
    launch(_add_experts_kernel, grid, (parts, weights, y, columns), num_warps=4, CHOICES=choices, BLOCK=_BLOCK)
    return y


def _routing(num_tokens: int, choices: int, num_experts: int, size: int) -> Routing:
    tiles = num_tokens * choices // size + min(num_experts, num_tokens * choices)
    chosen = on_paper(num_tokens, choices, dtype=torch.int64)
    return Routing(chosen, num_experts, on_paper(tiles, size, dtype=torch.int32), on_paper(tiles, dtype=torch.int32))


def _case(name: str, weight: DeviceWeight, num_tokens: int, size: int) -> CompileCase:
    """128 experts, of which a token passes 8."""
    x = on_paper(num_tokens, weight.in_features, dtype=torch.bfloat16)
    routing = _routing(num_tokens, 8, 128, size)
    return CompileCase(f"{num_tokens} tokens, {name}", lambda: matmul_experts(x, weight, routing), BEST_MMA)


_BYTES = ScaledWeight(
    on_paper(128 * 1536, 2048, dtype=torch.float8_e4m3fn), on_paper(16, 128 * 1536, dtype=torch.float32)
)
_FLOATS = FloatWeight(on_paper(128 * 1536, 2048, dtype=torch.bfloat16))
_FOUR_BITS = on_paper_weight(128 * 1536, 2048, 4, 128, None)

COMPILE_CASES = (
    _case("floats", _FLOATS, 1, 16),
    _case("floats", _FLOATS, 4096, 64),
    _case("e4m3 by blocks", _BYTES, 1, 16),
    _case("e4m3 by blocks", _BYTES, 4096, 64),
    _case("4 bits by 128", _FOUR_BITS, 1, 16),
    _case("4 bits by 128", _FOUR_BITS, 4096, 64),
    CompileCase(
        "the sum of 8",
        lambda: add_experts(on_paper(8 * 64, 2048, dtype=torch.bfloat16), on_paper(64, 8, dtype=torch.float32)),
    ),
)
