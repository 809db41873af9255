"""Product of quantised weights with activations as they are: y = x W^T + bias, W of 2 to 8 bits (see `planar_weight`).

W is rounded to the type of x, element by element; products are added in float32 and rounded once, after the bias. A
row of y depends on that row of x and on W alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.dispatch import uses_triton
from kernels.matmul_float import check_product
from kernels.planar_weight import PlanarWeight, unpack_planes

# Rows of x from which on it is worth while to write the weight out, if rows need not be independent.
MANY_ROWS = 1024


def matmul_a16(
    x: torch.Tensor, weight: PlanarWeight, bias: torch.Tensor | None = None, to: torch.dtype | None = None,
    fast: bool = False,
) -> torch.Tensor:  # fmt: skip
    """x [M, K] -> [M, N] of the type `to`, x's if None."""
    to = to or x.dtype
    check_product("matmul_a16", x, weight.out_features, weight.in_features, bias, to)
    if not uses_triton(x):
        return matmul_a16_reference(x, weight, bias, to)
    from kernels.gpu.matmul_a16 import matmul_a16_triton, write_out  # where there is no GPU, there need be no Triton

    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if fast and x.shape[0] >= MANY_ROWS and to == x.dtype:
        return F.linear(x, write_out(weight, x.dtype), None if bias is None else bias.to(to))
    return matmul_a16_triton(x, weight, bias, to)


def matmul_a16_reference(
    x: torch.Tensor, weight: PlanarWeight, bias: torch.Tensor | None = None, to: torch.dtype | None = None
) -> torch.Tensor:
    y = x.float() @ unpack_planes(weight).to(x.dtype).float().t()
    return (y if bias is None else y + bias.float()).to(to or x.dtype)
