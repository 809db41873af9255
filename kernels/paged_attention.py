"""Causal attention of a step's query rows over the paged KV cache, grouped-query heads, float32 inside.

    out = softmax(cap(q K^T * scale)) V   over the keys of the row's own sequence up to its position

cap is softcap * tanh(x / softcap), or nothing; with a sliding window of W keys a row sees its own and the W - 1 before.

The sum over keys is cut into tiles of `TILE` keys at absolute positions (key 0 of a sequence starts a tile). A row's
maximum is taken over all its keys (a maximum is exact in any order), each tile's exponentials and its product with V
are summed by themselves, and the tiles are added in order. So a row's bits depend on its query and its own keys
alone: a tile past its end adds exact zeros, and a matrix product here has one of few fixed shapes (see
`matmul_dense` for what torch guarantees about rows).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.kv_cache import KvCache
from kernels.softcap import softcap_

TILE = 64


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """Rows first_row, first_row + 1, ... of q, at consecutive positions of one sequence."""

    first_row: int
    num_rows: int
    first_position: int
    block_ids: tuple[int, ...]  # of the sequence, at least up to its last position here


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Index tensors for groups of query rows, each of one sequence, and items: one group with one tile of its keys.

    M is the padded number of rows of a group and KV head: rows times the query heads that share the KV head.
    """

    num_groups: int
    num_rows_padded: int  # M
    q_index: torch.Tensor  # int64 [items * Hkv * M]: rows of q seen as [N * Hq, D]
    kv_index: torch.Tensor  # int64 [items * Hkv * TILE / block_size]: rows of a cache seen as [blocks * Hkv, ...]
    mask: torch.Tensor  # float32 [items, 1, M, TILE]: minus infinity for keys that the row does not see, else 0
    item_group: torch.Tensor  # int64 [items], ascending; the tiles of a group in order
    group_items: torch.Tensor  # int64 [groups * most tiles of one]: its items, the first repeated to fill up
    out_index: torch.Tensor  # int64 [rows * Hq]: rows of the result seen as [groups * Hkv * M, D]


def paged_attention(
    q: torch.Tensor, cache: KvCache, plan: TilePlan, scale: float, softcap: float = 0.0
) -> torch.Tensor:
    """q [N, Hq, D] -> [rows of the plan, Hq, D], float32; softcap 0: none."""
    if q.dim() != 3 or q.dtype != torch.float32:
        raise ValueError(f"paged_attention: q must be float32 [N, Hq, D], got {q.dtype} {tuple(q.shape)}")
    shape = cache.k.shape
    if shape != cache.v.shape or shape[-1] != q.shape[-1] or q.shape[1] % shape[1]:
        raise ValueError(f"paged_attention: q {tuple(q.shape)}, cache {tuple(shape)}")
    if TILE % shape[2]:
        raise ValueError(f"paged_attention: blocks of {shape[2]} tokens do not make up a tile of {TILE}")
    return _tiled(q * scale, cache, plan, softcap)


def _tiled(q: torch.Tensor, cache: KvCache, plan: TilePlan, softcap: float) -> torch.Tensor:
    _, num_heads, dim = q.shape
    num_kv_heads = cache.k.shape[1]
    m, num_items = plan.num_rows_padded, plan.item_group.numel()
    queries = q.reshape(-1, dim).index_select(0, plan.q_index).view(-1, m, dim)
    keys = _tiles(cache.k, cache.k_scale, plan.kv_index)
    scores = torch.bmm(queries, keys.transpose(1, 2))  # [items * Hkv, M, TILE]
    if softcap:
        softcap_(scores, softcap)
    # A masked slot is zero, or holds another token of the same sequence (see kv_write): adding is enough.
    scores.view(num_items, num_kv_heads, m, TILE).add_(plan.mask)
    by_item = scores.view(num_items, num_kv_heads * m, TILE)
    by_item.sub_(_row_max(by_item, plan).unsqueeze(-1)).exp_()
    values = torch.bmm(scores, _tiles(cache.v, cache.v_scale, plan.kv_index))  # [items * Hkv, M, D]
    total = _sum_tiles(values.view(num_items, -1), plan).view(-1, dim)
    weight = _sum_tiles(by_item.sum(-1), plan).view(-1)
    rows = total.index_select(0, plan.out_index)
    rows.div_(weight.index_select(0, plan.out_index).unsqueeze(-1))
    return rows.view(-1, num_heads, dim)


