"""Weights on a GPU whose products of many rows are a library's: a row may then depend on how many there are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.matmul import matmul
from services.gpu_worker.weights.on_device import DeviceLinear, OnDevice
from services.gpu_worker.weights.placement import Rows


@dataclass(frozen=True, slots=True)
class LibraryLinear(DeviceLinear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.parts) == 1:
            return matmul(x, self.parts[0], self.bias, self.to, fast=True)
        return DeviceLinear.__call__(self, x)


class LibraryOnDevice(OnDevice):
    """Of layers; logits, and what chooses experts, are computed row by row."""

    def projection(self, rows: Rows, bias: torch.Tensor | None) -> LibraryLinear:
        return _by_library(OnDevice.projection(self, rows, bias))

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LibraryLinear:
        return _by_library(OnDevice.product(self, weight, bias))


def _by_library(linear: DeviceLinear) -> LibraryLinear:
    return LibraryLinear(linear.parts, linear.bias, linear.to)
