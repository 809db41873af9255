"""Whether two configurations, read from files of different formats, are one computation. *Pure.*"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import torch

from services.gpu_worker.model.config import ConfigError, ModelConfig, RopeConfig
from services.gpu_worker.model.rope import rope_frequencies

_TOLERANCE = 1e-6  # GGUF files have float32


def check_same(wanted: ModelConfig, found: ModelConfig, where: str) -> None:
    """ConfigError that names the first difference: what the file has no words for."""
    one, other = (_plain(config) for config in (wanted, found))
    for name, value in one.items():
        if not _equal(value, other[name]):
            raise ConfigError(f"{where} has no words for {name}: {str(value)[:100]} would be {str(other[name])[:100]}")
    longest = wanted.max_position_embeddings
    ropes = ((wanted.rope, found.rope), (_local(wanted), _local(found)))
    if not all(same_frequencies(a, b, wanted.turned, longest) for a, b in ropes):
        raise ConfigError(f"{where} has no words for these rotary frequencies ({wanted.rope.kind})")


def same_frequencies(one: RopeConfig, other: RopeConfig, dim: int, longest: int) -> bool:
    """For contexts of any length up to the longest."""
    if not _equal(one.attention_factor, other.attention_factor):
        return False
    both = {longest, *(min(longest, rope.original_max_position) for rope in (one, other))}
    return all(
        torch.allclose(rope_frequencies(one, dim, length), rope_frequencies(other, dim, length), rtol=1e-5, atol=0)
        for length in both
    )


def _local(config: ModelConfig) -> RopeConfig:
    return config.local_rope or config.rope


def _plain(config: ModelConfig) -> dict[str, Any]:
    """What is said in several ways, in one; without the ropes, which are compared by their frequencies."""
    one_way = replace(
        config, attention_scale=config.query_scale, rotary_dim=config.turned, rope=RopeConfig(), local_rope=None,
        tied=None,
    )  # fmt: skip
    return asdict(one_way)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_equal(value, other[name]) for name, value in one.items())
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_TOLERANCE)
    return bool(one == other)
