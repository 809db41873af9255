"""GPTQ checkpoints: codes of 2, 3, 4 or 8 bits packed along the inputs, a scale and a zero for each group of inputs.

    w[n, k] = (q[k, n] - z[g[k], n]) s[g[k], n]

Version 1 stores zeros less one. What a file says of its version may be wrong: zeros that all are the middle of the
range, or one less, of a symmetric checkpoint tell the truth.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from services.gpu_worker.model.config import ConfigError
from services.gpu_worker.weights.source import WeightsError
from services.gpu_worker.weights.stored_tensors import FLOATS, Groups, Module, StoredTensor, unpack_fields

log = logging.getLogger(__name__)

BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class GPTQMatrix:
    qweight: StoredTensor  # int32 [K bits / 32, N]
    qzeros: StoredTensor  # int32 [groups, N bits / 32]
    scales: StoredTensor  # [groups, N]
    g_idx: StoredTensor | None  # int32 [K]; none: groups of equal size, in order
    bits: int
    stored_less_one: bool
    shape: tuple[int, ...]

    @property
    def num_groups(self) -> int:
        return self.scales.shape[0]

    @property
    def centred(self) -> bool:
        return bool((self._zeros() == 1 << (self.bits - 1)).all())

    @property
    def in_order(self) -> bool:
        """Whether each group's columns lie together, as those of equal groups do."""
        equal = torch.arange(self.shape[1]) // -(-self.shape[1] // self.num_groups)
        return self.g_idx is None or torch.equal(self.g_idx.whole().long(), equal)

    @classmethod
    def of(cls, module: Module, bits: int, symmetric: bool, version: int) -> GPTQMatrix:
        if bits not in BITS:
            raise ConfigError(f"quantization_config.bits: {bits} is not supported (known: {BITS})")
        qweight = module.take("qweight", ("I32",), (None, None))
        words, rows = qweight.shape
        columns = words * 32 // bits
        if words * 32 % bits or rows * bits % 32:
            raise WeightsError(f"tensor {qweight.name!r}: {qweight.shape} words are not whole fields of {bits} bits")
        scales = module.take("scales", FLOATS, (None, rows))
        groups = scales.shape[0]
        qzeros = module.take("qzeros", ("I32",), (groups, rows * bits // 32))
        g_idx = module.take("g_idx", ("I32", "I64"), (columns,)) if module.has("g_idx") else None
        if g_idx is not None:
            values = g_idx.whole()
            if groups < 1 or int(values.min()) < 0 or int(values.max()) >= groups:
                raise WeightsError(f"tensor {g_idx.name!r}: a group is not one of the {groups}")
        elif groups < 1 or columns % groups:
            raise WeightsError(f"tensor {scales.name!r}: {groups} groups do not divide {columns} inputs")
        less_one = _stored_less_one(qzeros, bits, symmetric, version)
        return cls(qweight, qzeros, scales, g_idx, bits, less_one, (rows, columns))

    def rows(self, start: int, end: int) -> torch.Tensor:
        return self.groups(start, end).values(None if self.g_idx is None else self.g_idx.whole().long())

    def groups(self, start: int, end: int) -> Groups:
        codes = unpack_fields(self.qweight.columns(start, end), self.bits, self.shape[1])  # [K, rows]
        return Groups(codes.t(), self._zeros()[:, start:end].t(), self.scales.columns(start, end).float().t())

    def _zeros(self) -> torch.Tensor:
        """[groups, N]."""
        zeros = _zeros(self.qzeros, self.bits)
        return (zeros + 1) & ((1 << self.bits) - 1) if self.stored_less_one else zeros


def _zeros(qzeros: StoredTensor, bits: int) -> torch.Tensor:
    """As stored, [groups, N]."""
    return unpack_fields(qzeros.whole().t(), bits, qzeros.shape[1] * 32 // bits).t()


def _stored_less_one(qzeros: StoredTensor, bits: int, symmetric: bool, version: int) -> bool:
    said = version == 1
    if not symmetric:
        return said
    zeros = _zeros(qzeros, bits)
    first = int(zeros.flatten()[0])
    middle = 1 << (bits - 1)
    if first not in (middle, middle - 1) or not bool((zeros == first).all()):
        return said
    if (first == middle - 1) != said:
        log.warning("%s: its zeros show that version %d is not meant", qzeros.name, version)
    return first == middle - 1
