"""Store the K and V of a step's tokens in the paged cache.

A cache is [num_blocks + 1, Hkv, block_size, D]; row (block, head, offset) of it, counted flat, is one token's head.
"""

from __future__ import annotations

import torch


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor,
    started_blocks: torch.Tensor,
) -> None:
    """Write k and v [N, Hkv, D] to the cache rows [N * Hkv] (int64), converted to the cache's dtype.

    started_blocks (int64) are the blocks whose first slot is among the rows; they are cleared first, so that a mask
    never has to hide what an earlier owner left there (zero times NaN is NaN).
    """
    if k.shape != v.shape or k_cache.shape != v_cache.shape or k_cache.shape[1::2] != k.shape[1:]:
        raise ValueError(f"kv_write: k {tuple(k.shape)}, v {tuple(v.shape)}, cache {tuple(k_cache.shape)}")
    if rows.dtype != torch.int64 or rows.numel() != k.shape[0] * k.shape[1]:
        raise ValueError(f"kv_write: {rows.numel()} {rows.dtype} rows for {k.shape[0]} tokens of {k.shape[1]} heads")
    kv_write_reference(k, v, k_cache, v_cache, rows, started_blocks)


def kv_write_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor,
    started_blocks: torch.Tensor,
) -> None:
    for source, cache in ((k, k_cache), (v, v_cache)):
        if started_blocks.numel():
            cache.index_fill_(0, started_blocks, 0.0)
        dim = cache.shape[-1]
        cache.view(-1, dim).index_copy_(0, rows, source.reshape(-1, dim).to(cache.dtype))
