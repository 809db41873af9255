"""What a decoder is made of: its weights by place, and the two halves of a layer as functions of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.kv_write import kv_write
from kernels.matmul_dense import DenseWeight, matmul_dense
from kernels.paged_attention import paged_attention
from kernels.rms_norm import rms_norm
from kernels.rope import rope
from kernels.silu_mul import silu_mul
from services.gpu_worker.kv_pool import LayerCache
from services.gpu_worker.model.config import ModelConfig
from services.gpu_worker.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class Linear:
    weight: DenseWeight
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return matmul_dense(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """qkv: the rows of query, key and value; gate_up: those of gate and up. q_norm, k_norm: [head_dim] or None."""

    attn_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Linear
    ffn_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """rope_factors: what each rotary frequency is divided by, [head_dim / 2], where the file brings it."""

    embedding: torch.Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Linear
    rope_factors: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RopeRows:
    """The rotary tables' rows of a step's positions, [N, head_dim]; see kernels/rope.py."""

    cos: torch.Tensor
    signed_sin: torch.Tensor


def attention_block(
    x: torch.Tensor, layer: LayerWeights, cache: LayerCache, inputs: StepInputs, angles: RopeRows, config: ModelConfig
) -> torch.Tensor:
    """x [N and padding, hidden_size] -> what the layer's attention adds to it; the tokens' K and V go to the cache."""
    num_heads, dim = config.num_heads, config.head_dim
    num_rotated = num_heads + config.num_kv_heads
    heads = layer.qkv(rms_norm(x, layer.attn_norm, config.rms_norm_eps)).view(x.shape[0], -1, dim)
    qk, v = heads[:, :num_rotated], heads[:, num_rotated:]
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = qk[:, :num_heads], qk[:, num_heads:]
        eps = config.rms_norm_eps
        qk = torch.cat((rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)), dim=1)
    qk = rope(qk, angles.cos, angles.signed_sin)
    q, k = qk[:, :num_heads], qk[:, num_heads:]
    n = inputs.num_rows
    kv_write(k[:n], v[:n], cache.k, cache.v, inputs.kv_rows, inputs.started_blocks)
    parts = [paged_attention(q, cache.k, cache.v, plan, dim**-0.5) for plan in inputs.plans]
    if n < x.shape[0]:
        parts.append(x.new_zeros(x.shape[0] - n, num_heads, dim))
    mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
    return layer.out(mixed.view(-1, num_heads * dim))


def feed_forward(x: torch.Tensor, layer: LayerWeights, eps: float) -> torch.Tensor:
    """x [N, hidden_size] -> what the layer's feed-forward part adds to it."""
    return layer.down(silu_mul(layer.gate_up(rms_norm(x, layer.ffn_norm, eps))))
