"""Cosines and sines of the rotary embedding, for every kind of scaling. *Pure.*

Angles are float32 products, as in the reference implementations that models are trained with; their cosines are taken
in float64, whose torch loops do not round by place.
"""

from __future__ import annotations

import math

import torch

from services.gpu_worker.model.config import ModelConfig, RopeConfig

Tables = tuple[torch.Tensor, torch.Tensor]


def rope_tables(config: ModelConfig, max_positions: int) -> Tables:
    """cos and signed sin of positions 0 to max_positions - 1, each float32 [max_positions, R], see kernels/rope.py."""
    return _tables(config.rope, config.turned, max_positions)


def local_rope_tables(config: ModelConfig, max_positions: int) -> Tables | None:
    """The same for windowed layers, where theirs are others."""
    return None if config.local_rope is None else _tables(config.local_rope, config.turned, max_positions)


def _tables(rope: RopeConfig, dim: int, max_positions: int) -> Tables:
    frequencies = rope_frequencies(rope, dim, max_positions)
    angles = (torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies).double()
    cos, sin = (x.float() * rope.attention_factor for x in (angles.cos(), angles.sin()))
    return torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)


def rope_frequencies(rope: RopeConfig, dim: int, max_positions: int) -> torch.Tensor:
    """[dim / 2] float32, the fastest first. Of longrope's two sets the context that is served decides: what lies in
    the cache cannot turn anew when a sequence grows past the shorter one."""
    powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    frequencies = 1.0 / powers
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    elif rope.kind == "yarn":
        frequencies = _yarn(powers, rope, dim)
    elif rope.kind == "longrope":
        chosen = rope.long_factors if max_positions > rope.original_max_position else rope.short_factors
        frequencies = 1.0 / (torch.tensor(chosen) * powers) if chosen else frequencies
    return frequencies / torch.tensor(rope.factors) if rope.factors else frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Slow frequencies are divided by the factor, fast ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_position / wavelengths
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn(powers: torch.Tensor, rope: RopeConfig, dim: int) -> torch.Tensor:
    """As llama3, but interpolated over dimensions: from the one that turns beta_fast times within the original
    context to the one that turns beta_slow times."""

    def dimension(turns: float) -> float:
        return dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    slow = ramp.clamp(0.0, 1.0)
    return 1.0 / (rope.factor * powers) * slow + 1.0 / powers * (1 - slow)
