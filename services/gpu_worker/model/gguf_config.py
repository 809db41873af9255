"""From a GGUF file's metadata and the shapes of its tensors to a `ModelConfig`. *Pure.*"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.gpu_worker.model.config import (
    MAX_LAYERS,
    ConfigError,
    ExpertConfig,
    Keys,
    LatentConfig,
    LayerKind,
    ModelConfig,
    RopeConfig,
)
from services.gpu_worker.model.families import GGUF_FAMILIES, GGUF_WINDOWED, Family
from services.gpu_worker.model.hf_rope import yarn_scale

ROPE_FACTORS = {  # names of tensors
    "rope_freqs.weight": "factors",
    "rope_factors_short.weight": "short_factors",
    "rope_factors_long.weight": "long_factors",
}

_GATING = {1: "softmax", 2: "sigmoid"}

Shapes = Mapping[str, tuple[int, ...]]


def gguf_family(metadata: Mapping[str, Any]) -> Family:
    arch = metadata.get("general.architecture")
    family = GGUF_FAMILIES.get(arch) if isinstance(arch, str) else None
    if isinstance(arch, str) and arch in GGUF_WINDOWED and metadata.get(f"{arch}.attention.sliding_window"):
        family = GGUF_WINDOWED[arch]
    if family is None:
        raise ConfigError(f"general.architecture: {arch!r} is not supported (known: {', '.join(GGUF_FAMILIES)})")
    if metadata.get("split.count", 1) not in (0, 1):
        raise ConfigError("split.count: a file split in several is not supported")
    return family


def config_from_gguf(metadata: Mapping[str, Any], tensors: Shapes) -> ModelConfig:
    """Where the file's tensors show what is computed (biases, norms), they are asked."""
    family = gguf_family(metadata)
    prefix = f"{metadata['general.architecture']}."
    keys = Keys({k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}, prefix)
    hidden_size, num_heads = keys.need("embedding_length", int), keys.need("attention.head_count", int)
    num_layers = keys.need("block_count", int)
    if not 1 <= num_layers <= MAX_LAYERS:
        raise ConfigError(f"{prefix}block_count: {num_layers} is not a sane size")
    latent = _latent(keys)
    if latent is None:
        head_dim = keys.take("attention.key_length", int, hidden_size // max(1, num_heads))
        keys.expect("attention.value_length", head_dim)
    else:
        head_dim = latent.nope_dim + latent.rope_dim
    if family.gguf_pairs:  # the rows of whole heads have been reordered
        keys.expect("rope.dimension_count", head_dim)
    rotary_dim = keys.take("rope.dimension_count", int, head_dim)
    window, windowed = _windows(keys, family, num_layers)
    embedding = tensors.get("token_embd.weight", (0,))
    keys.expect("vocab_size", embedding[0])
    experts, rope = _experts(keys, family, tensors), _rope(keys)
    config = ModelConfig(
        vocab_size=embedding[0],
        hidden_size=hidden_size,
        intermediate_size=_feed_forward_length(keys, experts),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(keys, num_heads, latent),
        head_dim=head_dim,
        norm_eps=keys.need(f"attention.layer_norm{'_rms' if family.norm == 'rms' else ''}_epsilon", float),
        max_position_embeddings=keys.need("context_length", int),
        layers=_kinds(family, windowed, _by_layer(tensors, num_layers)),
        rope=rope,
        local_rope=_local_rope(keys, family, rope) if any(windowed) else None,
        rotary_dim=0 if rotary_dim == head_dim else rotary_dim,
        norm=family.norm,
        norms=family.norms,
        qkv_bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm=family.qk_norm,
        activation=family.gguf_activation,
        gated=family.gated,
        attention_scale=_attention_scale(keys, family, num_layers, hidden_size, num_heads)
        if latent is None
        else _latent_scale(keys, head_dim, rope),
        attention_softcap=keys.take("attn_logit_softcapping", float, family.assumes.get("attn_logit_softcapping", 0.0)),
        logit_softcap=keys.take("final_logit_softcapping", float, family.assumes.get("final_logit_softcapping", 0.0)),
        sliding_window=window,
        embedding_scale=hidden_size**0.5 if family.scales_embedding else _scale(keys, family, "embedding_scale", 1.0),
        residual_scale=_scale(keys, family, "residual_scale", 1.0),
        logit_scale=1.0 / (_scale(keys, family, "logit_scale", 1.0) or 1.0),
        experts=experts,
        latent=latent,
    )
    keys.expect("use_parallel_residual", False)
    keys.finish(frozenset())
    return config


def _latent(keys: Keys) -> LatentConfig | None:
    """Newer files say sizes of heads with `_mla`, and beside them those of the one head in the cache."""
    if not keys.has("attention.kv_lora_rank"):
        return None
    rank, rope_dim = keys.need("attention.kv_lora_rank", int), keys.need("rope.dimension_count", int)
    suffix = ""
    if keys.has("attention.key_length_mla"):
        suffix = "_mla"
        keys.expect("attention.key_length", rank + rope_dim)
        keys.expect("attention.value_length", rank)
    return LatentConfig(
        rank=rank,
        rope_dim=rope_dim,
        nope_dim=keys.need(f"attention.key_length{suffix}", int) - rope_dim,
        value_dim=keys.need(f"attention.value_length{suffix}", int),
        q_rank=keys.take("attention.q_lora_rank", int, 0),
    )


def _num_kv_heads(keys: Keys, num_heads: int, latent: LatentConfig | None) -> int:
    count = keys.take("attention.head_count_kv", int, num_heads)
    if latent is not None and count not in (1, num_heads):
        raise ConfigError(f"attention.head_count_kv: {count} with latent attention")
    return int(count) if latent is None else num_heads


def _latent_scale(keys: Keys, head_dim: int, rope: RopeConfig) -> float:
    sharper = 1.0
    if rope.kind == "yarn" and rope.factor > 1:
        sharper += keys.take("rope.scaling.yarn_log_multiplier", float, 0.0) * math.log(rope.factor)
    return float(head_dim**-0.5 * sharper * sharper)


def with_rope_factors(config: ModelConfig, factors: Mapping[str, tuple[float, ...]]) -> ModelConfig:
    """factors: of rotary frequencies, by the names of their tensors."""
    rope = config.rope
    for name, values in factors.items():
        changes: dict[str, Any] = {ROPE_FACTORS[name]: values}
        kind = rope.kind if name == "rope_freqs.weight" else "longrope"
        rope = replace(rope, kind=kind, **changes)
    return replace(config, rope=rope)


def _scale(keys: Keys, family: Family, key: str, absent: float) -> float:
    """One of Granite's factors; elsewhere such a key is left, so that it is refused."""
    return float(keys.take(key, float, absent)) if "residual_multiplier" in family.reads else absent


def _attention_scale(keys: Keys, family: Family, num_layers: int, hidden_size: int, num_heads: int) -> float:
    if num_layers == family.gguf_wide_scale_layers:
        return float((hidden_size / num_heads) ** -0.5)
    return _scale(keys, family, "attention.scale", 0.0)


def _local_rope(keys: Keys, family: Family, rope: RopeConfig) -> RopeConfig | None:
    """Of windowed layers, where it is another; it is never scaled."""
    if not family.gguf_local_theta and not family.plain_windows:
        return None
    return RopeConfig(float(keys.take("rope.freq_base_swa", float, family.gguf_local_theta or rope.theta)))


def _kinds(family: Family, windowed: list[bool], names: list[set[str]]) -> tuple[LayerKind, ...]:
    every = family.gguf_no_rope_every
    return tuple(
        LayerKind(windowed[i], not every or (i + 1) % every != 0, "ffn_gate_inp.weight" in names[i])
        for i in range(len(names))
    )


def _feed_forward_length(keys: Keys, experts: ExpertConfig | None) -> int:
    if experts is None:
        return int(keys.need("feed_forward_length", int))
    return int(keys.take("feed_forward_length", int, experts.intermediate_size)) or experts.intermediate_size


def _by_layer(tensors: Shapes, num_layers: int) -> list[set[str]]:
    """The names of each layer's tensors."""
    names: list[set[str]] = [set() for _ in range(num_layers)]
    for name in tensors:
        kind, _, rest = name.partition(".")
        number, _, rest = rest.partition(".")
        if kind == "blk" and number.isascii() and number.isdigit() and int(number) < num_layers:
            names[int(number)].add(rest)
    return names


def _windows(keys: Keys, family: Family, num_layers: int) -> tuple[int | None, list[bool]]:
    full_every = family.full_every
    window = keys.take("attention.sliding_window", int, family.assumes.get("sliding_window") if full_every else None)
    listed = _listed_windows(keys, full_every, num_layers)
    if not window or "use_sliding_window" in family.assumes:
        return None, [False] * num_layers
    return window, listed or [not full_every or (i + 1) % full_every != 0 for i in range(num_layers)]


def _listed_windows(keys: Keys, full_every: int, num_layers: int) -> list[bool]:
    """Which layers have a window, where the file lists them; nothing if it does not."""
    key = "attention.sliding_window_pattern"
    if not keys.is_list(key):
        keys.expect(key, full_every)
        return []
    listed = keys.take(key, list)
    if len(listed) != num_layers or not all(x in (0, 1) for x in listed):
        raise ConfigError(f"{key}: {num_layers} times true or false expected")
    return [bool(x) for x in listed]


def _experts(keys: Keys, family: Family, tensors: Shapes) -> ExpertConfig | None:
    num_experts = keys.take("expert_count", int, 0)
    num_used = keys.take("expert_used_count", int, 0)
    size = keys.take("expert_feed_forward_length", int, 0)
    shared_size = keys.take("expert_shared_feed_forward_length", int, 0)
    keys.take("leading_dense_block_count", int)  # tensors show it
    if not num_experts:
        return None
    groups, used_groups = (keys.take(f"expert_group_{name}", int, 1) or 1 for name in ("count", "used_count"))
    has_shared = any(name.endswith(".ffn_up_shexp.weight") for name in tensors)
    deepseek, gating = "n_routed_experts" in family.reads, keys.take("expert_gating_func", int, 1)
    if gating not in _GATING:
        raise ConfigError(f"expert_gating_func: {gating} is not supported (known: 1, softmax, and 2, sigmoid)")
    if deepseek:
        shared_size = keys.take("expert_shared_count", int, 0) * size
    return ExpertConfig(
        num_experts=num_experts,
        num_used=num_used,
        intermediate_size=size or keys.need("feed_forward_length", int),
        scoring=_GATING[gating],
        renormalize=keys.take("expert_weights_norm", bool, family.renormalize and not deepseek),
        scale=keys.take("expert_weights_scale", float, 1.0) or 1.0,
        choice_bias=any(name.endswith(".exp_probs_b.bias") for name in tensors),
        num_groups=groups,
        num_used_groups=used_groups,
        group_score="max" if _GATING[gating] == "softmax" else "top2",
        shared_size=shared_size if has_shared else 0,
        shared_gate=any(name.endswith(".ffn_gate_inp_shexp.weight") for name in tensors),
    )


def _rope(keys: Keys) -> RopeConfig:
    """Factors by frequency (of llama3 and longrope) are tensors of the file, see `weights.gguf`."""
    theta = keys.take("rope.freq_base", float, 10000.0)
    factor = keys.take("rope.scaling.factor", float, 1.0)
    kind = keys.take("rope.scaling.type", str, "none" if factor == 1.0 else "linear")
    original = keys.take("rope.scaling.original_context_length", int, 0)
    attention = keys.take("rope.scaling.attn_factor", float, 1.0)
    of_scores = keys.take("rope.scaling.yarn_log_multiplier", float, 0.0)  # then it is not of the rotary tables
    keys.expect("rope.scaling.finetuned", True, False)
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    if kind == "yarn":
        return RopeConfig(
            theta, kind, factor, original_max_position=max(1, original or keys.need("context_length", int)),
            attention_factor=attention * (1.0 if of_scores else yarn_scale(factor)),
            beta_fast=keys.take("rope.scaling.yarn_beta_fast", float, 32.0),
            beta_slow=keys.take("rope.scaling.yarn_beta_slow", float, 1.0),
        )  # fmt: skip
    if kind not in ("none", "longrope"):
        raise ConfigError(f"rope.scaling.type: {kind!r} is not supported (known: none, linear, yarn, longrope)")
    if attention != 1.0 or kind == "longrope":
        return RopeConfig(theta, "longrope", original_max_position=max(1, original), attention_factor=attention)
    return RopeConfig(theta)
