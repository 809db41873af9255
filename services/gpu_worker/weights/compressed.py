"""compressed-tensors checkpoints: codes packed in words along the inputs, a scale and perhaps a zero for each group.

w[n, k] = (q[n, k] - z[n, g[k]]) s[n, g[k]]        codes and zeros are stored plus half their range
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.gpu_worker.weights.source import WeightsError
from services.gpu_worker.weights.stored_tensors import FLOATS, Groups, Module, StoredTensor, unpack_fields

BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    packed: StoredTensor  # int32 [N, K bits / 32, rounded up]
    scales: StoredTensor  # [N, groups]
    zeros: StoredTensor | None  # int32 [N bits / 32, groups]; none: the middle of the range
    g_idx: StoredTensor | None  # [K]
    bits: int
    shape: tuple[int, ...]

    @property
    def num_groups(self) -> int:
        return self.scales.shape[1]

    @property
    def centred(self) -> bool:
        return self.zeros is None

    @property
    def in_order(self) -> bool:
        return self.g_idx is None or int(self.g_idx.whole().min()) < 0

    @classmethod
    def of(cls, module: Module) -> PackedMatrix:
        packed = module.take("weight_packed", ("I32",), (None, None))
        said = module.take("weight_shape", ("I64", "I32"), (2,)).whole().tolist()
        rows, columns = packed.shape[0], said[1]
        bits = next((b for b in BITS if -(-columns // (32 // b)) == packed.shape[1]), 0)
        if said[0] != rows or columns < 1 or not bits:
            raise WeightsError(f"tensor {module.stem + '.weight_shape'!r}: {said}, but {packed.shape} words")
        fields = 32 // bits
        scales = module.take("weight_scale", FLOATS, (rows, None))
        groups = scales.shape[1]
        if groups < 1 or columns % groups:
            raise WeightsError(f"tensor {scales.name!r}: {groups} groups do not divide {columns} inputs")
        zeros = None
        if module.has("weight_zero_point"):
            zeros = module.take("weight_zero_point", ("I32",), (-(-rows // fields), groups))
        g_idx = None
        if module.has("weight_g_idx"):
            g_idx = module.take("weight_g_idx", ("I32", "I64"), (columns,))
            values = g_idx.whole()
            if int(values.min()) < -1 or int(values.max()) >= groups:
                raise WeightsError(f"tensor {g_idx.name!r}: a group is not one of the {groups}")
        return cls(packed, scales, zeros, g_idx, bits, (rows, columns))

    def rows(self, start: int, end: int) -> torch.Tensor:
        index = None if self.in_order or self.g_idx is None else self.g_idx.whole().long()
        return self.groups(start, end).values(index)

    def groups(self, start: int, end: int) -> Groups:
        codes = unpack_fields(self.packed.rows(start, end).t(), self.bits, self.shape[1]).t()
        return Groups(codes, self._zeros(start, end), self.scales.rows(start, end).float())

    def _zeros(self, start: int, end: int) -> torch.Tensor:
        if self.zeros is None:
            return torch.full((end - start, self.scales.shape[1]), 1 << (self.bits - 1))
        return unpack_fields(self.zeros.whole(), self.bits, self.shape[0])[start:end]
