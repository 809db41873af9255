"""Store the K and V of a step's tokens in the paged cache.

Row (block, head, offset) of a cache, counted flat, is one token's head; in eight bits it has a scale of its own (see
`kernels.kv_cache`).
"""

from __future__ import annotations

import torch

from kernels.kv_cache import KvCache
from kernels.scaled_rows import scale_rows_reference


def kv_write(
    k: torch.Tensor, v: torch.Tensor, cache: KvCache, rows: torch.Tensor, started_blocks: torch.Tensor
) -> None:
    """Write k and v [N, Hkv, D] to the cache rows [N * Hkv] (int64), converted to the cache's dtype.

    started_blocks (int64) are the blocks whose first slot is among the rows; they are cleared first, so that a mask
    never has to hide what an earlier owner left there (zero times NaN is NaN).
    """
    if k.shape != v.shape or cache.k.shape != cache.v.shape or cache.k.shape[1::2] != k.shape[1:]:
        raise ValueError(f"kv_write: k {tuple(k.shape)}, v {tuple(v.shape)}, cache {tuple(cache.k.shape)}")
    if rows.dtype != torch.int64 or rows.numel() != k.shape[0] * k.shape[1]:
        raise ValueError(f"kv_write: {rows.numel()} {rows.dtype} rows for {k.shape[0]} tokens of {k.shape[1]} heads")
    kv_write_reference(k, v, cache, rows, started_blocks)


def kv_write_reference(
    k: torch.Tensor, v: torch.Tensor, cache: KvCache, rows: torch.Tensor, started_blocks: torch.Tensor
) -> None:
    for x, values, scales in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        heads = x.reshape(-1, x.shape[-1])
        if scales is None:
            _put(values, heads.to(values.dtype), rows, started_blocks)
        else:
            scaled = scale_rows_reference(heads, values.dtype)
            _put(values.view(torch.uint8), scaled.q.view(torch.uint8), rows, started_blocks)
            _put(scales[..., None], scaled.scale, rows, started_blocks)


def _put(values: torch.Tensor, heads: torch.Tensor, rows: torch.Tensor, started_blocks: torch.Tensor) -> None:
    if started_blocks.numel():
        values.index_fill_(0, started_blocks, 0)
    values.view(-1, values.shape[-1]).index_copy_(0, rows, heads)
