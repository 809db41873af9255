"""What a decoder computes, as numbers and switches; read from a `config.json` or from GGUF metadata. *Pure.*

A key that changes the computation is understood or refused by name (`ConfigError`), never ignored: a key that is in
neither of a family's tables is refused unless its value says "off". Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class ConfigError(ValueError):
    """The model asks for something that is not supported, or its configuration is wrong; the message names the key."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary frequencies: theta^(-2i/D), scaled by kind ("default", "linear" or "llama3")."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """tied: what the configuration says of the output head (None: nothing); the checkpoint's tensors decide."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    tied: bool | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if not 1 <= getattr(self, name) <= 1 << 24:
                raise ConfigError(f"{name}: {getattr(self, name)} is not a sane size")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_key_value_heads: {self.num_kv_heads} does not divide {self.num_heads} heads")
        if self.head_dim % 2 or not 2 <= self.head_dim <= 1024:
            raise ConfigError(f"head_dim: {self.head_dim} is not an even number from 2 to 1024")
        if self.max_position_embeddings < 1 or not 0 < self.rms_norm_eps < 1 or not self.rope.theta > 0:
            raise ConfigError("max_position_embeddings, rms_norm_eps or rope_theta is out of range")
        if not self.rope.factor > 0 or not self.rope.low_freq_factor < self.rope.high_freq_factor:
            raise ConfigError("rope_scaling: a factor is out of range")


class Keys:
    """A configuration being read: `take` marks a key as understood, `finish` refuses those nobody took."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = dict(values)
        self._where = where
        self._taken: set[str] = set()

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        """The value, of this type (an int serves as a float); default if the key is absent or null."""
        self._taken.add(key)
        value = self._values.get(key)
        if value is None:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ConfigError(f"{self._where}{key}: {kind.__name__} expected, got {value!r}")
        return value

    def need(self, key: str, kind: type) -> Any:
        value = self.take(key, kind)
        if value is None:
            raise ConfigError(f"{self._where}{key} is missing")
        return value

    def expect(self, key: str, *allowed: Any) -> None:
        """The key is absent or has one of these values; any other computation is not supported."""
        self._taken.add(key)
        value = self._values.get(key)
        if value is not None and value not in allowed:
            raise ConfigError(f"{self._where}{key}: {value!r} is not supported")

    def finish(self, inert: frozenset[str]) -> None:
        for key, value in self._values.items():
            if key not in self._taken and key not in inert and value not in (None, False, "", [], {}):
                raise ConfigError(f"{self._where}{key}: {str(value)[:100]} is not supported")
