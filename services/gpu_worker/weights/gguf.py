"""A GGUF file as a `WeightSource`: names translated, rotary rows put in halves, blocks turned into float32.

The file is memory-mapped; a tensor is converted a run of rows at a time.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import torch

from kernels.packed_weight import DENSE, Codes
from services.gpu_worker.model.families import GGUF_FAMILIES, config_from_gguf
from services.gpu_worker.weights.quant_layout import TYPES, decode_rows, dequantize
from services.gpu_worker.weights.source import CHUNK_BYTES, WeightsError, file_identity
from shared.gguf_header import GGML_TYPES, GGUFTensor, read_gguf

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "rope_factors",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCKS = {name: (elements, num_bytes) for name, elements, num_bytes in GGML_TYPES.values()}


class GGUFSource:
    def __init__(self, path: Path) -> None:
        header = read_gguf(path)
        by_file_name = {t.name: t.shape for t in header.tensors.values()}
        self.config = config_from_gguf(header.metadata, by_file_name)
        self._in_pairs = GGUF_FAMILIES[header.metadata["general.architecture"]].gguf_pairs
        self._tensors = {hf_name(t.name): t for t in header.tensors.values()}
        self.shapes = {name: t.shape for name, t in self._tensors.items()}
        for tensor in header.tensors.values():
            if tensor.type not in TYPES:
                known = ", ".join(TYPES)
                raise WeightsError(f"tensor {tensor.name!r}: type {tensor.type} is not supported (known: {known})")
        header_bytes = min((t.offset_bytes for t in header.tensors.values()), default=0)
        self.identity = file_identity(path, header_bytes).hex()
        # Copy-on-write: torch wants a writable array, the file stays as it is.
        with open(path, "rb") as file:
            self._file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._data = np.frombuffer(self._file, dtype=np.uint8)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        tensor = self._tensors[name]
        elements, num_bytes = _BLOCKS[tensor.type]
        blocks, flat = self._bytes(tensor).view(-1, num_bytes), out.view(-1, elements)
        step = max(1, CHUNK_BYTES // (4 * elements))
        for start in range(0, len(blocks), step):
            flat[start : start + step] = dequantize(tensor.type, blocks[start : start + step])
        if self._is_in_pairs(name):
            out.copy_(pairs_to_halves(out, self.config.head_dim))

    def stored(self, name: str, start: int, end: int) -> Codes | torch.Tensor:
        tensor = self._tensors[name]
        rows = self._bytes(tensor).view(tensor.shape[0], -1)
        if self._is_in_pairs(name):
            rows = pairs_to_halves(rows, self.config.head_dim)
        rows = rows[start:end]
        if tensor.type in DENSE:
            return rows.contiguous().view(DENSE[tensor.type])
        return decode_rows(tensor.type, rows, _BLOCKS[tensor.type][1])

    def release(self, name: str) -> None:
        tensor = self._tensors[name]
        first = -(-tensor.offset_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.offset_bytes + tensor.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            self._file.madvise(mmap.MADV_DONTNEED, first, end - first)

    def _bytes(self, tensor: GGUFTensor) -> torch.Tensor:
        return torch.from_numpy(self._data[tensor.offset_bytes : tensor.offset_bytes + tensor.num_bytes])

    def _is_in_pairs(self, name: str) -> bool:
        return self._in_pairs and (".q_proj." in name or ".k_proj." in name)


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown one keeps its own, and the loader refuses it."""
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return _NAMES[stem] if stem == "rope_freqs" else f"{_NAMES[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{kind}"
    return name


def pairs_to_halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of each head from rotary pairs (0, 1), (2, 3), ... to two halves: all first members, then all second."""
    heads = rows.shape[0] // head_dim
    return rows.view(heads, head_dim // 2, 2, -1).transpose(1, 2).reshape(rows.shape)