def _tiles(cache: torch.Tensor, scale: torch.Tensor | None, kv_index: torch.Tensor) -> torch.Tensor:
    """The tiles' keys or values, [items * Hkv, TILE, D] float32."""
    _, _, block_size, dim = cache.shape
    rows = cache.view(-1, block_size * dim)
    if scale is None:
        return rows.index_select(0, kv_index).view(-1, TILE, dim).float()
    codes = rows.view(torch.uint8).index_select(0, kv_index).view(cache.dtype).view(-1, TILE, dim)
    return codes.float().mul_(scale.view(-1, block_size).index_select(0, kv_index).view(-1, TILE, 1))


def _row_max(scores: torch.Tensor, plan: TilePlan) -> torch.Tensor:
    """For each item and row, the row's maximum over all tiles of its group: [items, Hkv * M]."""
    tile_max = scores.amax(-1)
    if plan.item_group.numel() == plan.num_groups:
        return tile_max
    group_max = tile_max.index_select(0, plan.group_items).view(plan.num_groups, -1, tile_max.shape[1]).amax(1)
    return group_max.index_select(0, plan.item_group)


def _sum_tiles(parts: torch.Tensor, plan: TilePlan) -> torch.Tensor:
    """[items, X] -> [groups, X]; index_add_ adds a group's items one after the other, so its tiles in order."""
    if plan.item_group.numel() == plan.num_groups:
        return parts
    return parts.new_zeros(plan.num_groups, parts.shape[1]).index_add_(0, plan.item_group, parts)


def shapes_agree(row_counts: tuple[int, ...], dim: int) -> bool:
    """Whether a row's products with a tile have the same bits in groups of these padded sizes, for any number of items.

    Where they have not, groups of one size must serve for everything.
    """
    generator = torch.Generator().manual_seed(0)
    tile, rows = torch.randn(TILE, dim, generator=generator), torch.randn(8, dim, generator=generator)
    weights = torch.rand(8, TILE, generator=generator)
    want_scores = torch.bmm(rows[None], tile.t()[None])[0]
    want_values = torch.bmm(weights[None], tile[None])[0]
    for num_rows in row_counts:
        index = torch.arange(num_rows) % 8
        for num_items in (1, 2, 7, 24, 96):
            tiles = tile.repeat(num_items, 1, 1)
            scores = torch.bmm(rows[index].repeat(num_items, 1, 1), tiles.transpose(1, 2))
            values = torch.bmm(weights[index].repeat(num_items, 1, 1), tiles)
            if not (scores == want_scores[index]).all() or not (values == want_values[index]).all():
                return False
    return True


def paged_attention_reference(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, spans: list[QuerySpan], scale: float,
    softcap: float = 0.0, window: int = 0,
) -> torch.Tensor:  # fmt: skip
    """The specification: the rows of the spans one after the other, [rows, Hq, D]; window 0: all keys."""
    num_heads, num_kv_heads = q.shape[1], k_cache.shape[1]
    out = []
    for span in spans:
        keys, values = (_keys_of(cache, span.block_ids).float() for cache in (k_cache, v_cache))  # [tokens, Hkv, D]
        for i in range(span.num_rows):
            end = span.first_position + i + 1
            first = max(0, end - window) if window else 0
            row = q[span.first_row + i].float().view(num_kv_heads, num_heads // num_kv_heads, -1)
            scores = torch.einsum("hgd,thd->hgt", row, keys[first:end]) * scale
            if softcap:
                scores = (scores / softcap).tanh() * softcap
            out.append(torch.einsum("hgt,thd->hgd", scores.softmax(-1), values[first:end]).reshape(num_heads, -1))
    return torch.stack(out)


def _keys_of(cache: torch.Tensor, block_ids: tuple[int, ...]) -> torch.Tensor:
    blocks = cache[list(block_ids)]  # [n, Hkv, block_size, D]
    return blocks.transpose(1, 2).reshape(-1, cache.shape[1], cache.shape[3])
