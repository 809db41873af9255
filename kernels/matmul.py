"""Products with the weights of a model on a GPU, in whatever format each is: y = x W^T + bias.

A weight is prepared once, when it is loaded; its format decides which op computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from kernels.matmul_a16 import matmul_a16
from kernels.matmul_float import FloatWeight, join_floats, matmul_float
from kernels.packed_weight import Codes
from kernels.planar_weight import GroupedCodes, PlanarWeight, fits, grouped, join_planes, pack_planes

DeviceWeight = FloatWeight | PlanarWeight


def prepare(
    weight: torch.Tensor | Codes | GroupedCodes, dtype: torch.dtype, device: torch.device | str
) -> DeviceWeight:
    """weight [N, K], laid out for products with rows of this type. Floats take the type; codes stay as many bits as
    they are, unless their groups are too small for that."""
    if isinstance(weight, torch.Tensor):
        if weight.dim() != 2:
            raise ValueError(f"prepare: a matrix expected, got {tuple(weight.shape)}")
        return FloatWeight(weight.to(device, dtype).contiguous())
    moved = _moved(weight, device)
    codes = grouped(moved) if isinstance(moved, Codes) else moved
    return pack_planes(codes) if fits(codes) else FloatWeight(codes.values().to(dtype))


def join(weights: Sequence[DeviceWeight]) -> DeviceWeight:
    """One weight with the rows of all, one after the other, for products with the same x. ValueError unless their
    formats and columns are equal."""
    floats = [w for w in weights if isinstance(w, FloatWeight)]
    planes = [w for w in weights if isinstance(w, PlanarWeight)]
    if floats and planes:
        raise ValueError("join: weights of floats and of codes")
    return join_floats(floats) if floats else join_planes(planes)


def matmul(
    x: torch.Tensor, weight: DeviceWeight, bias: torch.Tensor | None = None, to: torch.dtype | None = None,
    fast: bool = False,
) -> torch.Tensor:  # fmt: skip
    """x [M, K], rows perhaps apart in memory -> [M, N] of the type `to`, x's if None; bias [N].

    A row's result does not depend on the other rows, nor on how many they are; with `fast` it may.
    """
    if isinstance(weight, FloatWeight):
        return matmul_float(x, weight, bias, to, fast)
    return matmul_a16(x, weight, bias, to, fast)


def _moved(codes: Codes | GroupedCodes, device: torch.device | str) -> Codes | GroupedCodes:
    """The codes, their tensors on the device."""
    tensors = {f.name: getattr(codes, f.name) for f in dataclasses.fields(codes)}
    moved: dict[str, Any] = {name: t.to(device) for name, t in tensors.items() if isinstance(t, torch.Tensor)}
    return dataclasses.replace(codes, **moved)
