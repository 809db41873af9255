"""The architectures we know, as data: in what each differs from Llama, and what its files call things. *Pure.*

One decoder computes them all. `hf_config` and `gguf_config` read a model's own numbers; what they cannot read there
because it lies in the code that models are published with, stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from services.gpu_worker.model.config import ALL_NORMS, POST_NORMS, PRE_NORMS

# Places of weights in a layer, with the names of Llama's checkpoints; {} is the number of an expert.
LLAMA_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
    "experts.{}.gate": "mlp.experts.{}.gate_proj",
    "experts.{}.up": "mlp.experts.{}.up_proj",
    "experts.{}.down": "mlp.experts.{}.down_proj",
}
POST_NORM_NAMES = {"attn_post_norm": "post_attention_layernorm", "ffn_post_norm": "post_feedforward_layernorm"}
SANDWICH_NAMES = POST_NORM_NAMES | {"ffn_norm": "pre_feedforward_layernorm"}


@dataclass(frozen=True, slots=True)
class Family:
    """reads: keys of a config.json that change the computation here and that other families do not have.

    assumes: the values that transformers takes for absent keys (not for null ones).
    full_every: where sliding windows are not listed by layer, every n-th layer sees everything; 0: none does.
    """

    # what is computed
    norm: str = "rms"
    norms: tuple[str, ...] = PRE_NORMS
    norm_offset: float = 0.0  # added to the norms' weights in a Hugging Face folder
    qkv_bias: bool = False  # always; elsewhere the configuration says
    qk_norm: str = ""
    gated: bool = True
    scales_embedding: bool = False  # by sqrt(hidden_size)
    full_every: int = 0
    plain_windows: bool = False  # rope_scaling is not for the layers with a window
    scoring: str = "softmax"  # of the router; sigmoid: with a bias to the choice, and groups by their two best
    renormalize: bool = True  # the weights of chosen experts, where the configuration does not say
    # how a config.json says it
    reads: frozenset[str] = frozenset()
    assumes: Mapping[str, Any] = field(default_factory=dict)
    ignores: frozenset[str] = frozenset()
    constants: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # keys of published files, with known values
    eps_key: str = "rms_norm_eps"
    activation_key: str = "hidden_act"
    # what the files call it
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # name -> places whose rows it holds in turn
    gguf_pairs: bool = False  # GGUF stores the rows of a head's query and key in rotary pairs, not in halves
    gguf_names: Mapping[str, str] = field(default_factory=dict)  # of a layer, where they are others
    gguf_fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # what only llama.cpp's code says of GGUF files
    gguf_no_rope_every: int = 0
    gguf_activation: str = "silu"
    gguf_local_theta: float = 0.0  # of windowed layers
    gguf_wide_scale_layers: int = 0  # the depth of the model that scales by hidden_size / num_heads, not by head_dim


def _reads(*keys: str) -> frozenset[str]:
    return frozenset(keys)


def _named(changes: Mapping[str, str]) -> Mapping[str, str]:
    """Llama's names with others; a place with an empty name does not exist."""
    return {place: name for place, name in {**LLAMA_NAMES, **changes}.items() if name}


_WINDOW = _reads("sliding_window", "layer_types")
_BIASES = _reads("attention_bias", "mlp_bias")
_EXPERTS = _reads("num_experts_per_tok", "moe_intermediate_size", "num_experts", "num_local_experts", "norm_topk_prob",
                  "decoder_sparse_step", "mlp_only_layers")  # fmt: skip

