"""Activations as signed bytes: x = d q, with a scale d for each group of 32 columns of each row.

    d = largest magnitude of the group / 127,   q = x * (127 / largest) to the nearest, ties to even
    s = d * sum of the group's q

A row's numbers depend on that row alone. A group with a value that is no number has the scale NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.native.library import NativeLibrary
from kernels.native.structs import Rows
from kernels.packed_weight import GROUP


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """[M, K] as bytes with scales; x are the floats they come from. sums: int32, of each half group's q."""

    x: torch.Tensor  # float32 [M, K]
    q: torch.Tensor  # int8 [M, K]
    d: torch.Tensor  # float32 [M, K / GROUP]
    s: torch.Tensor
    sums: torch.Tensor  # int32 [M, 2 K / GROUP]

    def rows(self) -> Rows:
        """Pointers into this object, which must outlive them."""
        columns = self.x.shape[1]
        pointers = (t.data_ptr() for t in (self.x, self.q, self.d, self.s, self.sums))
        return Rows(*pointers, columns, columns)


def quantize_a8(x: torch.Tensor, library: NativeLibrary) -> QuantizedRows:
    """x float32 [M, K]; K is a multiple of GROUP."""
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] % GROUP:
        raise ValueError(f"quantize_a8: {x.dtype} {tuple(x.shape)}")
    num_rows, columns = x.shape
    out = QuantizedRows(
        x.contiguous(), torch.empty(num_rows, columns, dtype=torch.int8), torch.empty(num_rows, columns // GROUP),
        torch.empty(num_rows, columns // GROUP), torch.empty(num_rows, columns // GROUP * 2, dtype=torch.int32),
    )  # fmt: skip
    library.quantize(out.rows(), num_rows)
    return out


def quantize_a8_reference(x: torch.Tensor) -> QuantizedRows:
    """The specification."""
    groups = x.reshape(x.shape[0], -1, GROUP)
    largest = groups.abs().amax(-1)
    inverse = torch.where(largest > 0, 127.0 / largest, 0.0)
    q = (groups * inverse.unsqueeze(-1)).round()
    sums = q.view(x.shape[0], -1, GROUP // 2).sum(-1).int()
    d = largest / 127.0
    return QuantizedRows(x, q.flatten(1).to(torch.int8), d, d * q.sum(-1), sums)
