"""Configurations: what is understood, and that nothing which changes the computation is ignored."""

from __future__ import annotations

from typing import Any

import pytest

from services.gpu_worker.model.config import ConfigError, LayerKind, ModelConfig, RopeConfig
from services.gpu_worker.model.gguf_config import config_from_gguf
from services.gpu_worker.model.hf_config import config_from_hf

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
STARCODER2 = {"architectures": ["Starcoder2ForCausalLM"], "rms_norm_eps": None}
STABLELM = {"architectures": ["StableLmForCausalLM"], "rms_norm_eps": None}
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
    assert gguf(**{"llama.rope.scaling.factor": 4.0}).rope == RopeConfig(kind="linear", factor=4.0)  # as llama.cpp
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert hf(rope_scaling=scaling).rope.original_max_position == 8192


def test_scaling_is_not_for_the_windowed_layers_of_olmo_3() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
    olmo3 = hf(architectures=["Olmo3ForCausalLM"], num_hidden_layers=4, rope_theta=500.0, rope_scaling=yarn)
    assert olmo3.rope.kind == "yarn" and olmo3.local_rope == RopeConfig(500.0)
    parameters = {"full_attention": yarn | {"rope_theta": 500.0}, "sliding_attention": {"rope_theta": 500.0}}
    assert olmo3 == hf(architectures=["Olmo3ForCausalLM"], num_hidden_layers=4, rope_parameters=parameters)


def test_families_differ_in_switches() -> None:
    assert qwen2().qkv_bias and not qwen2().out_bias
    qwen3 = hf(architectures=["Qwen3ForCausalLM"], num_key_value_heads=None)
    assert qwen3.qk_norm and qwen3.head_dim == 128
    biased = hf(attention_bias=True, mlp_bias=True)
    assert biased.qkv_bias and biased.out_bias and biased.mlp_bias
    assert gguf({"blk.0.attn_q.bias": (64,)}).qkv_bias
    assert all(kind == LayerKind() for kind in biased.layers)
    factors = {"attention_multiplier": 0.5, "logits_scaling": 4, "residual_multiplier": 3}
    granite = hf(architectures=["GraniteForCausalLM"], **factors)
    assert granite.query_scale == 0.5 and granite.logit_scale == 0.25 and granite.residual_scale == 3.0
    assert hf().query_scale == 0.25


@pytest.mark.parametrize("name", ["Gemma", "Gemma2", "Gemma3"])
def test_gemmas_activation_is_what_was_meant_when_they_were_published(name: str) -> None:
    gemma: dict[str, Any] = {"architectures": [f"{name}ForCausalLM"], "head_dim": 16}
    for act in ("gelu", "gelu_pytorch_tanh", None):
        for activation in ("gelu_pytorch_tanh", None):
            assert hf(**gemma, hidden_act=act, hidden_activation=activation).activation == "gelu_tanh"
    for changes in ({"hidden_act": "silu"}, {"hidden_act": None, "hidden_activation": "gelu"}):
        with pytest.raises(ConfigError, match="hidden_act"):
            hf(**gemma | changes)
    if name != "Gemma":
        assert hf(**gemma, hidden_act=None, sliding_window_size=4096) == hf(**gemma, hidden_act=None)