LLAMA = Family(reads=_BIASES, gguf_pairs=True)
MISTRAL = Family(reads=_WINDOW, assumes={"num_key_value_heads": 8, "sliding_window": 4096}, gguf_pairs=True)
QWEN2 = Family(
    qkv_bias=True,
    reads=_WINDOW | _reads("use_sliding_window", "max_window_layers"),
    assumes={"num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
)
QWEN3 = replace(
    QWEN2, qkv_bias=False, qk_norm="head", reads=QWEN2.reads | _reads("attention_bias"),
    assumes={**QWEN2.assumes, "head_dim": 128},
)  # fmt: skip
SMOLLM3 = Family(
    reads=_BIASES | _WINDOW | _reads("use_sliding_window", "no_rope_layers", "no_rope_layer_interval"),
    assumes={
        "num_key_value_heads": 4, "no_rope_layer_interval": 4, "rope_theta": 2000000.0, "use_sliding_window": False,
    },
    gguf_pairs=True, gguf_no_rope_every=4,
)  # fmt: skip
GRANITE = Family(
    reads=_BIASES | _reads("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    assumes={"attention_multiplier": 1.0},
    gguf_pairs=True,
)
OLMO2 = Family(
    norms=POST_NORMS, qk_norm="row", reads=_reads("attention_bias"), assumes={"rms_norm_eps": 1e-5},
    names=_named(POST_NORM_NAMES | {"attn_norm": "", "ffn_norm": ""}),
)  # fmt: skip
OLMO3 = replace(
    OLMO2, reads=OLMO2.reads | _WINDOW, full_every=4, plain_windows=True,
    assumes={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500000.0},
)  # fmt: skip
PHI3 = Family(
    reads=_WINDOW | _reads("partial_rotary_factor", "original_max_position_embeddings"),
    ignores=_reads("auto_map"),  # code that was published before transformers had its own
    constants={"interpolate_factor": (1,), "full_attn_mod": (1,)},
    assumes={"rms_norm_eps": 1e-5},
    fused={"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")},
    gguf_fused={"attn_qkv": ("q", "k", "v"), "ffn_up": ("gate", "up")},
)
GEMMA = Family(
    norm_offset=1.0, scales_embedding=True, reads=_reads("attention_bias"), activation_key="hidden_activation",
    assumes={"num_key_value_heads": 16, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"},
    constants={"hidden_act": ("gelu", "gelu_pytorch_tanh")},  # the former was an error, and never meant anything
    gguf_activation="gelu_tanh",
)  # fmt: skip
GEMMA2 = replace(
    GEMMA, norms=ALL_NORMS, full_every=2, names=_named(SANDWICH_NAMES),
    constants={**GEMMA.constants, "sliding_window_size": (4096,)},  # the same as sliding_window
    reads=GEMMA.reads | _WINDOW
    | _reads("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    assumes={
        "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
        "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    gguf_wide_scale_layers=46,
)  # fmt: skip
GEMMA3 = replace(
    GEMMA2, qk_norm="head", full_every=6, gguf_local_theta=10000.0, gguf_wide_scale_layers=62,
    reads=GEMMA2.reads | _reads("rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"),
    assumes={
        "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
        "query_pre_attn_scalar": 256, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
    },
)  # fmt: skip
STABLELM = Family(
    norm="layer", eps_key="layer_norm_eps", reads=_reads("use_qkv_bias", "partial_rotary_factor"),
    assumes={"num_key_value_heads": 32, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
)  # fmt: skip
STARCODER2 = Family(
    norm="layer", eps_key="norm_epsilon", gated=False, reads=_WINDOW | _reads("use_bias"),
    assumes={
        "num_key_value_heads": 2, "norm_epsilon": 1e-5, "use_bias": True, "hidden_act": "gelu_pytorch_tanh",
    },
    constants={"mlp_type": ("default",), "norm_type": ("layer_norm",)},
    names=_named({"up": "mlp.c_fc", "down": "mlp.c_proj"}),
    gguf_activation="gelu_tanh",
)  # fmt: skip
MIXTRAL = replace(
    MISTRAL, reads=_WINDOW | _reads("num_experts_per_tok", "num_local_experts"),
    assumes={
        "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-5,
    },
    names=_named({
        "router": "block_sparse_moe.gate",
        "experts.{}.gate": "block_sparse_moe.experts.{}.w1",
        "experts.{}.up": "block_sparse_moe.experts.{}.w3",
        "experts.{}.down": "block_sparse_moe.experts.{}.w2",
    }),
)  # fmt: skip
QWEN3_MOE = replace(
    QWEN3, reads=(QWEN3.reads | _EXPERTS) - _reads("use_sliding_window"),
    assumes={
        **QWEN2.assumes, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": False,
    },
)  # fmt: skip
QWEN2_MOE = replace(
    QWEN2, renormalize=False,
    reads=QWEN2.reads | _EXPERTS | _reads("qkv_bias", "shared_expert_intermediate_size"),
    assumes={
        **QWEN2.assumes, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "norm_topk_prob": False,
    },
    names=_named({
        "shared_gate": "mlp.shared_expert_gate",
        "shared.gate": "mlp.shared_expert.gate_proj",
        "shared.up": "mlp.shared_expert.up_proj",
        "shared.down": "mlp.shared_expert.down_proj",
    }),
)  # fmt: skip

DEEPSEEK3 = Family(
    scoring="sigmoid",
    ignores=_reads("auto_map", "aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers", "num_mtp_layers"),
    constants={"moe_layer_freq": (1,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    reads=_reads(
        "num_experts_per_tok", "n_routed_experts", "n_shared_experts", "moe_intermediate_size", "norm_topk_prob",
        "first_k_dense_replace", "n_group", "topk_group", "routed_scaling_factor", "kv_lora_rank", "q_lora_rank",
        "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rope_interleave",
    ),
    assumes={
        "num_experts_per_tok": 8, "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    },
    names=_named({
        "q_a": "self_attn.q_a_proj",
        "q_norm": "self_attn.q_a_layernorm",
        "q_b": "self_attn.q_b_proj",
        "kv_a": "self_attn.kv_a_proj_with_mqa",
        "k_norm": "self_attn.kv_a_layernorm",
        "kv_b": "self_attn.kv_b_proj",
        "choice": "mlp.gate.e_score_correction_bias",
        "shared.gate": "mlp.shared_experts.gate_proj",
        "shared.up": "mlp.shared_experts.up_proj",
        "shared.down": "mlp.shared_experts.down_proj",
    }),
    gguf_names={
        "q_a": "attn_q_a", "q_norm": "attn_q_a_norm", "q_b": "attn_q_b", "kv_a": "attn_kv_a_mqa",
        "k_norm": "attn_kv_a_norm", "kv_b": "attn_kv_b", "k_b": "attn_k_b", "v_b": "attn_v_b", "choice": "exp_probs_b",
    },
)  # fmt: skip
DEEPSEEK2 = replace(
    DEEPSEEK3, scoring="softmax", reads=(DEEPSEEK3.reads - _reads("rope_interleave")) | _reads("topk_method"),
    constants={"moe_layer_freq": (1,), "scoring_func": ("softmax",), "mlp_bias": (False,)},
    assumes={
        "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "first_k_dense_replace": 0,
        "topk_method": "greedy", "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128,
    },
)  # fmt: skip

HF_FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "SmolLM3ForCausalLM": SMOLLM3,
    "GraniteForCausalLM": GRANITE,
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO3,
    "Phi3ForCausalLM": PHI3,
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "StableLmForCausalLM": STABLELM,
    "Starcoder2ForCausalLM": STARCODER2,
    "MixtralForCausalLM": MIXTRAL,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "DeepseekV2ForCausalLM": DEEPSEEK2,
    "DeepseekV3ForCausalLM": DEEPSEEK3,
}
GGUF_FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,  # Mistral and Mixtral too
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "smollm3": SMOLLM3,
    "granite": GRANITE,
    "olmo2": OLMO2,
    "phi3": PHI3,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "stablelm": STABLELM,
    "starcoder2": STARCODER2,
    "qwen2moe": QWEN2_MOE,
    "qwen3moe": QWEN3_MOE,
    "deepseek2": DEEPSEEK3,  # the second version too
}
GGUF_WINDOWED: Mapping[str, Family] = {"olmo2": OLMO3}  # what these architectures are in files with a sliding window
