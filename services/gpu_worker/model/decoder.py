"""The one decoder: embedding, layers, final norm and output head over a step's rows. Knows no files, no sampling."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import torch

from kernels.kv_cache import KvCache
from kernels.softcap import softcap_
from services.gpu_worker.kv_pool import KVPool
from services.gpu_worker.model.config import LayerKind, ModelConfig
from services.gpu_worker.model.feed_forward import feed_forward
from services.gpu_worker.model.latent_attention import latent_attention
from services.gpu_worker.model.layers import DecoderWeights, LayerWeights, RopeRows, attention_block
from services.gpu_worker.model.rope import Tables, local_rope_tables, rope_tables
from services.gpu_worker.step_inputs import StepInputs


class Decoder:
    def __init__(self, config: ModelConfig, weights: DecoderWeights, max_model_len: int) -> None:
        self.config = config
        self.weights = weights
        self._tables = rope_tables(config, max_model_len)
        self._local_tables = local_rope_tables(config, max_model_len)

    def forward(self, inputs: StepInputs, pool: KVPool) -> torch.Tensor:
        """Write the K and V of all rows to the pool; the logits of the sample rows, float32 [S, vocab_size]."""
        *_, x = self._states(inputs, pool)
        if not inputs.sample_chunks:
            return x.new_empty(0, self.config.vocab_size)
        return self._logits(x.index_select(0, inputs.sample_rows))

    def hidden_rows(self, inputs: StepInputs, pool: KVPool, layers: Seq[int]) -> torch.Tensor:
        """Write the K and V of all rows to the pool; what these layers read, [N, layers, hidden_size]. The number of
        layers stands for what the last leaves, and one more for that as the output head reads it."""
        num_layers, found = len(self.weights.layers), {}
        for number, x in enumerate(self._states(inputs, pool)):
            if number in layers:
                found[number] = x[: inputs.num_rows]
        if num_layers + 1 in layers:
            found[num_layers + 1] = self.weights.final_norm(x)[: inputs.num_rows]
        return torch.stack([found[layer] for layer in layers], dim=1)

    def _states(self, inputs: StepInputs, pool: KVPool) -> Iterator[torch.Tensor]:
        """What each layer reads, and what the last leaves."""
        weights, config = self.weights, self.config
        angles = _rows(self._tables, inputs)
        local = angles if self._local_tables is None else _rows(self._local_tables, inputs)
        x = weights.embedding(inputs.token_ids)
        if config.embedding_scale != 1.0:
            x = x * config.embedding_scale
        for layer, kind, cache in zip(weights.layers, config.layers, pool.layers, strict=True):
            yield x
            turns = None if not kind.rotary else local if kind.windowed else angles
            x = self._layer(x, layer, kind, cache, inputs, turns)
        yield x

    def _layer(
        self, x: torch.Tensor, layer: LayerWeights, kind: LayerKind, cache: KvCache, inputs: StepInputs,
        angles: RopeRows | None,
    ) -> torch.Tensor:  # fmt: skip
        scale = self.config.residual_scale
        y = x if layer.attn_norm is None else layer.attn_norm(x)
        attention = attention_block if layer.latent is None else latent_attention
        y = attention(y, layer, kind, cache, inputs, angles, self.config)
        y = y if layer.attn_post_norm is None else layer.attn_post_norm(y)
        x = x + (y if scale == 1.0 else y * scale)
        y = x if layer.ffn_norm is None else layer.ffn_norm(x)
        y = feed_forward(y, layer.ffn, self.config)
        y = y if layer.ffn_post_norm is None else layer.ffn_post_norm(y)
        return x + (y if scale == 1.0 else y * scale)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        config = self.config
        logits = self.weights.head(self.weights.final_norm(x))
        if config.logit_scale != 1.0:
            logits = logits * config.logit_scale
        return softcap_(logits, config.logit_softcap) if config.logit_softcap else logits


def _rows(tables: Tables, inputs: StepInputs) -> RopeRows:
    return RopeRows(*(table.index_select(0, inputs.positions) for table in tables))
