"""Product with a weight in float16, bfloat16 or float32, as it lies: y = x W^T + bias.

Products are added in float32 and rounded once, after the bias. A row of y depends on that row of x and on W alone,
unless `fast` is given: then the vendor's library multiplies many rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.dispatch import uses_triton

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LIBRARY_ROWS = 64  # of x, from which on a library is given the product, where it may be: few read W at most once


@dataclass(frozen=True, slots=True)
class FloatWeight:
    """W [out_features, in_features]."""

    tensor: torch.Tensor

    @property
    def out_features(self) -> int:
        return self.tensor.shape[0]

    @property
    def in_features(self) -> int:
        return self.tensor.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def matmul_float(
    x: torch.Tensor, weight: FloatWeight, bias: torch.Tensor | None = None, to: torch.dtype | None = None,
    fast: bool = False,
) -> torch.Tensor:  # fmt: skip
    """x [M, K] of the weight's type -> [M, N] of the type `to`, x's if None."""
    if x.dtype != weight.tensor.dtype:
        raise TypeError(f"matmul_float: x is {x.dtype}, W is {weight.tensor.dtype}")
    to = to or x.dtype
    check_product("matmul_float", x, weight.out_features, weight.in_features, bias, to)
    if fast and x.shape[0] >= LIBRARY_ROWS and to == x.dtype:
        return F.linear(x, weight.tensor, None if bias is None else bias.to(to))
    if uses_triton(x):
        from kernels.gpu.matmul_float import matmul_float_triton  # where there is no GPU, there need be no Triton

        return matmul_float_triton(x, weight.tensor, bias, to)
    return matmul_float_reference(x, weight, bias, to)


def matmul_float_reference(
    x: torch.Tensor, weight: FloatWeight, bias: torch.Tensor | None = None, to: torch.dtype | None = None
) -> torch.Tensor:
    y = x.float() @ weight.tensor.float().t()
    return (y if bias is None else y + bias.float()).to(to or x.dtype)


def join_floats(weights: Sequence[FloatWeight]) -> FloatWeight:
    """The rows of all, one after the other. ValueError unless types and columns are equal."""
    if len({(w.in_features, w.tensor.dtype) for w in weights}) != 1:
        raise ValueError("join: weights of different types or widths")
    return FloatWeight(torch.cat([w.tensor for w in weights]))


def check_product(
    op: str, x: torch.Tensor, rows: int, columns: int, bias: torch.Tensor | None, to: torch.dtype
) -> None:
    """ValueError or TypeError unless x [M, columns] can be multiplied with W [rows, columns]."""
    if x.dim() != 2 or x.shape[1] != columns:
        raise ValueError(f"{op}: x {tuple(x.shape)} with W [{rows}, {columns}]")
    if bias is not None and bias.shape != (rows,):
        raise ValueError(f"{op}: bias {tuple(bias.shape)} with W [{rows}, {columns}]")
    for dtype in (x.dtype, to) if bias is None else (x.dtype, to, bias.dtype):
        if dtype not in FLOATS:
            raise TypeError(f"{op}: float32, float16 or bfloat16 expected, got {dtype}")
