"""GGUF files made from transformers models with the gguf package, as llama.cpp's converter would write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem not in TOP_NAMES and not stem.startswith("model.layers."):
        return name
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"


def halves_to_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """What the converter does to query and key projections of the llama architecture."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).transpose(1, 2).reshape(rows.shape)


def write_gguf(
    model: transformers.PreTrainedModel, path: Path, arch: str = "llama", type_name: str = "F32",
    changes: dict[str, torch.Tensor | None] | None = None, types: dict[str, str] | None = None,
) -> None:  # fmt: skip
    """type_name is of the matrices, but for those in types.

    changes replace (or, with None, drop) tensors by their Hugging Face names, as types names them.
    """
    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tensors: dict[str, Any] = dict(model.state_dict())
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name, tensor in (tensors | (changes or {})).items():
        if tensor is not None:
            if arch == "llama" and ".q_proj." in name:
                tensor = halves_to_pairs(tensor, heads)
            elif arch == "llama" and ".k_proj." in name:
                tensor = halves_to_pairs(tensor, kv_heads)
            _add(writer, gguf_name(name), tensor.contiguous(), (types or {}).get(name, type_name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, type_name: str) -> None:
    if tensor.dim() < 2 or type_name == "F32":
        writer.add_tensor(name, tensor.numpy().astype(np.float32))
    else:
        type_ = gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(name, gguf.quantize(tensor.numpy(), type_), raw_dtype=type_)
