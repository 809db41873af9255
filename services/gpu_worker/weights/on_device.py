"""Weights on a GPU: matrices as products take them, vectors in float32. Copied tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.matmul import DeviceWeight, matmul, prepare


@dataclass(frozen=True, slots=True)
class DeviceLinear:
    weight: DeviceWeight
    bias: torch.Tensor | None
    to: torch.dtype | None = None  # of y; x's if None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return matmul(x, self.weight, self.bias, self.to)


class OnDevice:
    """A `loader.Placement`, for products with rows of this type."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 1:
            return tensor.to(self._device)
        return tensor.to(self._dtype).to(self._device)  # converted first: then no more is copied than is kept

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> DeviceLinear:
        return DeviceLinear(self._weight(weight), None if bias is None else bias.to(self._device))

    def head(self, weight: torch.Tensor) -> DeviceLinear:
        """Logits are float32, not rounded to the type of rows."""
        return DeviceLinear(self._weight(weight), None, torch.float32)

    def _weight(self, weight: torch.Tensor) -> DeviceWeight:
        return prepare(weight.to(self._dtype), self._dtype, self._device)
