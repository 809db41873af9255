"""The attention half of a layer with latent keys and values on a GPU's ops, as `latent_attention` computes it.

Each head's product with its own part of the up-projections is that of a mixture in which a token passes every expert.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from kernels.attention import AttentionBatch
from kernels.kv_cache import KvCache, kv_store
from kernels.latent_attention import latent_attention
from kernels.rms_norm import rms_norm
from kernels.rope import rope_at
from kernels.routing import Routing, routing_of
from services.gpu_worker.gpu_inputs import DeviceInputs
from services.gpu_worker.model.config import LatentConfig, ModelConfig
from services.gpu_worker.model.layers import ExpertProduct, LayerWeights

Angles = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of all positions, each float32 [P, R / 2]


def all_heads(num_rows: int, num_heads: int, device: torch.device) -> Routing:
    """Every row with every head."""
    return routing_of(torch.arange(num_heads, device=device).repeat(num_rows, 1), num_heads)


def gpu_latent_attention(
    x: torch.Tensor, layer: LayerWeights, cache: KvCache, inputs: DeviceInputs, angles: Angles, heads: Routing,
    config: ModelConfig,
) -> torch.Tensor:  # fmt: skip
    """x [N, hidden_size], normed -> the half's output; the tokens' latents go to the cache."""
    latent, parts = config.latent, layer.latent
    assert latent is not None and parts is not None and layer.k_norm is not None
    assert not isinstance(parts.key_up, tuple) and not isinstance(parts.value_up, tuple)
    num_rows = x.shape[0]
    down = layer.qkv(x)
    first, last = down.shape[1] - latent.row, down.shape[1] - latent.rope_dim
    row = torch.cat((rms_norm(down[:, first:last], layer.k_norm.weight, layer.k_norm.eps), down[:, last:]), 1)
    row = row.view(num_rows, 1, latent.row)
    q = down[:, :first]
    if layer.q_norm is not None and parts.q_up is not None:
        q = parts.q_up(rms_norm(q, layer.q_norm.weight, layer.q_norm.eps))
    queries = _absorbed(q.reshape(num_rows, config.num_heads, -1), parts.key_up, latent, heads)
    for turned in (queries[..., latent.rank :], row[..., latent.rank :]):
        rope_at(turned, inputs.positions, *angles, latent.in_pairs)
    kv_store(row, row, cache, inputs.slots)
    mixed = _attended(queries, cache, inputs.batches, config.query_scale, latent.rank)
    return layer.out(parts.value_up(mixed.flatten(0, 1), heads).view(num_rows, -1))


def _absorbed(q: torch.Tensor, key_up: ExpertProduct, latent: LatentConfig, heads: Routing) -> torch.Tensor:
    """q [N, H, nope_dim + rope_dim] -> [N, H, rank + rope_dim]: the plain numbers in the latents' space."""
    plain = key_up(q[..., : latent.nope_dim].flatten(0, 1), heads)
    return torch.cat((plain.view(*q.shape[:2], latent.rank), q[..., latent.nope_dim :]), 2)


def _attended(q: torch.Tensor, cache: KvCache, batches: Seq[AttentionBatch], scale: float, rank: int) -> torch.Tensor:
    out = torch.empty(*q.shape[:2], rank, dtype=q.dtype, device=q.device)
    for batch in batches:
        latent_attention(q, cache, batch, scale, out)
    return out
