"""Rows of a weight by number, for GPUs: an embedding in whatever format its file has it, see `matmul`.

A row is what `values_of` says of it, rounded once; it depends on nothing but its number.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.matmul import DeviceWeight, values_of
from kernels.matmul_float import FloatWeight
from kernels.matmul_w8a8 import ScaledWeight


def embedding_rows(weight: DeviceWeight, numbers: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """weight [N, K], numbers int64 [M] below N -> [M, K]."""
    if numbers.dim() != 1 or numbers.dtype != torch.int64:
        raise ValueError(f"embedding_rows: numbers {numbers.dtype} {tuple(numbers.shape)}")
    return values_of(_rows(weight, numbers)).to(to)


def _rows(weight: DeviceWeight, numbers: torch.Tensor) -> DeviceWeight:
    if isinstance(weight, FloatWeight):
        return FloatWeight(weight.tensor.index_select(0, numbers))
    if isinstance(weight, ScaledWeight):
        q = weight.q.view(torch.uint8).index_select(0, numbers).view(weight.q.dtype)
        return ScaledWeight(q, weight.scale.index_select(1, numbers))
    return replace(
        weight, out_features=len(numbers), low=weight.low.index_select(1, numbers),
        high=None if weight.high is None else weight.high.index_select(1, numbers),
        words=weight.words.index_select(1, numbers),
    )  # fmt: skip
