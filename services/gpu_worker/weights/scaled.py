"""Matrices of signed bytes or FP8 numbers with scales: a tensor's, a row's, a group's or a block's.

w[n, k] = (q[n, k] - z) s        s and z of the part of the matrix that n and k lie in
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.gpu_worker.weights.source import WeightsError
from services.gpu_worker.weights.stored_tensors import FLOATS, Module, StoredTensor

FP8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """A scale for every part of rows_a_part x columns_a_part."""

    codes: StoredTensor  # [N, K]
    scales: torch.Tensor  # float32 [N / rows_a_part, K / columns_a_part], rounded up
    zeros: torch.Tensor | None
    rows_a_part: int
    columns_a_part: int
    shape: tuple[int, ...]
    activations: bool = False  # the checkpoint means them to be quantised too

    @classmethod
    def of(
        cls, module: Module, dtypes: tuple[str, ...], block: tuple[int, int] | None = None, activations: bool = False
    ) -> ScaledMatrix:
        """block: the sizes of a part, where there are scales for blocks."""
        codes = module.take("weight", dtypes, (None, None))
        name = "weight_scale_inv" if module.has("weight_scale_inv") else "weight_scale"
        stored = module.take(name, FLOATS)
        rows, columns = codes.shape
        part = (block or (1, 1)) if stored.shape in _block_shapes(codes.shape, block) else _part(stored, codes)
        shape = (-(-rows // part[0]), -(-columns // part[1]))
        zeros = None
        if module.has("weight_zero_point"):
            zeros = module.take("weight_zero_point", ("I8",), stored.shape).whole().float().reshape(shape)
        return cls(codes, stored.whole().float().reshape(shape), zeros, *part, codes.shape, activations)

    def rows(self, start: int, end: int) -> torch.Tensor:
        values = self.codes.rows(start, end).float()
        parts = torch.arange(start, end) // self.rows_a_part
        if self.zeros is not None:
            values -= self._spread(self.zeros, parts)
        return values.mul_(self._spread(self.scales, parts))

    def _spread(self, values: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
        rows, columns = values.index_select(0, parts), self.shape[1]
        return rows.repeat_interleave(self.columns_a_part, 1)[:, :columns] if rows.shape[1] > 1 else rows


def _block_shapes(shape: tuple[int, ...], block: tuple[int, int] | None) -> list[tuple[int, ...]]:
    return [] if block is None else [(-(-shape[0] // block[0]), -(-shape[1] // block[1]))]


def _part(stored: StoredTensor, codes: StoredTensor) -> tuple[int, int]:
    """What the shape of the scales says: one, one a row, or one a group of a row."""
    rows, columns = codes.shape
    if stored.shape in ((), (1,), (1, 1)):
        return rows, columns
    if stored.shape in ((rows,), (rows, 1)):
        return 1, columns
    groups = stored.shape[1] if len(stored.shape) == 2 and stored.shape[0] == rows else 0
    if groups < 1 or columns % groups:
        raise WeightsError(f"tensor {stored.name!r}: {stored.shape} are no scales for {codes.shape}")
    return 1, columns // groups
