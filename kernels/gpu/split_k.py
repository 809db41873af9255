"""Triton: how products are cut into programs, and their parts added, so that a row has one result.

A program computes [rows of W, rows of x]: the weight is the left operand, since matrix instructions want at least 64
rows there, and x may have one. The columns are cut into splits by the weight's shape alone. Within a split products
are added in ascending order; splits are added in ascending order too, by one program where there are enough of them,
else by another kernel from memory: the same additions, so the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import Target, launch

# What an H200 needs to be busy, about two programs a multiprocessor. The cut follows from the first, so it is the same
# for every device.
ENOUGH_PROGRAMS = 256
ENOUGH_UNCUT = 256  # programs that have all splits
MAX_SPLITS = 8
MIN_COLUMNS = 512  # of a split
SPLIT_ROWS = 64  # rows of W a program has where x has few
# One for all shapes, so that they add alike.
BEST_MMA = {"sm_80": "mma.sync", "sm_89": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma_16x16"}
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Splits:
    count: int
    columns: int  # of each but the last


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes, and with how many warps."""

    rows: int  # of W
    tokens: int  # rows of x
    num_warps: int


def splits_of(num_rows: int, num_columns: int, unit: int) -> Splits:
    """For W [num_rows, num_columns]; each split a multiple of unit columns."""
    count = min(ENOUGH_PROGRAMS // triton.cdiv(num_rows, SPLIT_ROWS), MAX_SPLITS, num_columns // MIN_COLUMNS)
    columns = triton.cdiv(triton.cdiv(num_columns, unit), max(1, count)) * unit
    return Splits(triton.cdiv(num_columns, columns), columns)


def tile_of(num_tokens: int, most: int = 128) -> Tile:
    """most: rows of x that the registers of a program have room for, where it has many rows of W."""
    tokens = min(most, max(16, triton.next_power_of_2(num_tokens)))
    return Tile(128, tokens, 8) if num_tokens > most // 2 else Tile(64, tokens, 4)


def stages_of(target: Target, stage_bytes: int) -> int:
    """How many tiles may be in flight, so that two programs have room."""
    return max(2, min(5, target.shared_bytes * 9 // 20 // stage_bytes))


@triton.jit
def program_tile(num_tokens, num_rows, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """(tile of x's rows, tile of W's rows) of this program; neighbours share what they read."""
    along, across = tl.cdiv(num_tokens, TOKENS), tl.cdiv(num_rows, ROWS)
    return tl.swizzle2d(tl.program_id(0) % along, tl.program_id(0) // along, along, across, 8)


@triton.jit
def store_product(total, y_ptr, bias_ptr, parts_ptr, split, token, row, num_tokens, num_rows):
    """total [ROWS, TOKENS] float32 to y [M, N] with the bias, or, to be added up, to parts [splits, M, N]."""
    mask = (row < num_rows)[:, None] & (token < num_tokens)[None, :]
    places = token.to(tl.int64)[None, :] * num_rows + row[:, None]
    if parts_ptr is not None:
        tl.store(parts_ptr + split.to(tl.int64) * num_tokens * num_rows + places, total, mask=mask)
    else:
        if bias_ptr is not None:
            total += tl.load(bias_ptr + row, mask=row < num_rows, other=0.0).to(tl.float32)[:, None]
        tl.store(y_ptr + places, total.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_splits_kernel(
    parts_ptr,  # float32 [NUM_SPLITS, M, N]
    bias_ptr,  # float [N], or None
    y_ptr,  # float [M, N]
    num_numbers,
    num_rows,
    NUM_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y = parts[0] + parts[1] + ... + bias"""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < num_numbers
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        total += tl.load(parts_ptr + split * num_numbers + place, mask=mask, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + place % num_rows, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty), mask=mask)


def empty_parts(splits: Splits, num_programs: int, y: torch.Tensor) -> torch.Tensor | None:
    """Room for the splits of y [M, N], where they are worth programs of their own."""
    if splits.count == 1 or num_programs >= ENOUGH_UNCUT:
        return None
    return torch.empty(splits.count, *y.shape, dtype=torch.float32, device=y.device)


def add_splits(parts: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> None:
    launch(
        _add_splits_kernel, (triton.cdiv(y.numel(), _BLOCK),), (parts, bias, y, y.numel(), y.shape[1]), num_warps=4,
        NUM_SPLITS=parts.shape[0], BLOCK=_BLOCK,
    )  # fmt: skip
