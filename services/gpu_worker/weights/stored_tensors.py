"""What safetensors files hold, by name, and what a quantisation makes of it: matrices read as float32 rows.

A tensor is read a part at a time. Knows no architectures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from services.gpu_worker.weights.source import WeightsError

FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file; view is what safetensors calls a slice."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    view: Any

    def rows(self, start: int, end: int) -> torch.Tensor:
        part: torch.Tensor = self.view[start:end]
        return part

    def columns(self, start: int, end: int) -> torch.Tensor:
        part: torch.Tensor = self.view[:, start:end]
        return part

    def whole(self) -> torch.Tensor:
        part: torch.Tensor = self.view[:] if self.shape else self.view[...]
        return part


class Readable(Protocol):
    """A tensor of the model: a vector, or a matrix [out_features, in_features]."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self, start: int, end: int) -> torch.Tensor:
        """float32, or a float type as stored."""
        ...


class Groups(NamedTuple):
    """Rows of a matrix as integers: w[n, k] = (codes[n, k] - zeros[n, g]) scales[n, g], g = k // (K / groups)."""

    codes: torch.Tensor  # [N, K]
    zeros: torch.Tensor  # [N, groups]
    scales: torch.Tensor  # float32 [N, groups]

    def values(self, index: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [N, K]. index: the group of each column [K], where they are not equal and in order."""
        if index is not None:
            return (self.codes - self.zeros[:, index]) * self.scales[:, index]
        parts = self.codes.reshape(*self.zeros.shape, -1) - self.zeros[:, :, None]
        return (parts * self.scales[:, :, None]).view(self.codes.shape)


class Module:
    """The tensors of one linear layer, `stem.SUFFIX`; each is to be taken, with the type it must have."""

    def __init__(self, stem: str, tensors: Mapping[str, StoredTensor]) -> None:
        self.stem = stem
        self._tensors = dict(tensors)
        self._taken: set[str] = set()

    def has(self, suffix: str) -> bool:
        return suffix in self._tensors

    def take(self, suffix: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...] | None = None) -> StoredTensor:
        """None in shape: any size. WeightsError names the tensor."""
        self._taken.add(suffix)
        tensor = self._tensors.get(suffix)
        name = f"{self.stem}.{suffix}"
        if tensor is None:
            raise WeightsError(f"tensor {name!r} is missing")
        if tensor.dtype not in dtypes:
            raise WeightsError(f"tensor {name!r}: {tensor.dtype} is not supported here (known: {', '.join(dtypes)})")
        fits = shape is None or (
            len(shape) == len(tensor.shape)
            and all(want in (None, found) for want, found in zip(shape, tensor.shape, strict=True))
        )
        if not fits:
            raise WeightsError(f"tensor {name!r}: shape {shape} expected, found {tensor.shape}")
        return tensor

    def left(self) -> list[str]:
        """The parts that nobody took."""
        return [suffix for suffix in self._tensors if suffix not in self._taken]


def unpack_fields(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """[count, ...] int32: fields of this many bits from a stream of words along dimension 0, lowest bits first.

    A field may straddle two words, as every tenth of 3 bits does.
    """
    if bits in (2, 4, 8, 16):  # none straddles, which takes a sixth of the time
        shifts = torch.arange(0, 32, bits, dtype=torch.int32).view(-1, *[1] * (words.dim() - 1))
        return ((words.int().unsqueeze(1) >> shifts) & ((1 << bits) - 1)).flatten(0, 1)[:count]
    words = words.long() & 0xFFFFFFFF
    starts = torch.arange(count) * bits
    index, shift = starts // 32, (starts % 32).view(-1, *[1] * (words.dim() - 1))
    low = words.index_select(0, index) >> shift
    high = words.index_select(0, (index + 1).clamp(max=words.shape[0] - 1)) << (32 - shift)
    return ((low | torch.where(shift + bits > 32, high, 0)) & ((1 << bits) - 1)).int()
