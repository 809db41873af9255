"""Integers with zeros and scales by group, as the types that the native products take: Q4_0, Q4_1 or Q8_0. *Pure.*

Scales become float16, and so do zeros times scales: at most 5e-4 of either is lost.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kernels.packed_weight import GROUP, Codes
from services.gpu_worker.weights.stored_tensors import Groups, Readable


class Grouped(Readable, Protocol):
    """in_order: a group's columns lie together; centred: all zeros are the middle of the range."""

    @property
    def bits(self) -> int: ...

    @property
    def num_groups(self) -> int: ...

    @property
    def centred(self) -> bool: ...

    @property
    def in_order(self) -> bool: ...

    def groups(self, start: int, end: int) -> Groups: ...


def codes_type(matrix: Grouped) -> str:
    """The type that holds all rows of the matrix; empty if none does."""
    columns = matrix.shape[1]
    if columns % (GROUP * matrix.num_groups) or not matrix.in_order:
        return ""
    if matrix.bits == 4:
        return "Q4_0" if matrix.centred else "Q4_1"
    return "Q8_0" if matrix.bits == 8 and matrix.centred else ""


def codes_of(groups: Groups, type_name: str) -> Codes:
    repeats = groups.codes.shape[1] // groups.scales.shape[1] // GROUP

    def by_group(values: torch.Tensor) -> torch.Tensor:
        return values.half().repeat_interleave(repeats, dim=1)

    if type_name == "Q8_0":
        return Codes(type_name, (groups.codes - 128).to(torch.int8), by_group(groups.scales))
    q = groups.codes.to(torch.uint8)
    m = by_group(-groups.zeros * groups.scales) if type_name == "Q4_1" else None
    return Codes(type_name, q, by_group(groups.scales), m)
