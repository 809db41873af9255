"""What a decoder is made of: its weights by place, and the attention half of a layer as a function of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.kv_cache import KvCache
from kernels.kv_write import kv_write
from kernels.layer_norm import layer_norm
from kernels.matmul_dense import DenseWeight, matmul_dense
from kernels.paged_attention import TilePlan, paged_attention
from kernels.rms_norm import rms_norm
from kernels.rope import rope
from kernels.routing import Routing
from services.gpu_worker.model.config import LayerKind, ModelConfig
from services.gpu_worker.step_inputs import StepInputs


class Product(Protocol):
    """x [M, K] -> x W^T and perhaps a bias, [M, N]."""

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor: ...


class Table(Protocol):
    """An embedding: ids int64 [N] -> rows [N, hidden_size]."""

    def __call__(self, ids: torch.Tensor, /) -> torch.Tensor: ...


class ExpertProduct(Protocol):
    """x, a row for each token or for each pair of a token and an expert -> a row for each pair."""

    def __call__(self, x: torch.Tensor, routing: Routing, /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Linear:
    weight: DenseWeight
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return matmul_dense(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class FloatTable:
    tensor: torch.Tensor  # [vocab_size, hidden_size]

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tensor.index_select(0, ids)


@dataclass(frozen=True, slots=True)
class Norm:
    """With a bias: layer norm, else RMS norm."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps)
        return layer_norm(x, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class FeedForwardWeights:
    """into: the rows of gate and up, or of up alone where there is no gate."""

    into: Product
    down: Product


@dataclass(frozen=True, slots=True)
class JoinedExperts:
    """As `FeedForwardWeights`, of all experts of a layer."""

    into: ExpertProduct
    down: ExpertProduct


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """choice_bias: what is added to scores when experts are chosen; shared: what every token passes."""

    router: Product
    choice_bias: torch.Tensor | None
    experts: tuple[FeedForwardWeights, ...] | JoinedExperts
    shared: FeedForwardWeights | None
    shared_gate: Product | None


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """q_up: from the query's latent, if it has one. key_up and value_up: for each head from nope_dim numbers of a query
    to the latent's, and from a latent to a value."""

    q_up: Product | None
    key_up: tuple[Product, ...] | ExpertProduct
    value_up: tuple[Product, ...] | ExpertProduct


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """qkv: the rows of query, key and value, or of all that leads to latents, whose norms then are q_norm and k_norm.
    Norms are before a half of the layer or on what it adds, or absent."""

    attn_norm: Norm | None
    qkv: Product
    q_norm: Norm | None
    k_norm: Norm | None
    out: Product
    attn_post_norm: Norm | None
    ffn_norm: Norm | None
    ffn: FeedForwardWeights | ExpertWeights
    ffn_post_norm: Norm | None
    latent: LatentWeights | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Table
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    head: Product


@dataclass(frozen=True, slots=True)
class RopeRows:
    """The rotary tables' rows of a step's positions, [N, dimensions that turn]; see kernels/rope.py."""

    cos: torch.Tensor
    signed_sin: torch.Tensor


def attention_block(
    x: torch.Tensor, layer: LayerWeights, kind: LayerKind, cache: KvCache, inputs: StepInputs,
    angles: RopeRows | None, config: ModelConfig,
) -> torch.Tensor:  # fmt: skip
    """x [N and padding, hidden_size], normed -> the attention's output; the tokens' K and V go to the cache."""
    num_heads, dim = config.num_heads, config.head_dim
    num_rotated = num_heads + config.num_kv_heads
    heads = layer.qkv(x).view(x.shape[0], -1, dim)
    qk, v = heads[:, :num_rotated], heads[:, num_rotated:]
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = (_normed(part, norm, config.qk_norm) for part, norm in
                ((qk[:, :num_heads], layer.q_norm), (qk[:, num_heads:], layer.k_norm)))  # fmt: skip
        qk = torch.cat((q, k), dim=1)
    if angles is not None:
        qk = _turned(qk, angles)
    q, k = qk[:, :num_heads], qk[:, num_heads:]
    return layer.out(attended_by(q, k, v, kind, cache, inputs, config).view(-1, num_heads * dim))


def attended_by(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: LayerKind, cache: KvCache, inputs: StepInputs,
    config: ModelConfig,
) -> torch.Tensor:  # fmt: skip
    plans = inputs.window_plans if kind.windowed else inputs.plans
    return attended(q, k, v, cache, inputs, plans, config.query_scale, config.attention_softcap)


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: KvCache, inputs: StepInputs, plans: Seq[TilePlan],
    scale: float, cap: float,
) -> torch.Tensor:  # fmt: skip
    """[N and padding, H, D]; k and v go to the cache."""
    n = inputs.num_rows
    kv_write(k[:n], v[:n], cache, inputs.kv_rows, inputs.started_blocks)
    parts = [paged_attention(q, cache, plan, scale, cap) for plan in plans]
    if n < q.shape[0]:
        parts.append(q.new_zeros(q.shape[0] - n, *q.shape[1:]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _normed(heads: torch.Tensor, norm: Norm, over: str) -> torch.Tensor:
    """heads [N, H, D], each by itself or all of a row together."""
    return norm(heads) if over == "head" else norm(heads.reshape(heads.shape[0], -1)).view(heads.shape)


def _turned(qk: torch.Tensor, angles: RopeRows) -> torch.Tensor:
    size = angles.cos.shape[1]
    if size == qk.shape[2]:
        return rope(qk, angles.cos, angles.signed_sin)
    return torch.cat((rope(qk[..., :size], angles.cos, angles.signed_sin), qk[..., size:]), dim=2)
