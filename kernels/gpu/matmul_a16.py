"""Triton: product of quantised weights with activations as they are (see `kernels.matmul_a16`)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import CompileCase, launch, on_paper, target_of
from kernels.gpu.matmul_float import matmul_float_triton
from kernels.gpu.split_k import BEST_MMA, VARYING, Tile, plan_of, program_tile, store_product
from kernels.matmul_a16 import matmul_a16
from kernels.planar_weight import TILE, PlanarWeight
from kernels.routing import Routing, choices_of, rows_of

MAGIC = tl.constexpr(0x43800000)  # 256, as a float32
PLANES = {2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (8, 0)}


@triton.jit(do_not_specialize=VARYING)
def _matmul_a16_kernel(
    y_ptr,  # float [M, N]
    bias_ptr,  # float [N], or None
    parts_ptr,  # float32 [splits, M, N], or None: then y is written
    slots_ptr,
    experts_ptr,
    num_tiles,
    num_tokens,
    num_rows,
    num_splits,
    x_ptr,  # float [rows of x, K], x_stride apart
    low_ptr,  # uint8 [tiles, all rows, TILE LOW / 8]; all rows: N, or those of all experts
    high_ptr,  # uint8 [tiles, all rows, TILE HIGH / 8]; as low_ptr if HIGH is 0
    words_ptr,  # int32 [words, all rows]
    all_rows,
    num_columns,
    x_stride,
    split_tiles,
    group_tiles,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    CHOICES: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    GROUP: tl.constexpr,
    CENTRE: tl.constexpr,  # None: a word is a scale and an offset
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y = x W^T + bias: ROWS rows of W with TOKENS rows of x, over one split of the columns or all, one by one."""
    token, source, row, place, works = program_tile(
        slots_ptr, experts_ptr, num_tiles, num_tokens, num_rows, ROWS, TOKENS, CHOICES
    )
    x_rows = x_ptr + source.to(tl.int64)[None, :] * x_stride
    first = tl.program_id(1)
    last = tl.where(works, num_splits, first)
    if parts_ptr is not None:
        last = tl.where(works, first + 1, first)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for split in range(first, last):
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
        for tile in range(split * split_tiles, tl.minimum((split + 1) * split_tiles, tl.cdiv(num_columns, TILE))):
            for piece in tl.static_range(TILE // PIECE):
                w = weight_piece(
                    low_ptr, high_ptr, words_ptr, tile, place, row < num_rows, all_rows, group_tiles, piece, LOW, HIGH,
                    GROUP, CENTRE, PIECE, TILE,
                )  # fmt: skip
                column = tile * TILE + piece * PIECE + tl.arange(0, PIECE)
                mask = (column < num_columns)[:, None] & (token < num_tokens)[None, :]
                x = tl.load(x_rows + column[:, None], mask=mask, other=0.0)
                acc = tl.dot(w.to(x.dtype), x, acc, input_precision=PRECISION)
        if ONE_SPLIT:
            total = acc
        else:
            total += acc
    store_product(total, y_ptr, bias_ptr, parts_ptr, first, token, row, num_tokens, num_rows)


@triton.jit
def weight_piece(
    low_ptr,
    high_ptr,
    words_ptr,
    tile,
    row,
    is_row,
    all_rows,
    group_tiles,
    piece: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    GROUP: tl.constexpr,
    CENTRE: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
):
    """PIECE columns of W in one group, float32 [ROWS, PIECE]; rows are counted through all experts."""
    # One step of a code is 2^15 of the bits of a float between 256 and 512, or, of a byte's field that stays where it
    # is, 2^15 times its place.
    PLACE: tl.constexpr = piece * PIECE // (TILE * LOW // 8) * LOW
    packed = plane_piece(low_ptr, tile, row, is_row, all_rows, piece, LOW, PIECE, TILE)
    if HIGH > 0:
        FIELD: tl.constexpr = piece * PIECE // (TILE * HIGH // 8) * HIGH
        high = plane_piece(high_ptr, tile, row, is_row, all_rows, piece, HIGH, PIECE, TILE)
        bits = ((packed >> PLACE) & ((1 << LOW) - 1)) | (((high >> FIELD) & ((1 << HIGH) - 1)) << LOW)
    else:
        bits = packed & (((1 << LOW) - 1) << PLACE)
    UNIT: tl.constexpr = 1.0 / (1 << PLACE) if HIGH == 0 else 1.0
    q = ((bits << 15) | MAGIC).to(tl.float32, bitcast=True)
    if GROUP >= TILE:
        word_row = tile // group_tiles
    elif CENTRE is None:
        word_row = tile * (TILE // GROUP) + piece * PIECE // GROUP
    else:
        word_row = tile * (TILE // GROUP // 2) + piece * PIECE // GROUP // 2
    word = tl.load(words_ptr + (word_row * all_rows + row).to(tl.int64), mask=is_row, other=0)
    if CENTRE is None:
        scale = half_of(word, 0)
        offset = tl.fma(scale, 256.0 * UNIT, half_of(word, 1))
    else:
        scale = half_of(word, piece * PIECE // GROUP % 2)
        offset = scale * (256.0 * UNIT + CENTRE)
    return tl.fma(q, (scale * UNIT)[:, None], -offset[:, None])


@triton.jit
def plane_piece(
    ptr, tile, row, is_row, all_rows, piece: tl.constexpr, BITS: tl.constexpr, PIECE: tl.constexpr, TILE: tl.constexpr
):
    """That piece of each row of a tile, int32 [ROWS, PIECE]."""
    WIDTH: tl.constexpr = TILE * BITS // 8
    byte = piece * PIECE % WIDTH + tl.arange(0, PIECE)
    places = (tile * all_rows + row).to(tl.int64)[:, None] * WIDTH + byte[None, :]
    packed = tl.load(ptr + places, mask=is_row[:, None], other=0)
    return packed.to(tl.int32)


@triton.jit
def half_of(word, number: tl.constexpr):
    """The lower or the upper half of a word, a float16, as float32."""
    return (word >> (16 * number)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


def matmul_a16_triton(
    x: torch.Tensor, weight: PlanarWeight, bias: torch.Tensor | None, to: torch.dtype, routing: Routing | None = None
) -> torch.Tensor:
    """With routing W has the rows of all experts, and x a row for each token or for each pair."""
    x = x if x.stride(1) == 1 else x.contiguous()
    if x.dtype == torch.float32 and target_of(x).rounds_computed_operands:
        return matmul_float_triton(x, write_out(weight, x.dtype), bias, to, routing)
    shape, columns, rows = _shape(weight, x.dtype), x.shape[1], weight.out_features
    thin = shape["PIECE"] <= 16  # then more than 64 rows of W in a program did not compile well
    plan = plan_of(x, rows_of(rows, routing), columns, TILE, to, routing, thin=thin)
    args = (
        x, weight.low, weight.low if weight.high is None else weight.high, weight.words, rows, columns, x.stride(0),
        plan.splits.columns // TILE, max(1, weight.group // TILE),
    )  # fmt: skip
    plan.launch(
        _matmul_a16_kernel, args, bias=bias, stage_bytes=_stage_bytes(weight, plan.tile, x.element_size()),
        CHOICES=choices_of(x, routing), PRECISION="ieee" if x.dtype == torch.float32 else "tf32", **shape,
    )  # fmt: skip
    return plan.y


def _shape(weight: PlanarWeight, dtype: torch.dtype) -> dict[str, Any]:
    low, high = PLANES[weight.bits]
    most = 32 if dtype == torch.float32 or target_of(weight.words).multiplies_by_warp else TILE
    piece = min(weight.group, most, *(TILE * bits // 8 for bits in (low, high) if bits))
    group = min(weight.group, TILE)
    return {"LOW": low, "HIGH": high, "GROUP": group, "CENTRE": weight.centre, "PIECE": piece, "TILE": TILE}


def _stage_bytes(weight: PlanarWeight, tile: Tile, item: int) -> int:
    return TILE * (tile.rows * weight.bits // 8 + tile.tokens * item) + 4 * tile.rows


@triton.jit
def _write_out_kernel(
    w_ptr,  # float [N, K]
    low_ptr,  # uint8 [tiles, N, TILE LOW / 8]
    high_ptr,  # uint8 [tiles, N, TILE HIGH / 8]; as low_ptr if HIGH is 0
    words_ptr,  # int32 [words, N]
    num_rows,
    num_columns,
    group_tiles,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    GROUP: tl.constexpr,
    CENTRE: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """W as numbers, rounded: one tile of ROWS rows."""
    tile, row = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    places = w_ptr + row.to(tl.int64)[:, None] * num_columns
    for piece in tl.static_range(TILE // PIECE):
        w = weight_piece(
            low_ptr, high_ptr, words_ptr, tile, row, row < num_rows, num_rows, group_tiles, piece, LOW, HIGH, GROUP,
            CENTRE, PIECE, TILE,
        )  # fmt: skip
        column = tile * TILE + piece * PIECE + tl.arange(0, PIECE)
        mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        tl.store(places + column[None, :], w.to(w_ptr.dtype.element_ty), mask=mask)


def write_out(weight: PlanarWeight, dtype: torch.dtype) -> torch.Tensor:
    """W [N, K] as numbers of that type, columns in the order of its codes."""
    rows, columns = weight.out_features, weight.in_features
    w = torch.empty(rows, columns, dtype=dtype, device=weight.words.device)
    high = weight.low if weight.high is None else weight.high
    args = (w, weight.low, high, weight.words, rows, columns, max(1, weight.group // TILE))
    grid = (triton.cdiv(columns, TILE), triton.cdiv(rows, 64))
    launch(_write_out_kernel, grid, args, num_warps=4, ROWS=64, **_shape(weight, dtype))
    return w


def on_paper_weight(rows: int, columns: int, bits: int, group: int, centre: int | None) -> PlanarWeight:
    low, high = PLANES[bits]
    planes = [on_paper(columns // TILE, rows, TILE * b // 8, dtype=torch.uint8) for b in (low, high)]
    words = on_paper(columns // group // (1 if centre is None else 2), rows, dtype=torch.int32)
    return PlanarWeight(bits, rows, columns, group, centre, planes[0], planes[1] if high else None, words)


def _case(
    num_tokens: int, rows: int, columns: int, bits: int, group: int, centre: int | None = None,
    dtype: torch.dtype = torch.bfloat16, fast: bool = False,
) -> CompileCase:  # fmt: skip
    weight, x = on_paper_weight(rows, columns, bits, group, centre), on_paper(num_tokens, columns, dtype=dtype)
    name = f"{num_tokens} x {rows} x {columns} {dtype}, {bits} bits by {group}{', fast' if fast else ''}"
    return CompileCase(name, lambda: matmul_a16(x, weight, fast=fast), {} if fast or dtype.itemsize > 2 else BEST_MMA)


COMPILE_CASES = (
    _case(1, 4096, 4096, 4, 128),
    _case(32, 28672, 4096, 4, 128),
    _case(64, 4096, 14336, 4, 128),
    _case(8192, 4096, 14336, 4, 128, dtype=torch.float16),
    _case(8192, 4096, 4096, 4, 128, fast=True),
    _case(1, 4096, 4096, 4, 128, dtype=torch.float32),
    _case(64, 4096, 4096, 4, 32, dtype=torch.float32),
    _case(1, 4096, 4096, 8, 32, 128),
    _case(64, 4096, 4096, 8, 4096),
    _case(1, 4096, 4096, 4, 32),
    _case(64, 4096, 4096, 4, 32),
    _case(1, 4096, 4096, 6, 16, 32),
    _case(64, 4096, 4096, 6, 16, 32),
    _case(1, 4096, 4096, 5, 32),
    _case(1, 4096, 4096, 3, 16, 4),
    _case(1, 4096, 4096, 2, 16),
    _case(1, 4096, 4096, 2, 128),
)
