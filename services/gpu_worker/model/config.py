"""What a decoder computes, as numbers and switches; `hf_config` and `gguf_config` read it from a model's files. *Pure.*

A key that changes the computation is understood or refused by name (`ConfigError`), never ignored: a key that nobody
took is refused unless its value says "off". Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_LAYERS = 4096
MAX_NUMBER = 1e30  # larger ones, and what is no number, are nobody's choice


class ConfigError(ValueError):
    """The model asks for something that is not supported, or its configuration is wrong; the message names the key."""


class UnknownArchitectureError(ConfigError):
    """We have no description of the architecture of this folder."""


class NotNativeError(ConfigError):
    """Native ops cannot compute this model, though torch's can; the message says what stands in the way."""


class NotOnGpuError(ConfigError):
    """A GPU cannot compute this model, or has no room for it, though a CPU can; the message says what is in the way."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary frequencies theta^(-2i/R), changed by kind: default, linear, llama3, yarn or longrope.

    attention_factor multiplies cosines and sines. The factors are what each of the R / 2 frequencies is divided by:
    always, and in longrope one set for contexts up to original_max_position and another for longer ones.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """A mixture of experts as the feed-forward part of some layers.

    The router's scores are its softmax or sigmoid. Chosen are the best experts by score, plus a bias where there is
    one, after leaving out all but the best groups; their weights are the scores, renormalised or not, times scale.
    """

    num_experts: int
    num_used: int
    intermediate_size: int
    scoring: str = "softmax"  # or "sigmoid"
    renormalize: bool = True
    scale: float = 1.0
    choice_bias: bool = False
    num_groups: int = 1
    num_used_groups: int = 1
    group_score: str = "max"  # or "top2": the sum of a group's two best
    shared_size: int = 0  # intermediate size of the expert that every token passes; 0: none
    shared_gate: bool = False  # its output is weighed by a sigmoid of the input

    def __post_init__(self) -> None:
        for name in ("num_experts", "intermediate_size"):
            if not 1 <= getattr(self, name) <= 1 << 20:
                raise ConfigError(f"{name}: {getattr(self, name)} is not a sane size")
        if not 1 <= self.num_used <= self.num_experts:
            raise ConfigError(f"num_experts_per_tok: {self.num_used} of {self.num_experts} experts")
        if not 1 <= self.num_used_groups <= self.num_groups or self.num_experts % self.num_groups:
            raise ConfigError(f"n_group: {self.num_used_groups} of {self.num_groups} for {self.num_experts} experts")
        if not 0 <= self.shared_size <= 1 << 24:
            raise ConfigError(f"shared_expert_intermediate_size: {self.shared_size} is not a sane size")


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Keys and values as one latent of `rank` numbers a token, and one turned part of the key for all heads (MLA).

    q_rank: queries come from a latent of their own; 0: from the input. A head's query is nope_dim plain numbers and
    rope_dim turned ones. in_pairs: files have the rows of turned parts in rotary pairs, not in halves.
    """

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_rank: int = 0
    in_pairs: bool = True

    def __post_init__(self) -> None:
        for name in ("rank", "rope_dim", "nope_dim", "value_dim"):
            if not 1 <= getattr(self, name) <= 1 << 16:
                raise ConfigError(f"{name}: {getattr(self, name)} is not a sane size of latent attention")
        if self.rope_dim % 2 or not 0 <= self.q_rank <= 1 << 16:
            raise ConfigError(f"qk_rope_head_dim or q_lora_rank: {self.rope_dim} or {self.q_rank} cannot be")

    @property
    def row(self) -> int:
        """Numbers that a token has in the cache."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class LayerKind:
    """In what layers of one model differ."""

    windowed: bool = False
    rotary: bool = True
    sparse: bool = False  # its feed-forward part is a mixture of experts


PRE_NORMS = ("attn_norm", "ffn_norm")
POST_NORMS = ("attn_post_norm", "ffn_post_norm")
ALL_NORMS = (*PRE_NORMS, *POST_NORMS)


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
    norm_eps: float
    max_position_embeddings: int
    layers: tuple[LayerKind, ...]
    rope: RopeConfig = field(default_factory=RopeConfig)
    local_rope: RopeConfig | None = None  # of windowed layers, where it is another
    rotary_dim: int = 0  # the first dimensions of a head that turn; 0: all
    norm: str = "rms"  # or "layer": mean subtracted, with a bias
    norms: tuple[str, ...] = PRE_NORMS  # before attention and feed-forward part, or on what they add
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = ""  # "head": of each head's query and key; "row": of all heads' together
    activation: str = "silu"  # or "gelu_tanh"
    gated: bool = True
    attention_scale: float = 0.0  # 0: 1 / sqrt(head_dim)
    attention_softcap: float = 0.0  # 0: none
    logit_softcap: float = 0.0
    sliding_window: int | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    experts: ExpertConfig | None = None
    latent: LatentConfig | None = None
    tied: bool | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if not 1 <= getattr(self, name) <= 1 << 24:
                raise ConfigError(f"{name}: {getattr(self, name)} is not a sane size")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_key_value_heads: {self.num_kv_heads} does not divide {self.num_heads} heads")
        if self.head_dim % 2 or not 2 <= self.head_dim <= 1024:
            raise ConfigError(f"head_dim: {self.head_dim} is not an even number from 2 to 1024")
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            raise ConfigError(f"partial_rotary_factor: {self.rotary_dim} of {self.head_dim} dimensions cannot turn")
        if not self.gated and self.activation != "gelu_tanh":
            raise ConfigError(f"hidden_act: {self.activation} is not supported without a gate")
        if self.max_position_embeddings < 1 or not 0 < self.norm_eps < 1:
            raise ConfigError("max_position_embeddings or rms_norm_eps is out of range")
        if len(self.layers) != self.num_layers:
            raise ConfigError(f"layer_types: {len(self.layers)} entries for {self.num_layers} layers")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window: {self.sliding_window} is not a number of tokens")
        for rope in filter(None, (self.rope, self.local_rope)):
            _check_rope(rope, (self.rotary_dim or self.head_dim) // 2)

    @property
    def turned(self) -> int:
        """How many dimensions of a head turn."""
        return self.rotary_dim or self.head_dim

    @property
    def cache_heads(self) -> int:
        return self.num_kv_heads if self.latent is None else 1

    @property
    def cache_dim(self) -> int:
        """Numbers of a token's head in the cache, in K and in V; of a latent K is V."""
        return self.head_dim if self.latent is None else self.latent.row

    @property
    def query_scale(self) -> float:
        return self.attention_scale or self.head_dim**-0.5


