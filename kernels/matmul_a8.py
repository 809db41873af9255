"""Product of quantised weights with activations of 8 bits: y = x W^T, x as `quantize_a8` leaves it.

Within a group of 32 columns the sum is one of integers; over the groups it runs in float32, in ascending order,
whatever the number of rows or threads: so a row of y depends on that row of x and on W alone, to the bit. Weights in
float are taken too; their products use the rows' floats, column by column.
"""

from __future__ import annotations

import torch

from kernels.native.library import NativeLibrary, Pool
from kernels.packed_weight import Codes, PackedWeight, dequantize
from kernels.quantize_a8 import QuantizedRows


def matmul_a8(x: QuantizedRows, weight: PackedWeight, library: NativeLibrary, pool: Pool) -> torch.Tensor:
    """float32 [M, N]."""
    num_rows, columns = x.x.shape
    if columns != weight.columns:
        raise ValueError(f"matmul_a8: rows of {columns} with W [{weight.rows}, {weight.columns}]")
    y = torch.empty(num_rows, weight.rows)
    library.product(pool.pointer, weight.matrix(), x.rows(), num_rows, y.data_ptr(), weight.rows)
    return y


def matmul_a8_reference(x: QuantizedRows, weight: Codes | torch.Tensor) -> torch.Tensor:
    """The specification, up to the rounding of its sums: float64 inside."""
    if isinstance(weight, torch.Tensor):
        return (x.x.double() @ weight.double().t()).float()
    spread = x.d.double().repeat_interleave(x.q.shape[1] // x.d.shape[1], dim=1)
    return ((x.q.double() * spread) @ dequantize(weight).double().t()).float()
