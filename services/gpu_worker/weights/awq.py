"""AWQ checkpoints ("gemm" layout): 4-bit codes packed along the outputs, a scale and a zero for each group of inputs.

w[n, k] = (q[k, n] - z[k // G, n]) s[k // G, n]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.gpu_worker.weights.source import WeightsError
from services.gpu_worker.weights.stored_tensors import FLOATS, Groups, Module, StoredTensor

PACKED = 8  # codes in a word
_SHIFTS = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28])  # of a word's columns in order


@dataclass(frozen=True, slots=True)
class AWQMatrix:
    qweight: StoredTensor  # int32 [K, N / 8]
    qzeros: StoredTensor  # int32 [K / G, N / 8]
    scales: StoredTensor  # [K / G, N]
    shape: tuple[int, ...]
    bits: int = 4
    centred: bool = False
    in_order: bool = True

    @property
    def num_groups(self) -> int:
        return self.scales.shape[0]

    @classmethod
    def of(cls, module: Module) -> AWQMatrix:
        qweight = module.take("qweight", ("I32",), (None, None))
        columns, words = qweight.shape
        scales = module.take("scales", FLOATS, (None, words * PACKED))
        groups = scales.shape[0]
        if groups < 1 or columns % groups:
            raise WeightsError(f"tensor {scales.name!r}: {groups} groups do not divide {columns} inputs")
        return cls(qweight, module.take("qzeros", ("I32",), (groups, words)), scales, (words * PACKED, columns))

    def rows(self, start: int, end: int) -> torch.Tensor:
        return self.groups(start, end).values()

    def groups(self, start: int, end: int) -> Groups:
        first, last = start // PACKED, -(-end // PACKED)
        codes = _unpacked(self.qweight.columns(first, last))
        zeros = _unpacked(self.qzeros.columns(first, last))
        scales = self.scales.columns(first * PACKED, last * PACKED).float()
        own = slice(start - first * PACKED, end - first * PACKED)
        return Groups(codes.t()[own], zeros.t()[own], scales.t()[own])


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, N / 8] -> [R, N]."""
    return ((words.unsqueeze(-1) >> _SHIFTS.int()) & 15).flatten(1)
