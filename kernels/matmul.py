"""Products with the weights of a model on a GPU, in whatever format each is: y = x W^T + bias.

A weight is prepared once, when it is loaded; its format decides which op computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.matmul_float import FloatWeight, matmul_float

DeviceWeight = FloatWeight


def prepare(weight: torch.Tensor, dtype: torch.dtype, device: torch.device | str) -> DeviceWeight:
    """weight [N, K], laid out for products with rows of this type. A tensor takes the type itself."""
    if weight.dim() != 2:
        raise ValueError(f"prepare: a matrix expected, got {tuple(weight.shape)}")
    return FloatWeight(weight.to(device, dtype).contiguous())


def join(weights: Sequence[DeviceWeight]) -> DeviceWeight:
    """One weight with the rows of all, one after the other, for products with the same x. ValueError unless their
    formats and columns are equal."""
    if len({(type(w), w.in_features, w.tensor.dtype) for w in weights}) != 1:
        raise ValueError("join: weights of different formats or widths")
    return FloatWeight(torch.cat([w.tensor for w in weights]))


def matmul(
    x: torch.Tensor, weight: DeviceWeight, bias: torch.Tensor | None = None, to: torch.dtype | None = None,
    fast: bool = False,
) -> torch.Tensor:  # fmt: skip
    """x [M, K], rows perhaps apart in memory -> [M, N] of the type `to`, x's if None; bias [N].

    A row's result does not depend on the other rows, nor on how many they are; with `fast` it may.
    """
    return matmul_float(x, weight, bias, to, fast)
