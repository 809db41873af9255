"""Tiny random checkpoints, as transformers writes them, and the engines and sequences to run them with."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
import transformers

from services.gpu_worker.batch import Chunk, Drawn, Engine, SampledToken, Sequence
from shared.protocol import SamplingParams

VOCAB_SIZE = 300
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = PLAIN | {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.5],
    "original_max_position_embeddings": 32,
}  # fmt: skip
WINDOW = 20
GRANITE = {
    "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0,
}  # fmt: skip
GEMMA2 = {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 12}
GEMMA3 = {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 12, "num_hidden_layers": 4,
          "sliding_window_pattern": 2}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK = {
    "num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 16, "n_routed_experts": 6, "n_shared_experts": 1, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 16}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "head_dim": 8}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16, "num_key_value_heads": 6}),
}
# Families and switches that only torch's engine computes, or whose text says nothing that logits do not.
MORE_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": (
        "Llama",
        {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.6, "beta_fast": 16, "truncate": False}},
    ),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "mistral-window": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3-tied": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3-untied": ("SmolLM3", {"no_rope_layers": [0, 1, 0], "tie_word_embeddings": False}),
    "granite": ("Granite", GRANITE),
    "granite-tied": ("Granite", GRANITE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {}),
    "olmo2-tied": ("Olmo2", {"tie_word_embeddings": True}),
    "olmo3": ("Olmo3", {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
                        | {"num_hidden_layers": 4}),
    "phi3": ("Phi3", {"rope_parameters": PLAIN}),
    "phi3-window": ("Phi3", {"sliding_window": WINDOW, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}),
    "phi3-longrope": ("Phi3", {"original_max_position_embeddings": 32, "rope_parameters": LONGROPE}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", GEMMA2),
    "gemma2-untied": ("Gemma2", GEMMA2 | {"tie_word_embeddings": False, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3-linear": (
        "Gemma3",
        GEMMA3 | {"tie_word_embeddings": False}
        | {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": PLAIN}},
    ),
    "stablelm": ("StableLm", {"num_attention_heads": 3, "num_key_value_heads": 3}),
    "stablelm-bias": (
        "StableLm",
        {"use_qkv_bias": True, "tie_word_embeddings": True, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
    ),
    "starcoder2": ("Starcoder2", {}),
    "starcoder2-window": ("Starcoder2", {"sliding_window": WINDOW, "use_bias": False, "tie_word_embeddings": False}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixtral-tied": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
    "qwen2-moe": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 24}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS | {"head_dim": 8, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "deepseek2": ("DeepseekV2", DEEPSEEK | {"num_experts_per_tok": 2, "routed_scaling_factor": 1.5}),
    "deepseek2-groups": (
        "DeepseekV2",
        DEEPSEEK | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2}
        | {"num_experts_per_tok": 3, "first_k_dense_replace": 1, "rope_parameters": YARN},
    ),
    "deepseek3": ("DeepseekV3", DEEPSEEK | {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 2}),
    "deepseek3-yarn": (
        "DeepseekV3",
        DEEPSEEK | {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "rope_interleave": False}
        | {"q_lora_rank": None, "n_shared_experts": 2}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}},
    ),
    "qwen3-moe-tied": ("Qwen3Moe", EXPERTS | {"head_dim": 8, "decoder_sparse_step": 2, "tie_word_embeddings": True}),
}  # fmt: skip


def build(name: str, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    """A random model; its weights are large enough that greedy text does not fall into a loop at once."""
    architecture, settings = (ARCHITECTURES | MORE_ARCHITECTURES)[name]
    config_class = f"{architecture}{'Text' if architecture == 'Gemma3' else ''}Config"
    config = getattr(transformers, config_class)(**(SIZES | {"initializer_range": 0.2} | settings | changes))
    torch.manual_seed(seed)
    config._attn_implementation = "eager"  # the one that soft-caps
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(".bias"):
                parameter.normal_(0.0, 0.2)
            elif "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
    for name, buffer in model.named_buffers():
        if name.endswith("_bias"):  # of the choice of experts
            buffer.uniform_(-0.3, 0.3)
    return model


def save(name: str, folder: Path, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    model = build(name, seed, **changes)
    model.save_pretrained(folder)
    return model


def prompts(count: int, seed: int = 0, low: int = 3, high: int = 40, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]


class Runner:
    """Gives sequences blocks of the engine's pool, scattered on purpose, and steps them."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self.engine = engine
        order = torch.randperm(engine.info.num_blocks, generator=torch.Generator().manual_seed(seed))
        self._free: list[int] = order.tolist()

    def sequence(self, prompt: Seq[int], num_output: int, choice: int = 0, **params: Any) -> Sequence:
        settings: dict[str, Any] = {"max_tokens": num_output, "temperature": 0.0, "seed": 1} | params
        num_blocks = -(-(len(prompt) + num_output) // self.engine.info.block_size)
        block_ids, self._free = self._free[:num_blocks], self._free[num_blocks:]
        assert len(block_ids) == num_blocks, "the test's pool is too small"
        return Sequence(
            sid=f"s{block_ids[0]}.{choice}", epoch=1, choice=choice, params=SamplingParams(**settings),
            num_prompt_tokens=len(prompt), token_ids=list(prompt), block_ids=block_ids,
        )  # fmt: skip

    def free(self, sequence: Sequence) -> None:
        self._free += sequence.block_ids

    def step(self, chunks: Seq[Chunk]) -> list[Drawn]:
        """One step, and what the running set does with its results."""
        results = self.engine.step(chunks)
        for chunk, tokens in zip(chunks, results, strict=True):
            chunk.seq.token_ids += [t.token_id for t in tokens]
            chunk.seq.num_computed = chunk.start + chunk.count + max(0, len(tokens) - 1)
        return results

    def run(self, sequences: Seq[Sequence], prefill_chunk: int = 512) -> list[list[SampledToken]]:
        """All of them together until each has max_tokens; prompts in chunks, mixed with the others' decoding."""
        results: dict[int, list[SampledToken]] = {id(s): [] for s in sequences}
        while unfinished := [s for s in sequences if s.num_output_tokens < s.params.max_tokens]:
            chunks = [next_chunk(s, prefill_chunk) for s in unfinished]
            for chunk, tokens in zip(chunks, self.step(chunks), strict=True):
                results[id(chunk.seq)] += tokens
        return [results[id(s)] for s in sequences]


def next_chunk(sequence: Sequence, prefill_chunk: int) -> Chunk:
    left = len(sequence.token_ids) - sequence.num_computed
    count = min(left, prefill_chunk)
    return Chunk(sequence, sequence.num_computed, count, sample=count == left)


def ids_of(results: Seq[Seq[SampledToken]]) -> list[list[int]]:
    return [[token.token_id for token in tokens] for tokens in results]