def _check_rope(rope: RopeConfig, num_frequencies: int) -> None:
    if rope.kind == "yarn" and not rope.theta > 1:
        raise ConfigError(f"rope_theta: {rope.theta} is out of range")
    if not rope.theta > 0 or not rope.factor > 0 or not rope.attention_factor > 0 or rope.original_max_position < 1:
        raise ConfigError("rope_scaling or rope_theta: a number is out of range")
    if not rope.low_freq_factor < rope.high_freq_factor or not rope.beta_slow > 0 or not rope.beta_fast > 0:
        raise ConfigError("rope_scaling: a factor is out of range")
    for name in ("factors", "short_factors", "long_factors"):
        factors = getattr(rope, name)
        if factors and (len(factors) != num_frequencies or not all(0 < x < float("inf") for x in factors)):
            raise ConfigError(f"rope_scaling: {name} must be {num_frequencies} positive numbers")


class Keys:
    """A configuration being read: `take` marks a key as understood, `finish` refuses those nobody took."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = dict(values)
        self._where = where
        self._taken: set[str] = set()

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def is_list(self, key: str) -> bool:
        return isinstance(self._values.get(key), list)

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        """The value, of this type (an int serves as a float); default if the key is absent or null."""
        self._taken.add(key)
        value = self._values.get(key)
        if value is None:
            return default
        self._check_size(key, value)
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

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers; empty if the key is absent."""
        values = self.take(key, list, [])
        if not all(type(x) in (int, float) for x in values):
            raise ConfigError(f"{self._where}{key}: a list of numbers expected")
        self._check_size(key, *values)
        return tuple(float(x) for x in values)

    def _check_size(self, key: str, *values: Any) -> None:
        if not all(abs(x) < MAX_NUMBER for x in values if type(x) in (int, float)):
            raise ConfigError(f"{self._where}{key}: a number is out of range")

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
