"""From the contents of a `config.json` to a `ModelConfig`. *Pure.*"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from services.gpu_worker.model.config import ConfigError, ExpertConfig, Keys, LayerKind, ModelConfig, RopeConfig
from services.gpu_worker.model.families import HF_FAMILIES, Family

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}

# Keys that say nothing about how logits are computed from token ids.
INERT = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "dtype",
        "embd_pdrop",
        "embedding_dropout",
        "eos_token_id",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "max_window_layers",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "resid_pdrop",
        "residual_dropout",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)
ROPE_INERT = frozenset({"original_max_position_embeddings"})  # of the kinds that do not use it
OLD_LONGROPE = ("su", "yarn")  # what Phi-3 called it


class _FamilyKeys(Keys):
    """Keys, and those that only some families have: `own` leaves another family's untaken, so that it is refused."""

    def __init__(self, values: Mapping[str, Any], family: Family) -> None:
        super().__init__({**family.assumes, **values}, "")
        self.family = family

    def own(self, key: str, kind: type, default: Any = None) -> Any:
        return self.take(key, kind, default) if key in self.family.reads else default


def hf_family(values: Mapping[str, Any]) -> Family:
    architectures = values.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else "none"
    family = HF_FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ConfigError(f"architectures: {name} is not supported (known: {', '.join(HF_FAMILIES)})")
    return family


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """ConfigError names a key that is missing, wrong or not supported."""
    family = hf_family(values)
    keys = _FamilyKeys(values, family)
    hidden_size, num_heads = keys.need("hidden_size", int), keys.need("num_attention_heads", int)
    num_layers = keys.need("num_hidden_layers", int)
    head_dim = keys.take("head_dim", int, hidden_size // max(1, num_heads))
    windowed, window = _windows(keys, num_layers)
    rotary, sparse = _rotary_layers(keys, num_layers), _sparse_layers(keys, num_layers)
    full_rope, local_rope, rotary_dim = _ropes(keys, head_dim)
    all_biased, attention_bias = keys.own("use_bias", bool, False), keys.own("attention_bias", bool, False)
    qkv_bias = family.qkv_bias and keys.own("qkv_bias", bool, True) or keys.own("use_qkv_bias", bool, False)
    query_scalar = keys.own("query_pre_attn_scalar", float)
    config = ModelConfig(
        vocab_size=keys.need("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=keys.need("intermediate_size", int),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.take("num_key_value_heads", int, num_heads),
        head_dim=head_dim,
        norm_eps=keys.take(family.eps_key, float, 1e-6),
        max_position_embeddings=keys.need("max_position_embeddings", int),
        layers=tuple(map(LayerKind, windowed, rotary, sparse)),
        rope=full_rope,
        local_rope=local_rope if any(windowed) else None,
        rotary_dim=rotary_dim,
        norm=family.norm,
        norms=family.norms,
        qkv_bias=qkv_bias or attention_bias or all_biased,
        out_bias=attention_bias or all_biased,
        mlp_bias=keys.own("mlp_bias", bool, False) or all_biased,
        qk_norm=family.qk_norm,
        activation=_activation(keys),
        gated=family.gated,
        attention_scale=query_scalar**-0.5 if query_scalar else keys.own("attention_multiplier", float, 0.0),
        attention_softcap=keys.own("attn_logit_softcapping", float, 0.0),
        logit_softcap=keys.own("final_logit_softcapping", float, 0.0),
        sliding_window=window if any(windowed) else None,
        embedding_scale=keys.own("embedding_multiplier", float, hidden_size**0.5 if family.scales_embedding else 1.0),
        residual_scale=keys.own("residual_multiplier", float, 1.0),
        logit_scale=1.0 / (keys.own("logits_scaling", float, 1.0) or 1.0),
        experts=_experts(keys) if any(sparse) else None,
        tied=keys.take("tie_word_embeddings", bool),
    )
    for key, value in family.constants.items():
        keys.expect(key, value)
    keys.finish(INERT | family.ignores)
    return config


def _activation(keys: _FamilyKeys) -> str:
    name = keys.take(keys.family.activation_key, str, "silu")
    if name not in ACTIVATIONS:
        raise ConfigError(f"{keys.family.activation_key}: {name!r} is not supported (known: {', '.join(ACTIVATIONS)})")
    return ACTIVATIONS[name]


def _windows(keys: _FamilyKeys, num_layers: int) -> tuple[list[bool], int | None]:
    """Which layers see only a window of the last tokens, and how many those are."""
    family = keys.family
    window = keys.own("sliding_window", int)
    switched_on = keys.own("use_sliding_window", bool, family.assumes.get("use_sliding_window", True))
    full_every = keys.own("sliding_window_pattern", int, keys.own("_sliding_window_pattern", int, family.full_every))
    layer_types = keys.own("layer_types", list, [])
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"layer_types: {layer_type!r} is not supported")
    if layer_types:
        windowed = [layer_type == "sliding_attention" for layer_type in layer_types]
    elif "max_window_layers" in family.reads:
        first = keys.own("max_window_layers", int, 0)
        windowed = [i >= first for i in range(num_layers)]
    else:
        windowed = [not full_every or (i + 1) % full_every != 0 for i in range(num_layers)]
    if window is None or not switched_on or not window:
        return [False] * len(windowed), None
    return windowed, window


def _rotary_layers(keys: _FamilyKeys, num_layers: int) -> list[bool]:
    every = keys.own("no_rope_layer_interval", int, 0)
    listed = keys.own("no_rope_layers", list)  # 1: this layer does turn
    if listed is not None:
        if len(listed) != num_layers or not all(type(x) is int and x in (0, 1) for x in listed):
            raise ConfigError(f"no_rope_layers: {num_layers} numbers 0 or 1 expected")
        return [bool(x) for x in listed]
    return [every < 1 or (i + 1) % every != 0 for i in range(num_layers)]


def _sparse_layers(keys: _FamilyKeys, num_layers: int) -> list[bool]:
    if "num_experts_per_tok" not in keys.family.reads:
        return [False] * num_layers
    step, dense = keys.own("decoder_sparse_step", int, 1), keys.own("mlp_only_layers", list, [])
    if step < 1 or not all(type(i) is int for i in dense):
        raise ConfigError("decoder_sparse_step or mlp_only_layers is out of range")
    return [(i + 1) % step == 0 and i not in dense for i in range(num_layers)]


def _experts(keys: _FamilyKeys) -> ExpertConfig:
    shared_size = keys.own("shared_expert_intermediate_size", int, 0)
    num_local, num_experts = keys.own("num_local_experts", int), keys.own("num_experts", int, 0)  # two names for one
    return ExpertConfig(
        num_experts=num_local or num_experts,
        num_used=keys.own("num_experts_per_tok", int, 0),
        intermediate_size=keys.own("moe_intermediate_size", int) or keys.need("intermediate_size", int),
        renormalize=keys.own("norm_topk_prob", bool, keys.family.renormalize),
        shared_size=shared_size,
        shared_gate=shared_size > 0,
    )


# --- rotary embedding ------------------------------------------------------------------------------------------------


def _ropes(keys: _FamilyKeys, head_dim: int) -> tuple[RopeConfig, RopeConfig | None, int]:
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
    local_rope = reader.read(local, local_theta or theta) if local or local_theta else None
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
