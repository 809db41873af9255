"""From a model's files to `DecoderWeights`: every parameter is read once, and nothing in the files is left over."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from kernels.matmul_dense import DensePacker, DenseWeight
from services.gpu_worker.model.config import ModelConfig
from services.gpu_worker.model.layers import DecoderWeights, LayerWeights, Linear
from services.gpu_worker.weights.gguf import GGUFSource
from services.gpu_worker.weights.safetensors import SafetensorsSource
from services.gpu_worker.weights.source import WeightsError, WeightSource

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (elements done, elements in all)


def open_source(path: Path) -> WeightSource:
    """A GGUF file, or a folder in the Hugging Face layout."""
    if path.is_dir():
        return SafetensorsSource(path)
    if path.is_file():
        return GGUFSource(path)
    raise WeightsError(f"{path}: there is no such file or folder")


def load_weights(source: WeightSource, progress: Progress | None = None) -> DecoderWeights:
    """Read, fuse and pack everything; WeightsError names what is missing, of another shape, or left over."""
    reader = _Reader(source, progress)
    config = source.config
    embedding = reader.read("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = tuple(_layer(reader, config, f"model.layers.{i}.") for i in range(config.num_layers))
    factors = reader.read("rope_factors", config.head_dim // 2) if "rope_factors" in source.shapes else None
    weights = DecoderWeights(
        embedding=embedding,
        layers=layers,
        final_norm=reader.read("model.norm.weight", config.hidden_size),
        head=_head(reader, config, embedding),
        rope_factors=factors,
    )
    reader.finish()
    return weights


def _layer(reader: _Reader, config: ModelConfig, prefix: str) -> LayerWeights:
    hidden, heads, ffn = config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size
    kv = config.num_kv_heads * config.head_dim
    attn, mlp = prefix + "self_attn.", prefix + "mlp."
    qkv = [(f"{attn}q_proj", heads), (f"{attn}k_proj", kv), (f"{attn}v_proj", kv)]
    gate_up = [(f"{mlp}gate_proj", ffn), (f"{mlp}up_proj", ffn)]
    return LayerWeights(
        attn_norm=reader.read(f"{prefix}input_layernorm.weight", hidden),
        qkv=reader.linear(qkv, hidden, config.qkv_bias),
        q_norm=reader.read(f"{attn}q_norm.weight", config.head_dim) if config.qk_norm else None,
        k_norm=reader.read(f"{attn}k_norm.weight", config.head_dim) if config.qk_norm else None,
        out=reader.linear([(f"{attn}o_proj", hidden)], heads, config.out_bias),
        ffn_norm=reader.read(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=reader.linear(gate_up, hidden, config.mlp_bias),
        down=reader.linear([(f"{mlp}down_proj", hidden)], ffn, config.mlp_bias),
    )


def _head(reader: _Reader, config: ModelConfig, embedding: torch.Tensor) -> Linear:
    """The checkpoint decides whether the output head is the embedding; the configuration may be wrong about it."""
    name = "lm_head.weight"
    if name not in reader.source.shapes:
        if config.tied is False:
            log.warning("tie_word_embeddings is false but there is no %s: the embedding serves as output head", name)
        return Linear(reader.pack(embedding))
    head = reader.read(name, config.vocab_size, config.hidden_size)
    if config.tied and not torch.equal(head, embedding):
        log.warning("tie_word_embeddings is true but %s differs from the embedding: it is used", name)
    return Linear(reader.pack(head))


class TensorLedger:
    """The tensors of a source, each to be taken exactly once, with the shape that it should have."""

    def __init__(self, source: WeightSource, progress: Progress | None) -> None:
        self.source = source
        self._unread = set(source.shapes)
        self._progress = progress
        self._total = sum(_num_elements(shape) for shape in source.shapes.values())
        self._done = 0

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Before allocating: what is asked for then has the size of what the file holds."""
        found = self.source.shapes.get(name)
        if found != shape:
            raise WeightsError(f"tensor {name!r}: shape {shape} expected, found {found}")
        if name not in self._unread:
            raise WeightsError(f"tensor {name!r} has been read before")

    def taken(self, name: str) -> None:
        self._unread.discard(name)
        self.source.release(name)
        self._done += _num_elements(self.source.shapes[name])
        if self._progress is not None:
            self._progress(self._done, self._total)

    def finish(self) -> None:
        if self._unread:
            names = ", ".join(sorted(self._unread)[:5])
            raise WeightsError(f"{len(self._unread)} tensors have no place in this architecture: {names}")


class _Reader:
    """Reads tensors by name, at most once each, into freshly allocated parameters."""

    def __init__(self, source: WeightSource, progress: Progress | None) -> None:
        self.source = source
        self.packer = DensePacker()
        self._ledger = TensorLedger(source, progress)
        self.finish = self._ledger.finish

    def read(self, name: str, *shape: int) -> torch.Tensor:
        return self._fused([(name, shape[0])], shape[1:])

    def linear(self, parts: list[tuple[str, int]], in_features: int, bias: bool) -> Linear:
        """One projection from several with the same input: their rows, one after the other."""
        weight = self._fused([(f"{name}.weight", rows) for name, rows in parts], (in_features,))
        bias_row = self._fused([(f"{name}.bias", rows) for name, rows in parts], ()) if bias else None
        return Linear(self.pack(weight), bias_row)

    def pack(self, weight: torch.Tensor) -> DenseWeight:
        return self.packer.pack(weight)

    def _fused(self, parts: list[tuple[str, int]], row_shape: tuple[int, ...]) -> torch.Tensor:
        for name, rows in parts:
            self._ledger.check(name, (rows, *row_shape))
        out = torch.empty(sum(rows for _, rows in parts), *row_shape)
        first = 0
        for name, rows in parts:
            self.source.read_into(name, out[first : first + rows])
            self._ledger.taken(name)
            first += rows
        return out


def _num_elements(shape: tuple[int, ...]) -> int:
    count = 1
    for dim in shape:
        count *= dim
    return count
