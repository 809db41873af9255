"""Quantised weights as they lie on a GPU: planes of codes in tiles, and a scale for each group of columns.

    w[n, k] = scale[n, g] (q[n, k] - centre) - offset[n, g]        g = k // (K / groups)

TILE columns of a row are one run of bytes in each plane: a plane of b bits has TILE b / 8 bytes there, and byte j
holds, from its lowest bits up, those of columns j, j + TILE b / 8, j + 2 TILE b / 8 and so on. Codes of 3, 5 and 6 bits
have two planes. Scales become float16; those of two groups, or a group's scale and offset, are one word, which is what
a GPU fetches ahead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels.packed_weight import SCHEMES, SUPER_GROUP, Codes

TILE = 128
SMALLEST_GROUP = 16  # the columns that a matrix instruction takes
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """Codes of one bit width. order: column k of q belongs to column order[k] of x; None: to its own."""

    bits: int
    q: torch.Tensor  # uint8 [N, K]
    scale: torch.Tensor  # float [N, groups]
    offset: torch.Tensor | None = None  # float [N, groups]
    centre: int = 0
    order: torch.Tensor | None = None  # int64 [K]

    def values(self) -> torch.Tensor:
        """float32 [N, K], columns in x's order."""
        repeats = self.q.shape[1] // self.scale.shape[1]
        w = self.scale.float().repeat_interleave(repeats, 1) * (self.q.float() - self.centre)
        if self.offset is not None:
            w -= self.offset.float().repeat_interleave(repeats, 1)
        return w if self.order is None else torch.empty_like(w).index_copy_(1, self.order, w)


