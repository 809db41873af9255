"""Which tokens pass which experts, as products take it: pairs of a token and one of its experts, in tiles.

All pairs of a tile have one expert; a pair's number is token x choices + choice. How many tiles there are follows from
shapes alone, so nothing waits for a device to say it; tiles that nobody needs are marked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_TILES = (16, 32, 64)


@dataclass(frozen=True, slots=True)
class Routing:
    chosen: torch.Tensor  # int64 [M, choices]: experts
    num_experts: int
    slots: torch.Tensor  # int32 [tiles, tile_tokens]: a pair, or num_pairs where there is none
    experts: torch.Tensor  # int32 [tiles]: whose tile it is, or -1

    @property
    def num_pairs(self) -> int:
        return self.chosen.numel()

    @property
    def choices(self) -> int:
        return self.chosen.shape[1]

    @property
    def tile_tokens(self) -> int:
        return self.slots.shape[1]


def routing_of(chosen: torch.Tensor, num_experts: int) -> Routing:
    """chosen [M, choices], each a number of an expert."""
    pairs, device = chosen.numel(), chosen.device
    each = -(-pairs // num_experts)
    size = next((size for size in _TILES if size >= each), _TILES[-1])
    num_tiles = pairs // size + min(num_experts, pairs)
    flat = chosen.flatten().long()
    order = flat.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device).scatter_add_(0, flat, torch.ones_like(flat))
    tile_ends = ((counts + size - 1) // size).cumsum(0)
    tiles = torch.arange(num_tiles, device=device)
    experts = torch.searchsorted(tile_ends, tiles, right=True)
    used = experts < num_experts
    experts = experts.clamp_max(num_experts - 1)
    within = tiles - (tile_ends - (counts + size - 1) // size)[experts]  # how many tiles of the expert come before
    place = within[:, None] * size + torch.arange(size, device=device)
    known = used[:, None] & (place < counts[experts][:, None])
    sorted_place = (counts.cumsum(0) - counts)[experts][:, None] + place
    slots = torch.where(known, order[sorted_place.clamp(0, max(0, pairs - 1))] if pairs else 0, pairs)
    return Routing(chosen, num_experts, slots.int(), torch.where(used, experts, -1).int())


def rows_of(num_rows: int, routing: Routing | None) -> int:
    """Rows of W: all of them, or an expert's."""
    return num_rows if routing is None else num_rows // routing.num_experts


def choices_of(x: torch.Tensor, routing: Routing | None) -> int:
    """How many pairs have a row of x in common."""
    return 1 if routing is None else routing.num_pairs // max(1, x.shape[0])
