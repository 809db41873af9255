"""The architectures we know, as data: how each names and defaults what `ModelConfig` holds. *Pure.*

Llama, Mistral, Qwen2 and Qwen3 are one decoder with switches: biases, a norm of each head's query and key, and (in
GGUF files of the llama architecture) another order of the rows of the query and key projections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.gpu_worker.model.config import ConfigError, Keys, ModelConfig, RopeConfig


@dataclass(frozen=True, slots=True)
class Family:
    """`default_*` are what transformers assumes for an absent key (not for null); None: it follows from other keys."""

    qkv_bias: bool = False  # always; elsewhere attention_bias says
    qk_norm: bool = False
    default_kv_heads: int | None = None
    default_head_dim: int | None = None
    default_window: int | None = None
    window_needs_switch: bool = False  # use_sliding_window or layer_types
    gguf_pairs: bool = False  # GGUF stores the rows of a head's query and key in rotary pairs, not in halves


LLAMA = Family(gguf_pairs=True)
MISTRAL = Family(default_kv_heads=8, default_window=4096, gguf_pairs=True)
QWEN2 = Family(qkv_bias=True, default_kv_heads=32, window_needs_switch=True)
QWEN3 = Family(qk_norm=True, default_kv_heads=32, default_head_dim=128, window_needs_switch=True)

HF_FAMILIES = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
}
GGUF_FAMILIES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}

# Keys that say nothing about how logits are computed from token ids.
HF_INERT = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "dtype",
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
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)
ROPE_INERT = frozenset({"original_max_position_embeddings"})  # of the kinds that do not use it


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """From the contents of a `config.json`."""
    architectures = values.get("architectures") or ["none"]
    family = HF_FAMILIES.get(architectures[0])
    if family is None:
        raise ConfigError(f"architectures: {architectures[0]} is not supported (known: {', '.join(HF_FAMILIES)})")
    keys = Keys(values, "")
    keys.expect("hidden_act", "silu")
    keys.expect("partial_rotary_factor", 1.0, 1)
    hidden_size, num_heads = keys.need("hidden_size", int), keys.need("num_attention_heads", int)
    attention_bias = keys.take("attention_bias", bool, False)
    absent_kv_heads = num_heads if "num_key_value_heads" in values else family.default_kv_heads or num_heads
    config = ModelConfig(
        vocab_size=keys.need("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=keys.need("intermediate_size", int),
        num_layers=keys.need("num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=keys.take("num_key_value_heads", int, absent_kv_heads),
        head_dim=keys.take("head_dim", int, family.default_head_dim or hidden_size // max(1, num_heads)),
        rms_norm_eps=keys.take("rms_norm_eps", float, 1e-6),
        max_position_embeddings=keys.need("max_position_embeddings", int),
        rope=_hf_rope(keys),
        qkv_bias=family.qkv_bias or attention_bias,
        out_bias=attention_bias,
        mlp_bias=keys.take("mlp_bias", bool, False),
        qk_norm=family.qk_norm,
        sliding_window=_hf_window(keys, family, "sliding_window" in values),
        tied=keys.take("tie_word_embeddings", bool),
    )
    keys.finish(HF_INERT)
    return config


def _hf_rope(keys: Keys) -> RopeConfig:
    """Both spellings: rope_theta with rope_scaling, and the rope_parameters of transformers 5."""
    theta = keys.take("rope_theta", float, 10000.0)
    scaling, parameters = keys.take("rope_scaling", dict, {}), keys.take("rope_parameters", dict, {})
    rope = Keys(scaling | parameters, "rope_parameters.")
    kind = rope.take("rope_type", str) or rope.take("type", str) or "default"
    rope.expect("type", kind)
    theta = rope.take("rope_theta", float, theta)
    rope.expect("partial_rotary_factor", 1.0, 1)
    if kind == "default":
        config = RopeConfig(theta)
    elif kind == "linear":
        config = RopeConfig(theta, kind, rope.need("factor", float))
    elif kind == "llama3":
        config = RopeConfig(
            theta,
            kind,
            factor=rope.need("factor", float),
            low_freq_factor=rope.need("low_freq_factor", float),
            high_freq_factor=rope.need("high_freq_factor", float),
            original_max_position=rope.need("original_max_position_embeddings", int),
        )
    else:
        raise ConfigError(f"rope_scaling: type {kind!r} is not supported (known: default, linear, llama3)")
    rope.finish(ROPE_INERT)
    return config


def _hf_window(keys: Keys, family: Family, given: bool) -> int | None:
    """The sliding window of any layer, or None; a window in some layers only counts as one in all."""
    window = keys.take("sliding_window", int, None if given else family.default_window)
    switched_on = keys.take("use_sliding_window", bool, not family.window_needs_switch)
    layer_types = keys.take("layer_types", list, [])
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"layer_types: {layer_type!r} is not supported")
    if layer_types:
        switched_on = "sliding_attention" in layer_types
    return window if switched_on else None


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """From a GGUF file's metadata and the shapes of its tensors."""
    arch = metadata.get("general.architecture")
    family = GGUF_FAMILIES.get(arch or "")
    if family is None:
        raise ConfigError(f"general.architecture: {arch!r} is not supported (known: {', '.join(GGUF_FAMILIES)})")
    if metadata.get("split.count", 1) > 1:
        raise ConfigError("split.count: a file split in several is not supported")
    prefix = f"{arch}."
    keys = Keys({k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}, prefix)
    hidden_size, num_heads = keys.need("embedding_length", int), keys.need("attention.head_count", int)
    head_dim = keys.take("attention.key_length", int, hidden_size // max(1, num_heads))
    keys.expect("attention.value_length", head_dim)
    keys.expect("rope.dimension_count", head_dim)
    embedding = tensors.get("token_embd.weight", (0,))
    keys.expect("vocab_size", embedding[0])
    config = ModelConfig(
        vocab_size=embedding[0],
        hidden_size=hidden_size,
        intermediate_size=keys.need("feed_forward_length", int),
        num_layers=keys.need("block_count", int),
        num_heads=num_heads,
        num_kv_heads=keys.take("attention.head_count_kv", int, num_heads),
        head_dim=head_dim,
        rms_norm_eps=keys.need("attention.layer_norm_rms_epsilon", float),
        max_position_embeddings=keys.need("context_length", int),
        rope=_gguf_rope(keys),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        sliding_window=keys.take("attention.sliding_window", int) or None,
    )
    keys.expect("expert_count", 0)
    keys.expect("expert_used_count", 0)
    keys.finish(frozenset())
    return config


def _gguf_rope(keys: Keys) -> RopeConfig:
    """llama3 scaling is a tensor of the file (rope_freqs.weight) instead of metadata."""
    theta = keys.take("rope.freq_base", float, 10000.0)
    kind, factor = keys.take("rope.scaling.type", str, "none"), keys.take("rope.scaling.factor", float, 1.0)
    keys.take("rope.scaling.original_context_length", int)  # used by yarn alone
    keys.expect("rope.scaling.finetuned", True, False)
    if kind == "none":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    raise ConfigError(f"rope.scaling.type: {kind!r} is not supported (known: none, linear)")
