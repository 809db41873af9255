"""Triton: how products are cut into programs, and their parts added, so that a row has one result.

A program computes [rows of W, rows of x]: the weight is the left operand, since matrix instructions want at least 64
rows there, and x may have one. The columns are cut into splits by the weight's shape alone. Within a split products
are added in ascending order; splits are added in ascending order too, by one program where there are enough of them,
else by another kernel from memory: the same additions, so the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import launch, target_of
from kernels.routing import Routing

# What an H200 needs to be busy, about two programs a multiprocessor. The cut follows from the first, so it is the same
# for every device.
ENOUGH_PROGRAMS = 256
ENOUGH_UNCUT = 256  # programs that have all splits
MAX_SPLITS = 8
MIN_COLUMNS = 512  # of a split
SPLIT_ROWS = 64  # rows of W a program has where x has few
# One for all shapes, so that they add alike.
BEST_MMA = {"sm_80": "mma.sync", "sm_89": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma_16x16"}
# What differs from step to step: kernels are not to be compiled anew where it is 1, or divided by 16.
VARYING = ("num_tokens", "num_tiles")
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


@dataclass(frozen=True, slots=True)
class Plan:
    """How a product y [M, N] is computed. parts: float32 [splits, M, N], where splits have programs of their own."""

    y: torch.Tensor
    splits: Splits
    tile: Tile
    num_tiles: int  # of rows of x
    routing: Routing | None
    parts: torch.Tensor | None

    def launch(self, kernel: Any, args: tuple[Any, ...], *, stage_bytes: int, **options: Any) -> None:
        """The kernel, with args after those that every product has, and the sum of the splits. A bias is added last.

        stage_bytes: what a step reads; as many steps are in flight as leave room for two programs.
        """
        bias, routing = options.pop("bias"), self.routing
        stages = max(2, min(5, target_of(self.y).shared_bytes * 9 // 20 // stage_bytes))
        own = (self.y, bias, self.parts, *((None, None) if routing is None else (routing.slots, routing.experts)))
        grid = (
            self.num_tiles * triton.cdiv(self.y.shape[1], self.tile.rows),
            1 if self.parts is None else self.splits.count,
        )
        launch(
            kernel, grid, (*own, self.num_tiles, *self.y.shape, self.splits.count, *args), one_mma=True,
            all_registers=True, num_warps=self.tile.num_warps, num_stages=stages, ROWS=self.tile.rows,
            TOKENS=self.tile.tokens, ONE_SPLIT=self.splits.count == 1 or self.parts is not None, **options,
        )  # fmt: skip
        if self.parts is not None:
            numbers = (self.parts, bias, self.y, self.y.numel(), self.y.shape[1])
            count = triton.cdiv(self.y.numel(), _BLOCK)
            launch(_add_splits_kernel, (count,), numbers, num_warps=4, NUM_SPLITS=self.splits.count, BLOCK=_BLOCK)


def plan_of(
    x: torch.Tensor, num_rows: int, num_columns: int, unit: int, to: torch.dtype, routing: Routing | None = None,
    most: int = 64, thin: bool = False,
) -> Plan:  # fmt: skip
    """For x with W [num_rows, num_columns], or one of each expert; y is of the type `to`. unit: columns of a step.

    most: rows of x that the registers of a program have room for, where it has many rows of W. thin: it never has.
    """
    num_tokens = x.shape[0] if routing is None else routing.num_pairs
    y = torch.empty(num_tokens, num_rows, dtype=to, device=x.device)
    splits = splits_of(num_rows, num_columns, unit)
    tokens = min(most, max(16, triton.next_power_of_2(num_tokens))) if routing is None else routing.tile_tokens
    tile = Tile(64, tokens, 8 if routing is not None and tokens == 64 else 4)
    if x.dtype == torch.float32:  # multiplied without matrix units, from registers
        tokens = min(tokens, 64)
        tile = Tile(64, tokens, 8 if tokens == 64 else 4)
    elif routing is None and num_tokens > most // 2 and not thin:
        tile = Tile(128, tokens, 8)
    num_tiles = triton.cdiv(num_tokens, tokens) if routing is None else routing.experts.shape[0]
    parts = None
    if splits.count > 1 and num_tiles * triton.cdiv(num_rows, tile.rows) < ENOUGH_UNCUT:
        parts = torch.empty(splits.count, *y.shape, dtype=torch.float32, device=y.device)
    return Plan(y, splits, tile, num_tiles, routing, parts)


def splits_of(num_rows: int, num_columns: int, unit: int) -> Splits:
    """For W [num_rows, num_columns]; each split a multiple of unit columns."""
    count = min(ENOUGH_PROGRAMS // triton.cdiv(num_rows, SPLIT_ROWS), MAX_SPLITS, num_columns // MIN_COLUMNS)
    columns = triton.cdiv(triton.cdiv(num_columns, unit), max(1, count)) * unit
    return Splits(triton.cdiv(num_columns, columns), columns)


@triton.jit
def program_tile(
    slots_ptr,  # int32 [tiles, TOKENS], or None
    experts_ptr,  # int32 [tiles]
    num_tiles,
    num_tokens,
    num_rows,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """This program's rows of y and of x, its rows of W and where they begin, and whether it has work.

    Without routing rows of x are those of y, in order. Neighbours share what they read.
    """
    across = tl.cdiv(num_rows, ROWS)
    tile, tile_row = tl.swizzle2d(tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles, num_tiles, across, 8)
    token, row = tile * TOKENS + tl.arange(0, TOKENS), tile_row * ROWS + tl.arange(0, ROWS)
    if slots_ptr is not None:
        token = tl.load(slots_ptr + token)
        expert = tl.load(experts_ptr + tile)
        source, place, works = token // CHOICES, tl.maximum(expert, 0) * num_rows + row, expert >= 0
    else:
        source, place, works = token, row, tile >= 0
    return token, source, row, place, works


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


@triton.jit(do_not_specialize=("num_numbers",))
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
