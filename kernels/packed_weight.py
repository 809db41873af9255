"""Quantised weights: integer codes with scales, what they mean, and their packed layout for the native products.

GROUP columns of a row share a scale d, or SUPER_GROUP columns share one that each group (or half of one) multiplies
with a small integer. kernels/native/native.h says how the packed planes lie in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.native.structs import FORMATS, Matrix, address

TILE_ROWS = 16
GROUP = 32
SUPER_GROUP = 256
DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Scheme:
    """w = d sub (q - centre), or d sub q + m where has_m, or d sub q - m sub_min where has_sub too.

    sub_columns: columns that share a `sub`; 0 if there is none, and d and m are a group's.
    """

    bits: int
    centre: int = 0
    has_m: bool = False
    sub_columns: int = 0


SCHEMES = {
    "Q4_0": Scheme(4, centre=8),
    "Q4_1": Scheme(4, has_m=True),
    "Q5_0": Scheme(5, centre=16),
    "Q5_1": Scheme(5, has_m=True),
    "Q8_0": Scheme(8),
    "Q2_K": Scheme(2, has_m=True, sub_columns=16),
    "Q3_K": Scheme(3, centre=4, sub_columns=16),
    "Q4_K": Scheme(4, has_m=True, sub_columns=32),
    "Q5_K": Scheme(5, has_m=True, sub_columns=32),
    "Q6_K": Scheme(6, centre=32, sub_columns=16),
}


@dataclass(frozen=True, slots=True)
class Codes:
    """Rows of a quantised weight [N, K], unpacked. q is uint8, int8 for Q8_0; sub is signed where there is a centre."""

    type_name: str
    q: torch.Tensor  # [N, K]
    d: torch.Tensor  # float16 [N, K / GROUP or K / SUPER_GROUP]
    m: torch.Tensor | None = None  # as d
    sub: torch.Tensor | None = None  # uint8 or int8 [N, K / sub_columns]
    sub_min: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [rows, columns] in tiles of 16 rows, as native.h's `struct matrix` describes it."""

    type_name: str
    rows: int
    columns: int
    codes: torch.Tensor
    high: torch.Tensor | None = None
    d: torch.Tensor | None = None
    m: torch.Tensor | None = None
    sub: torch.Tensor | None = None
    sub_min: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        planes = (self.codes, self.high, self.d, self.m, self.sub, self.sub_min)
        return sum(p.numel() * p.element_size() for p in planes if p is not None)

    def matrix(self) -> Matrix:
        """Pointers into this weight, which must outlive them."""
        planes = (self.codes, self.high, self.d, self.m, self.sub, self.sub_min)
        return Matrix(FORMATS.index(self.type_name), self.rows, self.columns, 0, *map(address, planes))


