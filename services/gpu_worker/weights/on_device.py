"""Weights on a GPU: matrices as products take them, vectors in float32. Copied matrix by matrix, codes as codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.embedding import embedding_rows
from kernels.matmul import DeviceWeight, join, matmul, prepare, same_weight, stack, values_of
from kernels.matmul_experts import matmul_experts
from kernels.matmul_float import FloatWeight
from kernels.routing import Routing
from services.gpu_worker.model.layers import JoinedExperts
from services.gpu_worker.weights.placement import Rows


@dataclass(frozen=True, slots=True)
class DeviceLinear:
    """Weights of one format, or of several with their rows one after the other."""

    parts: tuple[DeviceWeight, ...]
    bias: torch.Tensor | None = None
    to: torch.dtype | None = None  # of y; x's if None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.parts) == 1:
            return matmul(x, self.parts[0], self.bias, self.to)
        y = torch.cat([matmul(x, part, None, torch.float32) for part in self.parts], 1)
        return (y if self.bias is None else y + self.bias).to(self.to or x.dtype)


@dataclass(frozen=True, slots=True)
class DeviceTable:
    weight: DeviceWeight
    to: torch.dtype

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return embedding_rows(self.weight, ids, self.to)


@dataclass(frozen=True, slots=True)
class DeviceEnds:
    embedding: DeviceTable
    head: DeviceLinear
    differ: bool


@dataclass(frozen=True, slots=True)
class DeviceExperts:
    """Weights of all experts, each of one format; of several, an expert's rows follow as in `DeviceLinear`."""

    parts: tuple[DeviceWeight, ...]

    def __call__(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        if len(self.parts) == 1:
            return matmul_experts(x, self.parts[0], routing)
        return torch.cat([matmul_experts(x, part, routing) for part in self.parts], 1)


class OnDevice:
    """A `Placement`, for products with rows of this type."""

    turns_pairs = True

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 1:
            return tensor.to(self._device)
        return tensor.to(self._dtype).to(self._device)  # converted first: then no more is copied than is kept

    def projection(self, rows: Rows, bias: torch.Tensor | None) -> DeviceLinear:
        return DeviceLinear(self._parts(rows), None if bias is None else bias.to(self._device))

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> DeviceLinear:
        return DeviceLinear((self._weight(weight),), None if bias is None else bias.to(self._device))

    def by_head(self, weights: torch.Tensor) -> DeviceExperts:
        """Heads are experts, of which every token passes all."""
        return DeviceExperts((self._weight(weights.flatten(0, 1)),))

    def scores(self, weight: torch.Tensor) -> DeviceLinear:
        """float32, not rounded to the type of rows."""
        return DeviceLinear((self._weight(weight),), to=torch.float32)

    def ends(self, embedding: Rows, head: Rows | None) -> DeviceEnds:
        (table,) = self._parts(embedding)
        (weight,) = (table,) if head is None else self._parts(head)
        return DeviceEnds(
            DeviceTable(table, self._dtype), DeviceLinear((weight,), to=torch.float32), not same_weight(weight, table)
        )

    def experts(self, into: Sequence[Rows], down: Sequence[Rows]) -> JoinedExperts:
        return JoinedExperts(self._stacked(into), self._stacked(down))

    def _stacked(self, experts: Sequence[Rows]) -> DeviceExperts:
        """Where their formats differ, all become floats."""
        each = [self._parts(rows) for rows in experts]
        try:
            return DeviceExperts(tuple(stack(parts) for parts in zip(*each, strict=True)))
        except ValueError:
            rows = [values_of(part).to(self._dtype) for parts in each for part in parts]
            return DeviceExperts((FloatWeight(torch.cat(rows)),))

    def _parts(self, rows: Rows) -> tuple[DeviceWeight, ...]:
        return _joined([prepare(part, self._dtype, self._device) for part in rows.stored()])

    def _weight(self, weight: torch.Tensor) -> DeviceWeight:
        return prepare(weight.to(self._dtype), self._dtype, self._device)


def _joined(parts: Sequence[DeviceWeight]) -> tuple[DeviceWeight, ...]:
    """Neighbours of one format as one."""
    joined = [parts[0]]
    for part in parts[1:]:
        try:
            joined[-1] = join([joined[-1], part])
        except ValueError:
            joined.append(part)
    return tuple(joined)
