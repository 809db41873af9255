"""The attention half of a layer whose keys and values are kept as one latent vector for all heads (DeepSeek's MLA).

The cache has one head: a token's normed latent and its turned part of the key. Queries are projected into that space
(the up-projection of keys is absorbed), so that keys are never expanded; what is attended is latents, from which each
head's values are projected afterwards:

    score = scale (q_nope W_uk c + q_rope k_rope),   out = W_uv sum(softmax(score) c)
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from kernels.kv_cache import KvCache
from kernels.rope import rope
from services.gpu_worker.model.config import LayerKind, ModelConfig
from services.gpu_worker.model.layers import ExpertProduct, LayerWeights, Product, RopeRows, attended_by
from services.gpu_worker.step_inputs import StepInputs


def latent_attention(
    x: torch.Tensor, layer: LayerWeights, kind: LayerKind, cache: KvCache, inputs: StepInputs,
    angles: RopeRows | None, config: ModelConfig,
) -> torch.Tensor:  # fmt: skip
    """As `layers.attention_block`."""
    latent, parts = config.latent, layer.latent
    assert latent is not None and parts is not None and layer.k_norm is not None and angles is not None
    down = layer.qkv(x)
    first, last = down.shape[1] - latent.row, down.shape[1] - latent.rope_dim
    q, compressed, k_rope = down[:, :first], down[:, first:last], down[:, last:]
    if layer.q_norm is not None and parts.q_up is not None:
        q = parts.q_up(layer.q_norm(q.contiguous()))
    q = q.reshape(x.shape[0], config.num_heads, -1)
    turned = rope(torch.cat((q[..., latent.nope_dim :], k_rope[:, None]), dim=1), angles.cos, angles.signed_sin)
    queries = torch.cat((_by_head(q[..., : latent.nope_dim], parts.key_up), turned[:, :-1]), dim=2)
    row = torch.cat((layer.k_norm(compressed.contiguous())[:, None], turned[:, -1:]), dim=2)
    mixed = attended_by(queries, row, row, kind, cache, inputs, config)[..., : latent.rank]
    return layer.out(_by_head(mixed, parts.value_up).view(x.shape[0], -1))


def _by_head(x: torch.Tensor, products: Seq[Product] | ExpertProduct) -> torch.Tensor:
    """x [N, H, K], each head through a product of its own."""
    assert isinstance(products, tuple)
    return torch.stack([product(x[:, head].contiguous()) for head, product in enumerate(products)], dim=1)
