"""The decoder on a GPU's ops: as `decoder.Decoder`, in float32, float16 or bfloat16. Knows no files, no sampling.

A layer's two halves add to the residual stream, which is rounded to the type computed in; each addition is part of
the norm after it. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F

from kernels.attention import AttentionBatch, AttentionOptions, attention
from kernels.kv_cache import KvCache, kv_store
from kernels.rms_norm import rms_norm
from kernels.rope import rope_at
from kernels.softcap import softcap_
from services.gpu_worker.gpu_inputs import DeviceInputs
from services.gpu_worker.model.config import LayerKind, ModelConfig
from services.gpu_worker.model.gpu_feed_forward import gpu_feed_forward
from services.gpu_worker.model.gpu_latent_attention import Angles, all_heads, gpu_latent_attention
from services.gpu_worker.model.layers import DecoderWeights, LayerWeights, Norm
from services.gpu_worker.model.rope import Tables, local_rope_tables, rope_tables


class Taps:
    """What some layers of a decoder read, of all rows of a step: [N, layers, hidden_size], once it is computed. Numbers
    of layers are `decoder.Decoder.hidden_rows`'s."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.rows = torch.empty(0)
        self._layers = layers

    def keep(self, layer: int, x: torch.Tensor) -> None:
        for place, number in enumerate(self._layers):
            if number == layer:
                if not self.rows.numel():  # a graph that is recorded writes to the same rows again
                    self.rows = torch.empty(len(x), len(self._layers), x.shape[1], dtype=x.dtype, device=x.device)
                self.rows[:, place] = x

    def reads_last(self, num_layers: int) -> bool:
        return any(layer >= num_layers for layer in self._layers)


class GpuDecoder:
    """Weights are on the device, as `weights.on_device` keeps them."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, max_model_len: int) -> None:
        self.config = config
        self.weights = weights
        device = weights.final_norm.weight.device
        self._angles = _halves(rope_tables(config, max_model_len), device)
        local = local_rope_tables(config, max_model_len)
        self._local_angles = self._angles if local is None else _halves(local, device)
        scale, cap = config.query_scale, config.attention_softcap or None
        self._options = {
            windowed: AttentionOptions(scale, config.sliding_window if windowed else None, cap)
            for windowed in (False, True)
        }

    def forward(self, inputs: DeviceInputs, caches: Seq[KvCache], taps: Taps | None = None) -> torch.Tensor:
        """Store the K and V of all rows; the logits of the sample rows, float32 [S, vocab_size]."""
        weights, config = self.weights, self.config
        residual = weights.embedding(inputs.token_ids)
        if config.embedding_scale != 1.0:
            residual *= config.embedding_scale
        heads = None
        if config.latent is not None:
            heads = all_heads(residual.shape[0], config.num_heads, residual.device)
        added: torch.Tensor | None = None
        for number, (layer, kind, cache) in enumerate(zip(weights.layers, config.layers, caches, strict=True)):
            y = normed_sum(residual, added, layer.attn_norm)
            if taps is not None:
                taps.keep(number, residual)
            if heads is None:
                added = self.attention(y, layer, kind, cache, inputs)
            else:
                added = gpu_latent_attention(y, layer, cache, inputs, self._angles, heads, config)
            added = self._added(added, layer.attn_post_norm)
            y = normed_sum(residual, added, layer.ffn_norm)
            added = self._added(gpu_feed_forward(y, layer.ffn, config), layer.ffn_post_norm)
        assert added is not None
        rows = inputs.sample_rows
        if taps is None or not taps.reads_last(config.num_layers):
            return self._logits(
                normed_sum(residual.index_select(0, rows), added.index_select(0, rows), weights.final_norm)
            )
        y = normed_sum(residual, added, weights.final_norm)
        taps.keep(config.num_layers, residual)
        taps.keep(config.num_layers + 1, y)
        return self._logits(y.index_select(0, rows))

    def _added(self, y: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        y = y if norm is None else _normed(y, norm)
        return y if self.config.residual_scale == 1.0 else y * self.config.residual_scale

    def attention(
        self, x: torch.Tensor, layer: LayerWeights, kind: LayerKind, cache: KvCache, inputs: DeviceInputs
    ) -> torch.Tensor:
        config = self.config
        num_heads, dim = config.num_heads, config.head_dim
        num_turned = num_heads + config.num_kv_heads
        heads = layer.qkv(x).view(x.shape[0], -1, dim)
        qk, v = heads[:, :num_turned], heads[:, num_turned:]
        if layer.q_norm is not None and layer.k_norm is not None:
            parts = _normed_heads(qk[:, :num_heads], layer.q_norm), _normed_heads(qk[:, num_heads:], layer.k_norm)
            qk = torch.cat(parts, dim=1)
            del parts  # would take as much again where it attends
        if kind.rotary:
            rope_at(qk, inputs.positions, *(self._local_angles if kind.windowed else self._angles))
        kv_store(qk[:, num_heads:], v, cache, inputs.slots)
        out = _attended(qk[:, :num_heads], cache, inputs.batches, self._options[kind.windowed])
        return layer.out(out.view(-1, num_heads * dim))

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        config = self.config
        logits = self.weights.head(x)
        if config.logit_scale != 1.0:
            logits *= config.logit_scale
        return softcap_(logits, config.logit_softcap) if config.logit_softcap else logits


def _halves(tables: Tables, device: torch.device) -> Angles:
    cos, signed_sin = tables
    half = cos.shape[1] // 2
    return cos[:, :half].contiguous().to(device), signed_sin[:, half:].contiguous().to(device)


def _attended(q: torch.Tensor, cache: KvCache, batches: Seq[AttentionBatch], options: AttentionOptions) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for batch in batches:
        attention(q, cache, batch, options, out)
    return out


def normed_sum(residual: torch.Tensor, added: torch.Tensor | None, norm: Norm | None) -> torch.Tensor:
    """residual += added, and its norm; without a norm residual itself, not to be changed while that is used."""
    if added is not None and norm is not None and norm.bias is None:
        return rms_norm(added, norm.weight, norm.eps, residual)
    if added is not None:
        residual += added
    return residual if norm is None else _normed(residual, norm)


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    if norm.bias is None:
        return rms_norm(x, norm.weight, norm.eps)
    return F.layer_norm(x.float(), norm.weight.shape, norm.weight, norm.bias, norm.eps).to(x.dtype)


def _normed_heads(heads: torch.Tensor, norm: Norm) -> torch.Tensor:
    """heads [N, H, D]: each by itself, or all of a row together, as the norm is long."""
    if norm.weight.shape[0] == heads.shape[2]:
        return _normed(heads, norm)
    return _normed(heads.reshape(heads.shape[0], -1), norm).view(heads.shape)
