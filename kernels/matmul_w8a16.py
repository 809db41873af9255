"""Product of a weight of 8-bit floats with activations as they are: y = x W^T + bias, W a `ScaledWeight` of e4m3.

For GPUs that do not multiply 8-bit floats: there quantised activations would cost accuracy and gain nothing. W is
exact in the type of x but for its scale, which is applied in float32; y is rounded once, after the bias. A row of y
depends on that row of x and on W alone.
"""

from __future__ import annotations

import torch

from kernels.dispatch import uses_triton
from kernels.matmul_float import check_product
from kernels.matmul_w8a8 import ScaledWeight


def takes_w8a16(x: torch.Tensor, weight: ScaledWeight) -> bool:
    """Whether x's device is such a GPU, and W of 8-bit floats."""
    if weight.q.dtype is not torch.float8_e4m3fn or not uses_triton(x):
        return False
    from kernels.gpu.launch import target_of  # where there is no GPU, kernels for them are not looked at

    return not target_of(x).multiplies_e4m3


def matmul_w8a16(
    x: torch.Tensor, weight: ScaledWeight, bias: torch.Tensor | None = None, to: torch.dtype | None = None
) -> torch.Tensor:
    """x [M, K] -> [M, N] of the type `to`, x's if None."""
    to = to or x.dtype
    check_product("matmul_w8a16", x, weight.out_features, weight.in_features, bias, to)
    if weight.q.dtype is not torch.float8_e4m3fn:
        raise TypeError(f"matmul_w8a16: W of 8-bit floats expected, got {weight.q.dtype}")
    if uses_triton(x):
        from kernels.gpu.matmul_w8a16 import matmul_w8a16_triton  # where there is no GPU, there need be no Triton

        return matmul_w8a16_triton(x, weight, bias, to)
    return matmul_w8a16_reference(x, weight, bias, to)


def matmul_w8a16_reference(
    x: torch.Tensor, weight: ScaledWeight, bias: torch.Tensor | None, to: torch.dtype
) -> torch.Tensor:
    y = x.float() @ weight.values().t()
    return (y if bias is None else y + bias.float()).to(to)
