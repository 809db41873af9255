"""The rotary embedding of a `config.json`, in all of its spellings, and keys that only some families have. *Pure.*"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from services.gpu_worker.model.config import ConfigError, Keys, RopeConfig
from services.gpu_worker.model.families import Family

ROPE_INERT = frozenset({"original_max_position_embeddings"})  # of the kinds that do not use it
OLD_LONGROPE = ("su", "yarn")  # what Phi-3 called it


class FamilyKeys(Keys):
    """Keys, and those that only some families have: `own` leaves another family's untaken, so that it is refused."""

    def __init__(self, values: Mapping[str, Any], family: Family) -> None:
        super().__init__({**family.assumes, **values}, "")
        self.family = family

    def own(self, key: str, kind: type, default: Any = None) -> Any:
        return self.take(key, kind, default) if key in self.family.reads else default


def read_ropes(keys: FamilyKeys, head_dim: int) -> tuple[RopeConfig, RopeConfig | None, int]:
    """Of all layers or those that see everything, of windowed layers, and how many dimensions turn (0: all).

    All spellings: rope_theta with rope_scaling, the rope_parameters of transformers 5, and those by type of layer.
    """
    theta = keys.take("rope_theta", float, 10000.0)
    local_theta = keys.own("rope_local_base_freq", float)
    original = keys.own("original_max_position_embeddings", int)
    longest = keys.need("max_position_embeddings", int)
    scaling, parameters = keys.take("rope_scaling", dict, {}), keys.take("rope_parameters", dict, {})
    partial = keys.own("partial_rotary_factor", float, 1.0)
    if "full_attention" in parameters or "sliding_attention" in parameters:
        by_type = Keys(parameters, "rope_parameters.")
        full = by_type.take("full_attention", dict, {}) | scaling
        local = by_type.take("sliding_attention", dict, {})
        by_type.finish(frozenset())
    else:
        full, local = scaling | parameters, {}
    reader = _RopeReader(keys.family, longest, original, partial)
    rope = reader.read(full, theta)
    has_local = local or local_theta or keys.family.plain_windows
    local_rope = reader.read(local, local_theta or theta) if has_local else None
    partial = reader.partial
    if "partial_rotary_factor" not in keys.family.reads and partial != 1.0:
        raise ConfigError(f"partial_rotary_factor: {partial} is not supported")
    rotary_dim = 0 if partial == 1.0 else int(head_dim * partial)
    return rope, None if local_rope == rope else local_rope, rotary_dim


class _RopeReader:
    def __init__(self, family: Family, longest: int, original: int | None, partial: float) -> None:
        self._old_names = OLD_LONGROPE if "original_max_position_embeddings" in family.reads else ()
        self._longest = longest
        self._original = original
        self.partial = partial

    def read(self, values: Mapping[str, Any], theta: float) -> RopeConfig:
        rope = Keys(values, "rope_parameters.")
        kind = rope.take("rope_type", str) or rope.take("type", str) or "default"
        rope.expect("type", kind)
        kind = "longrope" if kind in self._old_names else kind
        theta = rope.take("rope_theta", float, theta)
        self.partial = rope.take("partial_rotary_factor", float, self.partial)
        if kind not in _READERS:
            raise ConfigError(f"rope_scaling: type {kind!r} is not supported (known: {', '.join(_READERS)})")
        config = _READERS[kind](self, rope, theta)
        rope.finish(ROPE_INERT)
        return config

    def default(self, rope: Keys, theta: float) -> RopeConfig:
        return RopeConfig(theta)

    def linear(self, rope: Keys, theta: float) -> RopeConfig:
        return RopeConfig(theta, "linear", rope.need("factor", float))

    def dynamic(self, rope: Keys, theta: float) -> RopeConfig:
        """It changes frequencies beyond the context of the configuration, which is all that is served."""
        rope.take("factor", float)
        return RopeConfig(theta)

    def llama3(self, rope: Keys, theta: float) -> RopeConfig:
        return RopeConfig(
            theta,
            "llama3",
            factor=rope.need("factor", float),
            low_freq_factor=rope.need("low_freq_factor", float),
            high_freq_factor=rope.need("high_freq_factor", float),
            original_max_position=rope.need("original_max_position_embeddings", int),
        )

    def yarn(self, rope: Keys, theta: float) -> RopeConfig:
        original = max(1, rope.take("original_max_position_embeddings", int, self._original or self._longest))
        factor = rope.take("factor", float, self._longest / original)
        scale, all_dim = rope.take("mscale", float, 0.0), rope.take("mscale_all_dim", float, 0.0)
        attention = yarn_scale(factor, scale) / yarn_scale(factor, all_dim) if scale and all_dim else yarn_scale(factor)
        return RopeConfig(
            theta, "yarn", factor, original_max_position=original,
            attention_factor=rope.take("attention_factor", float, attention),
            beta_fast=rope.take("beta_fast", float, 32.0), beta_slow=rope.take("beta_slow", float, 1.0),
            truncate=rope.take("truncate", bool, True),
        )  # fmt: skip

    def longrope(self, rope: Keys, theta: float) -> RopeConfig:
        original = rope.take("original_max_position_embeddings", int, self._original or self._longest)
        factor = rope.take("factor", float, self._longest / max(1, original))
        for name in ("short_factor", "long_factor"):
            rope.need(name, list)
        return RopeConfig(
            theta, "longrope", original_max_position=original,
            attention_factor=rope.take("attention_factor", float, longrope_scale(factor, original)),
            short_factors=rope.numbers("short_factor"), long_factors=rope.numbers("long_factor"),
        )  # fmt: skip


_READERS = {
    "default": _RopeReader.default,
    "linear": _RopeReader.linear,
    "dynamic": _RopeReader.dynamic,
    "llama3": _RopeReader.llama3,
    "yarn": _RopeReader.yarn,
    "longrope": _RopeReader.longrope,
}


def yarn_scale(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def longrope_scale(factor: float, original: int) -> float:
    return 1.0 if factor <= 1 or original < 2 else math.sqrt(1 + math.log(factor) / math.log(original))
