"""From the contents of a `config.json` to a `ModelConfig`. *Pure.*"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.gpu_worker.model.config import (
    MAX_LAYERS,
    ConfigError,
    ExpertConfig,
    LayerKind,
    ModelConfig,
    UnknownArchitectureError,
)
from services.gpu_worker.model.families import HF_FAMILIES, Family
from services.gpu_worker.model.hf_latent import latent_scale, read_experts, read_latent, sparse_from
from services.gpu_worker.model.hf_rope import FamilyKeys, read_ropes

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


def hf_family(values: Mapping[str, Any]) -> Family:
    architectures = values.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else "none"
    family = HF_FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise UnknownArchitectureError(f"architectures: {name} is not supported (known: {', '.join(HF_FAMILIES)})")
    return family


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """ConfigError names a key that is missing, wrong or not supported."""
    family = hf_family(values)
    keys = FamilyKeys(values, family)
    hidden_size, num_heads = keys.need("hidden_size", int), keys.need("num_attention_heads", int)
    num_layers = keys.need("num_hidden_layers", int)
    if not 1 <= num_layers <= MAX_LAYERS:
        raise ConfigError(f"num_hidden_layers: {num_layers} is not a sane size")
    latent = read_latent(keys)
    head_dim = keys.take("head_dim", int, hidden_size // max(1, num_heads))
    rotary, sparse = _rotary_layers(keys, num_layers), _sparse_layers(keys, num_layers)
    windowed, window = _windows(keys, rotary)
    full_rope, local_rope, rotary_dim = read_ropes(keys, head_dim)
    scale = keys.own("attention_multiplier", float, 0.0)
    if latent is not None:
        head_dim, rotary_dim = latent.nope_dim + latent.rope_dim, latent.rope_dim
        scale = latent_scale(latent, dict(values))
    all_biased, attention_bias = keys.own("use_bias", bool, False), keys.own("attention_bias", bool, False)
    qkv_bias = family.qkv_bias and keys.own("qkv_bias", bool, True) or keys.own("use_qkv_bias", bool, False)
    query_scalar = keys.own("query_pre_attn_scalar", float, 0.0)
    if query_scalar < 0:
        raise ConfigError(f"query_pre_attn_scalar: {query_scalar} is out of range")
    experts = _experts(keys) if "num_experts_per_tok" in family.reads else None
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
        attention_scale=query_scalar**-0.5 if query_scalar else scale,
        attention_softcap=keys.own("attn_logit_softcapping", float, 0.0),
        logit_softcap=keys.own("final_logit_softcapping", float, 0.0),
        sliding_window=window if any(windowed) else None,
        embedding_scale=keys.own("embedding_multiplier", float, hidden_size**0.5 if family.scales_embedding else 1.0),
        residual_scale=keys.own("residual_multiplier", float, 1.0),
        logit_scale=1.0 / (keys.own("logits_scaling", float, 1.0) or 1.0),
        experts=experts if any(sparse) else None,
        latent=latent,
        tied=keys.take("tie_word_embeddings", bool),
    )
    for key, known in family.constants.items():
        keys.expect(key, *known)
    keys.finish(INERT | family.ignores)
    return config


def _activation(keys: FamilyKeys) -> str:
    key = keys.family.activation_key
    name = keys.take(key, str, keys.family.assumes.get(key, "silu"))
    if name not in ACTIVATIONS:
        raise ConfigError(f"{key}: {name!r} is not supported (known: {', '.join(ACTIVATIONS)})")
    return ACTIVATIONS[name]


def _windows(keys: FamilyKeys, rotary: list[bool]) -> tuple[list[bool], int | None]:
    """Which layers see only a window of the last tokens, and how many those are."""
    family, num_layers = keys.family, len(rotary)
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
    elif "no_rope_layers" in family.reads:
        windowed = [not turns for turns in rotary]
    else:
        windowed = [not full_every or (i + 1) % full_every != 0 for i in range(num_layers)]
    if window is None or not switched_on or not window:
        return [False] * len(windowed), None
    return windowed, window


def _rotary_layers(keys: FamilyKeys, num_layers: int) -> list[bool]:
    every = keys.own("no_rope_layer_interval", int, 0)
    listed = keys.own("no_rope_layers", list)  # 1: this layer does turn
    if listed is not None:
        if len(listed) != num_layers or not all(type(x) is int and x in (0, 1) for x in listed):
            raise ConfigError(f"no_rope_layers: {num_layers} numbers 0 or 1 expected")
        return [bool(x) for x in listed]
    return [every < 1 or (i + 1) % every != 0 for i in range(num_layers)]


def _sparse_layers(keys: FamilyKeys, num_layers: int) -> list[bool]:
    if "num_experts_per_tok" not in keys.family.reads:
        return [False] * num_layers
    if "first_k_dense_replace" in keys.family.reads:
        return sparse_from(keys, num_layers)
    step, dense = keys.own("decoder_sparse_step", int, 1), keys.own("mlp_only_layers", list, [])
    if step < 1 or not all(type(i) is int for i in dense):
        raise ConfigError("decoder_sparse_step or mlp_only_layers is out of range")
    return [(i + 1) % step == 0 and i not in dense for i in range(num_layers)]


def _experts(keys: FamilyKeys) -> ExpertConfig:
    if "n_routed_experts" in keys.family.reads:
        return read_experts(keys)
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
