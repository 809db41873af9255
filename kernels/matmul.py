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
from kernels.matmul_w8a8 import ScaledWeight, join_scaled, matmul_w8a8
from kernels.matmul_w8a16 import matmul_w8a16, takes_w8a16
from kernels.packed_weight import Codes
from kernels.planar_weight import GroupedCodes, PlanarWeight, fits, grouped, join_planes, pack_planes, unpack_planes
from kernels.scaled_rows import ScaledRows

DeviceWeight = FloatWeight | PlanarWeight | ScaledWeight


def prepare(
    weight: torch.Tensor | Codes | GroupedCodes | ScaledWeight, dtype: torch.dtype, device: torch.device | str
) -> DeviceWeight:
    """weight [N, K], laid out for products with rows of this type.

    Floats take the type. Codes keep their bits, unless their groups are too small for that. With a ScaledWeight
    activations are quantised like the weight, unless `takes_w8a16` says no.
    """
    if isinstance(weight, torch.Tensor):
        if weight.dim() != 2:
            raise ValueError(f"prepare: a matrix expected, got {tuple(weight.shape)}")
        return FloatWeight(weight.to(device, dtype).contiguous())
    moved = _moved(weight, device)
    if isinstance(moved, ScaledWeight):
        return moved
    codes = grouped(moved) if isinstance(moved, Codes) else moved
    return pack_planes(codes) if fits(codes) else FloatWeight(codes.values().to(dtype))


def join(weights: Sequence[DeviceWeight]) -> DeviceWeight:
    """One weight with the rows of all, one after the other, for products with the same x. ValueError unless their
    formats and columns are equal."""
    first = weights[0]
    if any(type(w) is not type(first) for w in weights):
        raise ValueError("join: weights of floats and of codes")
    if isinstance(first, FloatWeight):
        return join_floats([w for w in weights if isinstance(w, FloatWeight)])
    if isinstance(first, ScaledWeight):
        return join_scaled([w for w in weights if isinstance(w, ScaledWeight)])
    return join_planes([w for w in weights if isinstance(w, PlanarWeight)])


def stack(experts: Sequence[DeviceWeight]) -> DeviceWeight:
    """As `join`, the weights of all experts for `matmul_experts`: each may have an order of columns of its own."""
    planar = [w for w in experts if isinstance(w, PlanarWeight)]
    if len(planar) < len(experts) or all(w.order is None for w in planar):
        return join(experts)
    columns = torch.arange(planar[0].in_features, device=planar[0].words.device)
    orders = torch.stack([columns if w.order is None else w.order for w in planar])
    return dataclasses.replace(join_planes([dataclasses.replace(w, order=None) for w in planar]), order=orders)


def values_of(weight: DeviceWeight) -> torch.Tensor:
    """[N, K], float32 unless it is a weight of floats."""
    if isinstance(weight, FloatWeight):
        return weight.tensor
    return weight.values() if isinstance(weight, ScaledWeight) else unpack_planes(weight)


def same_weight(a: DeviceWeight, b: DeviceWeight) -> bool:
    """Whether they are one, or the same numbers in the same format."""
    fields = [f.name for f in dataclasses.fields(a)]
    return a is b or (type(a) is type(b) and all(_same(getattr(a, name), getattr(b, name)) for name in fields))


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and bool(a == b)
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def matmul(
    x: torch.Tensor | ScaledRows, weight: DeviceWeight, bias: torch.Tensor | None = None,
    to: torch.dtype | None = None, fast: bool = False,
) -> torch.Tensor:  # fmt: skip
    """x [M, K], rows perhaps apart in memory -> [M, N] of the type `to`, x's if None; bias [N].

    Rows that are quantised already go with a ScaledWeight of their format, and `to` is then to be given. A row's
    result does not depend on the other rows, nor on how many they are; with `fast` it may, and a bias is rounded.
    """
    if isinstance(weight, ScaledWeight):
        if isinstance(x, torch.Tensor) and takes_w8a16(x, weight):
            return matmul_w8a16(x, weight, bias, to)
        return matmul_w8a8(x, weight, bias, to, fast)
    if isinstance(x, ScaledRows):
        raise TypeError("matmul: rows of eight bits with a weight of another format")
    if isinstance(weight, FloatWeight):
        return matmul_float(x, weight, bias, to, fast)
    return matmul_a16(x, weight, bias, to, fast)


def _moved(
    codes: Codes | GroupedCodes | ScaledWeight, device: torch.device | str
) -> Codes | GroupedCodes | ScaledWeight:
    """The codes, their tensors on the device."""
    tensors = {f.name: getattr(codes, f.name) for f in dataclasses.fields(codes)}
    moved: dict[str, Any] = {name: t.to(device) for name, t in tensors.items() if isinstance(t, torch.Tensor)}
    return dataclasses.replace(codes, **moved)
