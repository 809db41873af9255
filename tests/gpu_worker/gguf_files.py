"""GGUF files made from transformers models with the gguf package, as llama.cpp's converter would write them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

PAIRS = ("llama", "granite", "smollm3")  # whose query and key projections the converter reorders
ARCHITECTURES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}


def halves_to_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """What the converter does to query and key projections of the llama architecture."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).transpose(1, 2).reshape(rows.shape)


def write_gguf(
    model: transformers.PreTrainedModel, path: Path, arch: str = "llama", type_name: str = "F32",
    changes: dict[str, torch.Tensor | None] | None = None, types: dict[str, str] | None = None, apart: bool = False,
) -> None:  # fmt: skip
    """type_name is of the matrices, but for those in types.

    apart: latent attention's up-projections are two tensors, and sizes of heads have names of their own.
    changes replace (or, with None, drop) tensors by their Hugging Face names, as types names them.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    _add_metadata(writer, config, apart)
    _add_family_metadata(writer, config, arch)
    names = gguf.get_tensor_name_map(ARCHITECTURES[arch], config.num_hidden_layers)
    tensors: dict[str, Any] = dict(model.state_dict())
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name, tensor in (tensors | (changes or {})).items():
        if tensor is not None:
            for file_name, part in _converted(name, tensor, config, arch):
                known = names.get_name(file_name, try_suffixes=(".weight", ".bias")) or file_name
                _add(writer, known, part.contiguous(), (types or {}).get(name, type_name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _converted(name: str, tensor: torch.Tensor, config: Any, arch: str) -> Iterator[tuple[str, torch.Tensor]]:
    if name.endswith(".experts.gate_up_proj"):  # transformers keeps a layer's experts in one tensor
        at = f"blk.{name.split('.')[2]}.ffn_"
        gate, up = tensor.chunk(2, dim=1)
        yield f"{at}gate_exps.weight", gate
        yield f"{at}up_exps.weight", up
    elif name.endswith(".experts.down_proj"):
        yield f"blk.{name.split('.')[2]}.ffn_down_exps.weight", tensor
    elif name.endswith("e_score_correction_bias"):
        yield name.replace("correction_bias", "correction.bias"), tensor
    elif arch in PAIRS and ".q_proj." in name:
        yield name, halves_to_pairs(tensor, config.num_attention_heads)
    elif arch in PAIRS and ".k_proj." in name:
        yield name, halves_to_pairs(tensor, config.num_key_value_heads)
    elif arch.startswith("gemma") and name.endswith("norm.weight"):
        yield name, tensor + 1.0
    else:
        yield name, tensor


def _add_metadata(writer: gguf.GGUFWriter, config: Any, apart: bool) -> None:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(1 if apart else config.num_key_value_heads)
    key_length, value_length = getattr(config, "qk_head_dim", head_dim), getattr(config, "v_head_dim", head_dim)
    if apart:
        writer.add_key_length_mla(key_length)
        writer.add_value_length_mla(value_length)
        key_length, value_length = config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank
    writer.add_key_length(key_length)
    writer.add_value_length(value_length)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", None) or config.norm_epsilon)


def _add_family_metadata(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    if arch == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch in ("gemma2", "gemma3", "phi3") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if arch == "olmo2" and getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if arch == "deepseek2":
        _add_deepseek_metadata(writer, config)
    if (num_experts := getattr(config, "num_local_experts", 0) or getattr(config, "num_experts", 0)) > 0:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if arch != "llama":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.rope_parameters.get("rope_type") == "longrope":
        original = config.rope_parameters["original_max_position_embeddings"]
        factor = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(original)))
        for kind in ("long", "short"):
            factors = np.array(config.rope_parameters[f"{kind}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)


def _add_deepseek_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    by_sigmoid = config.model_type == "deepseek_v3"
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SIGMOID if by_sigmoid else kinds.SOFTMAX)
    writer.add_expert_weights_norm(by_sigmoid)
    if config.n_group:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if all_dim := config.rope_parameters.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * all_dim)


def _add(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, type_name: str) -> None:
    if tensor.dim() < 2 or type_name == "F32":
        writer.add_tensor(name, tensor.numpy().astype(np.float32))
    else:
        type_ = gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(name, gguf.quantize(tensor.numpy(), type_), raw_dtype=type_)