@dataclass(frozen=True, slots=True)
class PlanarWeight:
    """W [out_features, in_features]. centre: None where words hold a scale and an offset, else they hold two scales."""

    bits: int
    out_features: int
    in_features: int
    group: int  # columns; from TILE on a multiple of it
    centre: int | None
    low: torch.Tensor  # uint8 [tiles, N, bytes]
    high: torch.Tensor | None
    words: torch.Tensor  # int32 [words, N]
    order: torch.Tensor | None = None  # int64 [K]; of experts that are one weight [experts, K]

    @property
    def num_bytes(self) -> int:
        planes = (self.low, self.high, self.words, self.order)
        return sum(p.numel() * p.element_size() for p in planes if p is not None)

    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [N, groups], with what pads the columns: the scales, and what is taken off scale times code."""
        halves = self.words.t().reshape(-1).view(torch.float16).view(self.out_features, 2 * len(self.words)).float()
        if self.centre is None:
            return halves[:, 0::2], halves[:, 1::2]
        return halves, halves * self.centre


def grouped(codes: Codes) -> GroupedCodes:
    """The same numbers, with the products of scales written out."""
    scheme = SCHEMES[codes.type_name]
    q, centre = codes.q, scheme.centre
    if q.dtype == torch.int8:
        q, centre = q.view(torch.uint8) ^ 128, 128
    scale, offset = codes.d.float(), None if codes.m is None else codes.m.float()
    if codes.sub is None:
        return GroupedCodes(scheme.bits, q, scale, None if offset is None else -offset, centre)
    repeats = SUPER_GROUP // scheme.sub_columns
    scale = scale.repeat_interleave(repeats, 1) * codes.sub.float()
    if offset is not None and codes.sub_min is not None:
        offset = offset.repeat_interleave(repeats, 1) * codes.sub_min.float()
    return GroupedCodes(scheme.bits, q, scale, offset, centre)


def fits(codes: GroupedCodes) -> bool:
    """Whether the codes can be packed: products take groups apart only at multiples of SMALLEST_GROUP columns."""
    columns, groups = codes.q.shape[1], codes.scale.shape[1]
    return groups == 1 or math.gcd(columns // groups, TILE) >= SMALLEST_GROUP


def pack_planes(codes: GroupedCodes) -> PlanarWeight:
    """ValueError unless the codes fit."""
    if not fits(codes) or codes.bits not in _PLANES:
        raise ValueError(f"pack_planes: {codes.bits} bits, {codes.q.shape[1]} columns in {codes.scale.shape[1]} groups")
    rows, columns = codes.q.shape
    tiles = -(-columns // TILE)
    q = codes.q.new_zeros(rows, tiles * TILE)
    q[:, :columns] = codes.q
    planes, shift = [], 0
    for bits in _PLANES[codes.bits]:
        planes.append(_plane(q >> shift, bits))
        shift += bits
    group, scale, offset = _regrouped(codes, tiles)
    centre = codes.centre if offset is None and group < TILE else None
    if centre is None:
        other = scale * codes.centre + (0.0 if offset is None else offset)
        halves = torch.stack((scale, other), -1)
    else:
        halves = scale.view(rows, -1, 2)
    words = halves.half().view(rows, -1, 2).view(torch.int32).squeeze(-1).t().contiguous()
    return PlanarWeight(
        codes.bits, rows, columns, group, centre, planes[0], planes[1] if len(planes) > 1 else None, words, codes.order
    )


def join_planes(weights: Sequence[PlanarWeight]) -> PlanarWeight:
    """The rows of all, one after the other. ValueError unless they are packed alike."""
    first, orders = weights[0], {None if w.order is None else tuple(w.order.tolist()) for w in weights}
    if len({(w.bits, w.in_features, w.group, w.centre) for w in weights}) != 1 or len(orders) != 1:
        raise ValueError("join: quantised weights of different formats")
    return replace(
        first, out_features=sum(w.out_features for w in weights), low=torch.cat([w.low for w in weights], 1),
        high=None if first.high is None else torch.cat([w.high for w in weights if w.high is not None], 1),
        words=torch.cat([w.words for w in weights], 1),
    )  # fmt: skip


def unpack_planes(weight: PlanarWeight) -> torch.Tensor:
    """float32 [N, K], columns in x's order: what the packed weight stands for."""
    rows, columns = weight.low.shape[1], weight.low.shape[0] * TILE
    codes = torch.zeros(rows, columns, dtype=torch.int32, device=weight.low.device)
    shift = 0
    for plane, bits in zip((weight.low, weight.high), _PLANES[weight.bits], strict=False):
        assert plane is not None
        fields = [plane.int() >> bits * i & (1 << bits) - 1 for i in range(8 // bits)]
        codes |= torch.cat(fields, -1).transpose(0, 1).reshape(rows, columns) << shift
        shift += bits
    scale, offset = (s.repeat_interleave(weight.group, 1)[:, :columns] for s in weight.scales())
    w = (scale * codes - offset)[:, : weight.in_features]
    return w if weight.order is None else torch.empty_like(w).index_copy_(1, weight.order, w)


def _plane(q: torch.Tensor, bits: int) -> torch.Tensor:
    """The lowest bits of q [N, tiles TILE], as [tiles, N, TILE bits / 8]."""
    fields = (q & (1 << bits) - 1).view(q.shape[0], -1, 8 // bits, TILE * bits // 8)
    packed = fields[:, :, 0].clone()
    for i in range(1, 8 // bits):
        packed |= fields[:, :, i] << bits * i
    return packed.transpose(0, 1).contiguous()


def _regrouped(codes: GroupedCodes, tiles: int) -> tuple[int, torch.Tensor, torch.Tensor | None]:
    """Columns of a group, and scales and offsets of such groups, zeros where there are no columns."""
    columns, groups = codes.q.shape[1], codes.scale.shape[1]
    size = columns // groups
    group = tiles * TILE if groups == 1 else size if size % TILE == 0 else math.gcd(size, TILE)
    missing = -(-tiles * TILE // group) - columns // group if groups > 1 else 0

    def regrouped(values: torch.Tensor) -> torch.Tensor:
        values = values.float() if groups == 1 else values.float().repeat_interleave(size // group, 1)
        return torch.nn.functional.pad(values, (0, missing))

    return group, regrouped(codes.scale), None if codes.offset is None else regrouped(codes.offset)
