"""Parts of heads that draft, on a GPU: as `on_device` keeps a model's, codes as codes and floats as floats."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from services.gpu_worker.model.layers import Norm, Table
from services.gpu_worker.weights.head_files import HeadFiles
from services.gpu_worker.weights.on_device import DeviceLinear, DeviceTable, OnDevice
from services.gpu_worker.weights.source import Coded


@dataclass(frozen=True, slots=True)
class _Parts:
    """As `placement.Rows`."""

    parts: list[Coded | torch.Tensor]

    def stored(self) -> list[Coded | torch.Tensor]:
        return self.parts

    def floats(self) -> torch.Tensor:
        raise NotImplementedError


class DeviceHeads:
    """Takes a head's tensors from its files."""

    def __init__(self, files: HeadFiles, device: torch.device, dtype: torch.dtype) -> None:
        self._files = files
        self._dtype = dtype
        self._placement = OnDevice(device, dtype)

    def linear(self, parts: Seq[tuple[str, int]], columns: int, bias: bool = False) -> DeviceLinear:
        """One product of several: their names, without the ending, and rows."""
        stored = [self._files.stored(f"{name}.weight", rows, columns) for name, rows in parts]
        biases = [self._files.floats(f"{name}.bias", (rows,)) for name, rows in parts] if bias else []
        return self._placement.projection(_Parts(stored), torch.cat(biases) if biases else None)

    def output(self, name: str, rows: int, columns: int) -> DeviceLinear:
        """An output head: logits are float32."""
        return replace(self.linear([(name, rows)], columns), to=torch.float32)

    def norm(self, name: str, size: int, eps: float) -> Norm:
        return Norm(self._placement.keep(self._files.floats(f"{name}.weight", (size,))), None, eps)

    def table(self, name: str, rows: int, columns: int) -> Table:
        (weight,) = self.linear([(name, rows)], columns).parts
        return DeviceTable(weight, self._dtype)
