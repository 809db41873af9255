"""Quantised matrices of Hugging Face folders as products on a GPU take them: codes, or bytes, with scales. *Pure.*

Activations are quantised only where weights are FP8 (E4M3), as everybody does, or where a checkpoint says so of int8.
"""

from __future__ import annotations

import torch

from kernels.matmul_w8a8 import GROUP, ScaledWeight
from kernels.planar_weight import GroupedCodes
from services.gpu_worker.weights.awq import AWQMatrix
from services.gpu_worker.weights.compressed import PackedMatrix
from services.gpu_worker.weights.gptq import GPTQMatrix
from services.gpu_worker.weights.scaled import ScaledMatrix
from services.gpu_worker.weights.source import Coded
from services.gpu_worker.weights.stored_tensors import Readable


def coded(matrix: Readable, start: int, end: int) -> Coded | None:
    """Rows [start, end); None where no product takes them but as floats."""
    if isinstance(matrix, AWQMatrix | GPTQMatrix | PackedMatrix):
        return _grouped(matrix, start, end)
    return _scaled(matrix, start, end) if isinstance(matrix, ScaledMatrix) else None


def _grouped(matrix: AWQMatrix | GPTQMatrix | PackedMatrix, start: int, end: int) -> GroupedCodes | None:
    """Columns whose groups do not lie together are put in the order of their groups."""
    codes, zeros, scales = matrix.groups(start, end)
    order = None
    if not matrix.in_order:
        assert not isinstance(matrix, AWQMatrix) and matrix.g_idx is not None
        index = matrix.g_idx.whole().long()
        if (index.bincount(minlength=matrix.num_groups) * matrix.num_groups != len(index)).any():
            return None
        order = index.argsort(stable=True)
        codes = codes[:, order]
        order = None if torch.equal(order, torch.arange(len(order))) else order
    q = codes.to(torch.uint8)
    if matrix.centred:
        return GroupedCodes(matrix.bits, q, scales, None, 1 << (matrix.bits - 1), order)
    return GroupedCodes(matrix.bits, q, scales, zeros * scales, 0, order)


def _scaled(matrix: ScaledMatrix, start: int, end: int) -> Coded | None:
    columns, groups = matrix.shape[1], matrix.scales.shape[1]
    parts = torch.arange(start, end) // matrix.rows_a_part
    q, scales = matrix.codes.rows(start, end), matrix.scales.index_select(0, parts)
    zeros = None if matrix.zeros is None else matrix.zeros.index_select(0, parts)
    even = columns == groups * matrix.columns_a_part
    if q.dtype == torch.float8_e4m3fn or (matrix.activations and zeros is None and q.dtype == torch.int8):
        return ScaledWeight(q, scales.t().contiguous()) if groups == 1 or (even and columns == groups * GROUP) else None
    return _bytes(q, scales, zeros) if q.dtype == torch.int8 and even else None


def _bytes(q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> GroupedCodes:
    """Signed bytes, as codes of 8 bits."""
    shifted = q.contiguous().view(torch.uint8) ^ 128
    if zeros is None:
        return GroupedCodes(8, shifted, scales, None, 128)
    return GroupedCodes(8, shifted, scales, zeros * scales, 128)
