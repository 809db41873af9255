"""Configurations: what is understood, and that nothing which changes the computation is ignored."""

from __future__ import annotations

from typing import Any

import pytest

from services.gpu_worker.model.config import ConfigError, ModelConfig
from services.gpu_worker.model.families import config_from_gguf, config_from_hf

HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0",
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 16,
    "llama.vocab_size": 100,
    "tokenizer.ggml.model": "gpt2",
}
GGUF_TENSORS = {"token_embd.weight": (100, 64)}


def hf(**changes: Any) -> ModelConfig:
    return config_from_hf(HF | changes)


def gguf(tensors: dict[str, tuple[int, ...]] | None = None, **changes: Any) -> ModelConfig:
    return config_from_gguf(GGUF | changes, GGUF_TENSORS | (tensors or {}))


def qwen2(**changes: Any) -> ModelConfig:
    return hf(architectures=["Qwen2ForCausalLM"], model_type="qwen2", **changes)


def test_both_formats_say_the_same() -> None:
    assert hf() == gguf()
    assert hf().head_dim == 16


def test_spellings_of_rope() -> None:
    assert hf(rope_theta=5e5).rope.theta == 5e5
    assert hf(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}) == hf(rope_theta=5e5)
    old = hf(rope_theta=100.0, rope_scaling={"type": "linear", "factor": 4})
    new = hf(rope_parameters={"rope_theta": 100.0, "rope_type": "linear", "factor": 4.0})
    assert old == new and old.rope.kind == "linear" and old.rope.factor == 4.0
    assert gguf(**{"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}).rope.factor == 4.0
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert hf(rope_scaling=scaling).rope.original_max_position == 8192


def test_families_differ_in_switches() -> None:
    assert qwen2().qkv_bias and not qwen2().out_bias
    qwen3 = hf(architectures=["Qwen3ForCausalLM"], num_key_value_heads=None)
    assert qwen3.qk_norm and qwen3.head_dim == 128
    biased = hf(attention_bias=True, mlp_bias=True)
    assert biased.qkv_bias and biased.out_bias and biased.mlp_bias
    assert gguf({"blk.0.attn_q.bias": (64,)}).qkv_bias
    assert gguf({"blk.0.attn_q_norm.weight": (16,)}).qk_norm


def test_sliding_windows() -> None:
    def mistral(**changes: Any) -> int | None:
        return hf(architectures=["MistralForCausalLM"], **changes).sliding_window

    assert mistral() == 4096  # what transformers assumes
    assert mistral(sliding_window=None) is None
    assert mistral(sliding_window=128) == 128
    assert qwen2(sliding_window=128, max_window_layers=1).sliding_window is None
    assert qwen2(sliding_window=128, use_sliding_window=True).sliding_window == 128
    assert qwen2(sliding_window=128, layer_types=["full_attention", "full_attention"]).sliding_window is None
    assert qwen2(sliding_window=128, layer_types=["full_attention", "sliding_attention"]).sliding_window == 128


@pytest.mark.parametrize("value", [True, False, None])
def test_tied_is_what_the_configuration_says(value: bool | None) -> None:
    assert hf(tie_word_embeddings=value).tied is value


def test_what_changes_nothing_may_be_there() -> None:
    assert hf(use_cache=False, initializer_range=0.3, bos_token_id=[1, 2], attention_dropout=0.1) == hf()
    assert hf(quantization_config=None, some_new_switch=False, another={}) == hf()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures: GPT2LMHeadModel"),
        ({"architectures": None}, "architectures"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"logit_scale": 0.0625}, "logit_scale"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.*yarn"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_scaling.*dynamic"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_parameters.factor is missing"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
        ({"rope_scaling": {"type": "linear", "rope_type": "default"}}, "rope_parameters.type"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "rope_scaling"),
        ({"layer_types": ["chunked_attention"]}, "layer_types"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": "100"}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 10**12}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
    ],
)
def test_hf_keys_are_understood_or_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        hf(**changes)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"general.architecture": "gemma"}, "general.architecture: 'gemma'"),
        ({"split.count": 2}, "split.count"),
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count"),
        ({"llama.attention.value_length": 32}, "llama.attention.value_length"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type.*yarn"),
        ({"llama.attention.head_count_kv": [2, 2]}, "llama.attention.head_count_kv"),
        ({"llama.logit_scale": 2.0}, "llama.logit_scale"),
        ({"llama.vocab_size": 99}, "llama.vocab_size"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
    ],
)
def test_gguf_keys_are_understood_or_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        gguf(**changes)