def packed_bytes(type_name: str, rows: int, columns: int) -> int:
    """`num_bytes` of such a weight, without having one."""
    elements = -(-rows // TILE_ROWS) * TILE_ROWS * columns
    if type_name in DENSE:
        return elements * DENSE[type_name].itemsize
    scheme = SCHEMES[type_name]
    num_scales = elements // (SUPER_GROUP if scheme.sub_columns else GROUP) * (2 if scheme.has_m else 1)
    subs_apart = 2 if scheme.has_m and scheme.bits > 2 else 1
    num_subs = elements // scheme.sub_columns * subs_apart if scheme.sub_columns else 0
    return elements * scheme.bits // 8 + 2 * num_scales + num_subs


def dequantize(codes: Codes) -> torch.Tensor:
    """float32 [N, K], in the order of operations that ggml uses."""
    scheme, q = SCHEMES[codes.type_name], codes.q.float()
    columns = scheme.sub_columns or GROUP
    d, m = codes.d.float(), None if codes.m is None else codes.m.float()
    if codes.sub is not None:
        d = _spread(d, SUPER_GROUP // columns) * codes.sub.float()
    if codes.sub_min is not None and m is not None:
        m = _spread(m, SUPER_GROUP // columns) * codes.sub_min.float()
    d = _spread(d, columns)
    if m is None:
        return d * (q - scheme.centre)
    m = _spread(m, columns)
    return d * q + m if codes.sub is None else d * q - m


def _spread(values: torch.Tensor, times: int) -> torch.Tensor:
    return values.repeat_interleave(times, dim=1)


def pack_dense(weight: torch.Tensor) -> PackedWeight:
    """weight: float32, float16 or bfloat16 [N, K]; its numbers stay as they are."""
    type_name = next((name for name, dtype in DENSE.items() if dtype == weight.dtype), None)
    if weight.dim() != 2 or type_name is None:
        raise TypeError(f"pack_dense: {weight.dtype} {tuple(weight.shape)}")
    rows, columns = weight.shape
    return PackedWeight(type_name, rows, columns, _tiles(weight).transpose(1, 2).contiguous())


def pack(codes: Codes) -> PackedWeight:
    """The packed form of the same numbers."""
    scheme, (rows, columns) = SCHEMES[codes.type_name], codes.q.shape
    block = SUPER_GROUP if scheme.sub_columns else GROUP
    if columns % block:
        raise ValueError(f"pack: {columns} columns are not whole blocks of {block} ({codes.type_name})")
    # 4 columns are one word: [tile, row, group, v] -> [tile, group, v, row] of words, vectors of 64 bytes
    sub, sub_min = codes.sub, codes.sub_min
    if scheme.bits == 2 and sub is not None and sub_min is not None:  # four bits each, in one byte
        sub, sub_min = sub | sub_min << 4, None
    words = _tiles(codes.q).contiguous().view(torch.int32).view(-1, TILE_ROWS, columns // GROUP, 8)
    vectors = words.permute(0, 2, 3, 1).contiguous().view(torch.uint8)  # [tile, group, 8, 64]
    low, high = _planes(vectors, scheme.bits)
    return PackedWeight(
        codes.type_name, rows, columns, low, high,
        *(None if s is None else _tiles(s).transpose(1, 2).contiguous()
          for s in (codes.d, codes.m, sub, sub_min)),
    )  # fmt: skip


def _tiles(values: torch.Tensor) -> torch.Tensor:
    """[N, X] -> [tiles, 16, X], with rows of zeros at the end."""
    missing = -values.shape[0] % TILE_ROWS
    if missing:
        values = torch.cat((values, values.new_zeros(missing, values.shape[1])))
    return values.view(-1, TILE_ROWS, values.shape[1])


def _planes(vectors: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The low and the high plane of uint8 [tile, group, 8, 64]."""
    if bits == 8:
        return vectors ^ 128, None  # q + 128
    if bits <= 3:
        low = _two_bits(vectors)
        return low, _one_bit(vectors, 2) if bits == 3 else None
    low = (vectors[:, :, :4] & 15) | (vectors[:, :, 4:] << 4)
    if bits == 5:
        return low, _one_bit(vectors, 4)
    return low, _two_bits(vectors >> 4) if bits == 6 else None


def _two_bits(vectors: torch.Tensor) -> torch.Tensor:
    """Bits 0 and 1 of vectors 4 v to 4 v + 3 in vector v."""
    tiles, groups, _, width = vectors.shape
    quarters = (vectors & 3).view(tiles, groups, 2, 4, width)
    return quarters[:, :, :, 0] | quarters[:, :, :, 1] << 2 | quarters[:, :, :, 2] << 4 | quarters[:, :, :, 3] << 6


def _one_bit(vectors: torch.Tensor, bit: int) -> torch.Tensor:
    """That bit of vector v as bit v of one vector."""
    plane = torch.zeros_like(vectors[:, :, 0])
    for v in range(8):
        plane |= (vectors[:, :, v] >> bit & 1) << v
    return plane
