"""From a `ModelConfig` to the metadata of a GGUF file that says the same. *Pure.*"""

from __future__ import annotations

import math
from typing import Any

import torch

from services.gpu_worker.model.config import ConfigError, ExpertConfig, LatentConfig, ModelConfig, RopeConfig
from services.gpu_worker.model.families import (
    DEEPSEEK2,
    DEEPSEEK3,
    GGUF_FAMILIES,
    GGUF_WINDOWED,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    Family,
)
from services.gpu_worker.model.hf_rope import yarn_scale
from services.gpu_worker.model.rope import rope_frequencies


def gguf_family_of(family: Family) -> tuple[str, Family]:
    """The file's name of the architecture; ConfigError where llama.cpp has none that we know."""
    family = LLAMA if family in (MISTRAL, MIXTRAL) else DEEPSEEK3 if family is DEEPSEEK2 else family
    known = (*GGUF_FAMILIES.items(), *GGUF_WINDOWED.items())
    found = next((arch for arch, one in known if one is family), None)
    if found is None:
        raise ConfigError(f"this architecture has no GGUF form here (known: {', '.join(GGUF_FAMILIES)})")
    return found, family


def gguf_values(config: ModelConfig, arch: str, family: Family) -> dict[str, Any]:
    """Keys with the architecture's prefix."""
    values: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        f"attention.layer_norm{'_rms' if config.norm == 'rms' else ''}_epsilon": config.norm_eps,
        "rope.dimension_count": config.turned,
        "rope.freq_base": config.rope.theta,
        "vocab_size": config.vocab_size,
        **_scaling(config.rope),
    }
    if config.sliding_window is not None:
        values["attention.sliding_window"] = config.sliding_window
    if family in GGUF_WINDOWED.values():
        values["attention.sliding_window_pattern"] = [kind.windowed for kind in config.layers]
    if config.local_rope is not None and config.local_rope.theta != config.rope.theta:
        values["rope.freq_base_swa"] = config.local_rope.theta
    if config.attention_softcap or config.logit_softcap:
        values |= {
            "attn_logit_softcapping": config.attention_softcap, "final_logit_softcapping": config.logit_softcap,
        }  # fmt: skip
    if "residual_multiplier" in family.reads:
        values |= {
            "attention.scale": config.query_scale,
            "embedding_scale": config.embedding_scale,
            "residual_scale": config.residual_scale,
            "logit_scale": 1.0 / config.logit_scale,
        }
    if (experts := config.experts) is not None:
        values |= {"expert_count": experts.num_experts, "expert_used_count": experts.num_used}
        if family is not LLAMA:
            values["expert_feed_forward_length"] = experts.intermediate_size
        if family is DEEPSEEK3:
            values |= _deepseek_experts(config, experts)
        elif experts.shared_size:
            values["expert_shared_feed_forward_length"] = experts.shared_size
    if (latent := config.latent) is not None:
        values |= _latent(config, latent)
    return {f"{arch}.{key}": value for key, value in values.items()}


def _deepseek_experts(config: ModelConfig, experts: ExpertConfig) -> dict[str, Any]:
    return {
        "leading_dense_block_count": [kind.sparse for kind in config.layers].index(True),
        "expert_shared_count": experts.shared_size // experts.intermediate_size,
        "expert_gating_func": 1 if experts.scoring == "softmax" else 2,
        "expert_weights_norm": experts.renormalize,
        "expert_weights_scale": experts.scale,
        "expert_group_count": experts.num_groups,
        "expert_group_used_count": experts.num_used_groups,
    }


def _latent(config: ModelConfig, latent: LatentConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "attention.kv_lora_rank": latent.rank,
        "attention.key_length": latent.nope_dim + latent.rope_dim,
        "attention.value_length": latent.value_dim,
    }
    if latent.q_rank:
        values["attention.q_lora_rank"] = latent.q_rank
    sharper = math.sqrt(config.query_scale * math.sqrt(config.head_dim))
    if config.rope.kind == "yarn" and not math.isclose(sharper, 1.0, rel_tol=1e-7):
        values["rope.scaling.yarn_log_multiplier"] = (sharper - 1.0) / math.log(config.rope.factor)
        values["rope.scaling.attn_factor"] = config.rope.attention_factor
    return values


def _scaling(rope: RopeConfig) -> dict[str, Any]:
    if rope.kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": rope.factor}
    if rope.kind == "yarn":
        if not rope.truncate:
            raise ConfigError("rope_scaling: truncate false has no words in a GGUF file")
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope.factor,
            "rope.scaling.original_context_length": rope.original_max_position,
            "rope.scaling.attn_factor": rope.attention_factor / yarn_scale(rope.factor),
            "rope.scaling.yarn_beta_fast": rope.beta_fast,
            "rope.scaling.yarn_beta_slow": rope.beta_slow,
        }
    if rope.kind == "longrope":
        return {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": rope.original_max_position,
            "rope.scaling.attn_factor": rope.attention_factor,
        }
    return {}


def rope_tensors(config: ModelConfig) -> dict[str, torch.Tensor]:
    """What GGUF files say of rotary frequencies in tensors, float32 [frequencies]."""
    rope = config.rope
    if rope.kind == "longrope":
        factors = {"long": rope.long_factors, "short": rope.short_factors}
        return {f"rope_factors_{kind}.weight": torch.tensor(values) for kind, values in factors.items() if values}
    if rope.kind == "llama3" or rope.factors:
        plain = rope_frequencies(RopeConfig(rope.theta), config.turned, 1)
        return {"rope_freqs.weight": plain / rope_frequencies(rope, config.turned, 1)}
    return {}
