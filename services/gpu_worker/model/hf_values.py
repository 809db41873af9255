"""From a `ModelConfig` to the contents of a `config.json` that says the same. *Pure.*"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from services.gpu_worker.model.config import ConfigError, ModelConfig, RopeConfig
from services.gpu_worker.model.families import DEEPSEEK2, DEEPSEEK3, HF_FAMILIES, LLAMA, MISTRAL, MIXTRAL, Family
from services.gpu_worker.model.hf_config import ACTIVATIONS, config_from_hf
from services.gpu_worker.model.same_config import check_same, same_frequencies

_MODEL_TYPES = {
    "Gemma3ForCausalLM": "gemma3_text", "Qwen2MoeForCausalLM": "qwen2_moe", "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2", "DeepseekV3ForCausalLM": "deepseek_v3",
}  # fmt: skip
_LLAMA3 = tuple(  # factors of llama3 scaling that models were published with
    RopeConfig(kind="llama3", factor=factor, original_max_position=8192) for factor in (8.0, 16.0, 32.0)
)
_NAME_OF = {form: name for name, form in reversed(ACTIVATIONS.items())}


def architecture(family: Family, config: ModelConfig) -> str:
    """What transformers calls it; GGUF files call several architectures llama."""
    if family is LLAMA and config.experts is not None:
        family = MIXTRAL
    elif family is LLAMA and any(kind.windowed for kind in config.layers):
        family = MISTRAL
    elif family is DEEPSEEK3 and config.experts is not None and config.experts.scoring == "softmax":
        family = DEEPSEEK2
    return next(name for name, known in HF_FAMILIES.items() if known is family)


def hf_values(config: ModelConfig, family: Family, dtype: str) -> dict[str, Any]:
    """dtype is of the tensors. ConfigError for what this architecture's config.json has no words for."""
    name = architecture(family, config)
    family = HF_FAMILIES[name]
    values: dict[str, Any] = {
        "architectures": [name],
        "model_type": _MODEL_TYPES.get(name, name.removesuffix("ForCausalLM").lower()),
        "dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim if config.latent is None else config.latent.rope_dim,
        "max_position_embeddings": config.max_position_embeddings,
        family.eps_key: config.norm_eps,
        family.activation_key: _NAME_OF[config.activation],
        "tie_word_embeddings": bool(config.tied),
        "rope_theta": config.rope.theta,
        "pad_token_id": None,  # transformers' own may be beyond this vocabulary
    }
    values |= {key: value for key, value in _own_values(config).items() if key in family.reads}
    if scaling := _scaling(config):
        values["rope_scaling"] = scaling
    check_same(config, config_from_hf(values), "config.json")
    return values


def _own_values(config: ModelConfig) -> dict[str, Any]:
    """Keys that only some families have."""
    windowed, dense = [k.windowed for k in config.layers], [i for i, k in enumerate(config.layers) if not k.sparse]
    values: dict[str, Any] = {
        "attention_bias": config.out_bias,
        "mlp_bias": config.mlp_bias,
        "use_bias": config.mlp_bias,
        "use_qkv_bias": config.qkv_bias,
        "qkv_bias": config.qkv_bias,
        "sliding_window": config.sliding_window,
        "use_sliding_window": any(windowed),
        "layer_types": ["sliding_attention" if w else "full_attention" for w in windowed],
        "no_rope_layers": [int(kind.rotary) for kind in config.layers],
        "attention_multiplier": config.query_scale,
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": 1.0 / config.logit_scale,
        "attn_logit_softcapping": config.attention_softcap or None,
        "final_logit_softcapping": config.logit_softcap or None,
        "query_pre_attn_scalar": _whole(config.query_scale**-2),
        "partial_rotary_factor": config.turned / config.head_dim,
        "rope_local_base_freq": config.local_rope.theta if config.local_rope else None,
    }
    if config.rope.kind == "longrope":
        values["original_max_position_embeddings"] = config.rope.original_max_position
    if (experts := config.experts) is not None:
        values |= {
            "num_experts_per_tok": experts.num_used,
            "num_experts": experts.num_experts,
            "num_local_experts": experts.num_experts,
            "moe_intermediate_size": experts.intermediate_size,
            "norm_topk_prob": experts.renormalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense,
            "shared_expert_intermediate_size": experts.shared_size,
            "n_routed_experts": experts.num_experts,
            "n_shared_experts": experts.shared_size // experts.intermediate_size,
            "first_k_dense_replace": len(dense),
            "n_group": experts.num_groups,
            "topk_group": experts.num_used_groups,
            "topk_method": "greedy" if experts.num_groups == 1 else "group_limited_greedy",
            "routed_scaling_factor": experts.scale,
        }
    if (latent := config.latent) is not None:
        values |= {
            "kv_lora_rank": latent.rank,
            "q_lora_rank": latent.q_rank or None,
            "qk_rope_head_dim": latent.rope_dim,
            "qk_nope_head_dim": latent.nope_dim,
            "v_head_dim": latent.value_dim,
            "rope_interleave": latent.in_pairs,
        }
    return values


def _whole(value: float) -> float | int:
    """transformers takes no float where it has an integer."""
    return round(value) if math.isclose(value, round(value), rel_tol=1e-6) else value


def _scaling(config: ModelConfig) -> dict[str, Any]:
    rope = _without_factors(config)
    if rope.kind == "default":
        return {}
    values: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind in ("linear", "yarn", "llama3"):
        values["factor"] = rope.factor
    if rope.kind in ("yarn", "llama3", "longrope"):
        values["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        values |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        values |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    if config.latent is not None and rope.kind == "yarn":
        values |= _yarn_of_scores(config)
    elif rope.kind in ("yarn", "longrope"):
        values["attention_factor"] = rope.attention_factor
    if rope.kind == "longrope":
        values |= {"short_factor": list(rope.short_factors), "long_factor": list(rope.long_factors)}
    return values


def _yarn_of_scores(config: ModelConfig) -> dict[str, Any]:
    """DeepSeek's two numbers: scores grow by the second's factor twice, the tables by the first's over the second's."""
    sharper = math.sqrt(config.query_scale * math.sqrt(config.head_dim))
    step = 0.1 * math.log(config.rope.factor)
    if math.isclose(sharper, 1.0, rel_tol=1e-7):
        return {"attention_factor": config.rope.attention_factor}
    return {"mscale": (config.rope.attention_factor * sharper - 1.0) / step, "mscale_all_dim": (sharper - 1.0) / step}


def _without_factors(config: ModelConfig) -> RopeConfig:
    """GGUF files have factors of frequencies as a tensor; here they are llama3's, or longrope's for any context."""
    rope = config.rope
    if not rope.factors:
        return rope
    if rope.kind != "default":
        raise ConfigError("rope_freqs.weight: factors beside another scaling have no words in a config.json")
    for known in _LLAMA3:
        named = replace(known, theta=rope.theta)
        if same_frequencies(named, rope, config.turned, config.max_position_embeddings):
            return named
    longest = config.max_position_embeddings
    return RopeConfig(
        rope.theta, "longrope", original_max_position=longest, short_factors=rope.factors, long_factors=rope.factors
    )