def test_layers_differ_by_pattern() -> None:
    smollm3 = hf(architectures=["SmolLM3ForCausalLM"], num_hidden_layers=8)
    assert [i for i, kind in enumerate(smollm3.layers) if not kind.rotary] == [3, 7]
    gemma3 = hf(architectures=["Gemma3ForCausalLM"], num_hidden_layers=7, head_dim=16, hidden_act=None)
    assert [i for i, kind in enumerate(gemma3.layers) if not kind.windowed] == [5]
    assert gemma3.rope.theta == 1e6 and gemma3.local_rope == RopeConfig(10000.0)
    moe = hf(architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [i for i, kind in enumerate(moe.layers) if kind.sparse] == [1]
    assert moe.experts is not None and moe.experts.num_experts == 128 and not moe.experts.renormalize


def test_what_old_files_of_gemma_2_leave_out() -> None:
    """As llama.cpp: its first converter did not write it."""
    old = {key.replace("llama.", "gemma2."): value for key, value in GGUF.items()} | {"general.architecture": "gemma2"}
    config = config_from_gguf(old, GGUF_TENSORS)
    assert (config.sliding_window, config.attention_softcap, config.logit_softcap) == (4096, 50.0, 30.0)


def test_sliding_windows() -> None:
    def of(config: ModelConfig) -> tuple[int | None, list[bool]]:
        return config.sliding_window, [kind.windowed for kind in config.layers]

    def mistral(**changes: Any) -> tuple[int | None, list[bool]]:
        return of(hf(architectures=["MistralForCausalLM"], **changes))

    assert mistral() == (4096, [True, True])  # what transformers assumes
    assert mistral(sliding_window=None) == (None, [False, False])
    assert mistral(sliding_window=128) == (128, [True, True])
    on = {"sliding_window": 128, "use_sliding_window": True}
    assert of(qwen2(sliding_window=128, max_window_layers=1)) == (None, [False, False])
    assert of(qwen2(**on, max_window_layers=1)) == (128, [False, True])
    assert of(qwen2(**on)) == (None, [False, False])  # the first 28 layers are not
    assert of(qwen2(**on, layer_types=["full_attention", "full_attention"])) == (None, [False, False])
    assert of(qwen2(**on, layer_types=["sliding_attention", "full_attention"])) == (128, [True, False])
    assert of(gguf(**{"llama.attention.sliding_window": 64})) == (64, [True, True])
    listed = {"llama.attention.sliding_window": 64, "llama.attention.sliding_window_pattern": [False, True]}
    assert of(gguf(**listed)) == (64, [False, True])
    for pattern in ([True], [True, 2], ["true", "false"], 3):
        with pytest.raises(ConfigError, match="attention.sliding_window_pattern"):
            gguf(**listed | {"llama.attention.sliding_window_pattern": pattern})
    smollm3: dict[str, Any] = {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 4, "sliding_window": 64}
    assert of(hf(**smollm3)) == (None, [False] * 4)
    assert of(hf(**smollm3, use_sliding_window=True)) == (64, [False, False, False, True])  # those that do not turn


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
        ({"rope_scaling": {"type": "su", "factor": 4.0}}, "rope_scaling.*su"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_slow": 0}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attn_factor": 1.0}}, "attn_factor"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, "short_factors"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": ["x"], "long_factor": [1.0]}}, "short_factor"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8}}, "long_factor is missing"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": float("nan")}}, "factor"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"architectures": ["GraniteForCausalLM"], "logits_scaling": float("nan")}, "logits_scaling"),
        ({"architectures": ["GemmaForCausalLM"], "hidden_size": 10**400}, "hidden_size"),
        (STARCODER2 | {"hidden_act": "silu"}, "hidden_act"),
        ({"sliding_window": 8}, "sliding_window"),  # llama has none
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "no_rope_layers"),
        ({"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"]}, "layer_types: 1 entries"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, "sliding_window"),
        ({"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9}, "num_experts_per_tok: 9 of 8"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 1 << 30}, "num_experts"),
        (STABLELM | {"use_parallel_residual": True}, "use_parallel_residual"),
        (STABLELM | {"qk_layernorm": True}, "qk_layernorm"),
        ({"architectures": ["Phi3ForCausalLM"], "full_attn_mod": 2}, "full_attn_mod"),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 1.5}, "partial_rotary_factor"),
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
        ({"num_hidden_layers": 1 << 24}, "num_hidden_layers"),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_theta"),
        ({"architectures": ["Gemma2ForCausalLM"], "hidden_act": None, "query_pre_attn_scalar": -1}, "query_pre_attn"),
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
        ({"general.architecture": "gpt2"}, "general.architecture: 'gpt2'"),
        ({"general.architecture": 7}, "general.architecture: 7"),
        ({"split.count": 2}, "split.count"),
        ({"llama.expert_count": 8}, "num_experts_per_tok: 0 of 8"),
        ({"llama.expert_group_count": 2}, "llama.expert_group_count"),
        ({"llama.embedding_scale": 2.0}, "llama.embedding_scale"),
        ({"llama.block_count": 1 << 40}, "llama.block_count"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count"),
        ({"llama.attention.value_length": 32}, "llama.attention.value_length"),
        ({"llama.rope.scaling.type": "su"}, "rope.scaling.type.*su"),
        ({"llama.attention.head_count_kv": [2, 2]}, "llama.attention.head_count_kv"),
        ({"llama.logit_scale": 2.0}, "llama.logit_scale"),
        ({"llama.vocab_size": 99}, "llama.vocab_size"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
    ],
)
def test_gguf_keys_are_understood_or_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        gguf(**changes)
