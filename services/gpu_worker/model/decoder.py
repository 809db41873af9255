"""The one decoder: embedding, layers, final norm and output head over a step's rows. Knows no files, no sampling."""

from __future__ import annotations

import math

import torch

from kernels.rms_norm import rms_norm
from services.gpu_worker.kv_pool import KVPool
from services.gpu_worker.model.config import ModelConfig, RopeConfig
from services.gpu_worker.model.layers import DecoderWeights, RopeRows, attention_block, feed_forward
from services.gpu_worker.step_inputs import StepInputs


class Decoder:
    def __init__(self, config: ModelConfig, weights: DecoderWeights, max_model_len: int) -> None:
        self.config = config
        self.weights = weights
        self._tables = rope_tables(config, weights.rope_factors, max_model_len)

    def forward(self, inputs: StepInputs, pool: KVPool) -> torch.Tensor:
        """Write the K and V of all rows to the pool; the logits of the sample rows, float32 [S, vocab_size]."""
        weights, eps = self.weights, self.config.rms_norm_eps
        angles = RopeRows(*(table.index_select(0, inputs.positions) for table in self._tables))
        x = weights.embedding.index_select(0, inputs.token_ids)
        for layer, cache in zip(weights.layers, pool.layers, strict=True):
            x = x + attention_block(x, layer, cache, inputs, angles, self.config)
            x = x + feed_forward(x, layer, eps)
        if not inputs.sample_chunks:
            return x.new_empty(0, self.config.vocab_size)
        return weights.head(rms_norm(x.index_select(0, inputs.sample_rows), weights.final_norm, eps))


def rope_tables(
    config: ModelConfig, factors: torch.Tensor | None, max_positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin of positions 0 to max_positions - 1, each float32 [max_positions, head_dim].

    Angles are float32 products, as in the reference implementations that models are trained with; their cosines are
    taken in float64, whose torch loops do not round by place.
    """
    frequencies = rope_frequencies(config.rope, config.head_dim)
    if factors is not None:
        frequencies = frequencies / factors
    angles = (torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies).double()
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32, the fastest first."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Slow frequencies are divided by the factor, fast ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_position / wavelengths
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies
