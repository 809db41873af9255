"""Attention over a cache of latents, for GPUs: every head reads the same row of a token, K in full and V as its start.

    s_j = scale q.c_j;   out = sum_j exp(s_j) c_j[:rank] / sum_j exp(s_j)

over the keys j that the query's row sees, as in `attention`: chunks, single tokens and drafts alike, in the same parts.
Queries are in the latents' space (see `services/gpu_worker/model/latent_attention.py`).
"""

from __future__ import annotations

import torch

from kernels.attention import AttentionBatch, AttentionOptions, attention_reference, uniform_tile_rows
from kernels.dispatch import uses_triton
from kernels.kv_cache import KvCache


def latent_attention(q: torch.Tensor, cache: KvCache, batch: AttentionBatch, scale: float, out: torch.Tensor) -> None:
    """q [N, H, C], out [N, H, rank] of the same type; only the batch's rows of out are written.

    cache: of one head of C numbers, K and V in one. batch: made for groups of H heads.
    """
    _check(q, cache, batch, out)
    if uses_triton(q):
        from kernels.gpu.latent_attention import latent_attention_triton  # needs Triton, as a GPU has it

        latent_attention_triton(q, cache, batch, scale, out)
    else:
        latent_attention_reference(q, cache, batch, scale, out)


def latent_attention_reference(
    q: torch.Tensor, cache: KvCache, batch: AttentionBatch, scale: float, out: torch.Tensor
) -> None:
    whole = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    attention_reference(q, cache, batch, AttentionOptions(scale), whole)
    rows = slice(batch.first_row, batch.first_row + batch.num_rows)
    out[rows] = whole[rows, :, : out.shape[2]].to(out.dtype)


def _check(q: torch.Tensor, cache: KvCache, batch: AttentionBatch, out: torch.Tensor) -> None:
    if cache.k.shape[1] != 1 or q.dim() != 3 or q.shape[2] != cache.k.shape[3]:
        raise ValueError(f"latent_attention: q {tuple(q.shape)}, cache {tuple(cache.k.shape)}")
    if cache.k.data_ptr() != cache.v.data_ptr():
        raise ValueError("latent_attention: a cache whose V is not its K")
    if out.shape[:2] != q.shape[:2] or out.shape[2] > q.shape[2] or not out.is_contiguous() or out.dtype != q.dtype:
        raise ValueError(f"latent_attention: out {out.dtype} {tuple(out.shape)} for q {q.dtype} {tuple(q.shape)}")
    if batch.first_row + batch.num_rows > q.shape[0] or batch.tile_rows != uniform_tile_rows(q.shape[1]):
        raise ValueError(f"latent_attention: a batch of other rows or heads than q {tuple(q.shape)}")
    if batch.block_tables.shape[1] * cache.k.shape[2] < batch.longest:
        raise ValueError(
            f"latent_attention: {batch.longest} keys are more than {batch.block_tables.shape[1]} blocks hold"
        )
