"""From a model's files to weights packed for the native products: quantised ones stay so, floats stay as stored.

Every tensor is read once, and nothing in the files is left over. What has been packed is released in the mapping.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from dataclasses import dataclass

import torch

from kernels.packed_weight import TILE_ROWS, Codes, PackedWeight, pack, pack_dense
from services.gpu_worker.model.config import PRE_NORMS, ModelConfig, NotNativeError
from services.gpu_worker.weights.huge_pages import WeightMemory
from services.gpu_worker.weights.loader import Progress, TensorLedger
from services.gpu_worker.weights.source import CHUNK_BYTES, WeightSource

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """Weights with the same input, whose outputs lie one after the other."""

    parts: tuple[PackedWeight, ...]
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """attn_norm is None only in heads that draft."""

    attn_norm: torch.Tensor | None
    ffn_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    qkv: NativeLinear
    out: NativeLinear
    gate: NativeLinear
    up: NativeLinear
    down: NativeLinear


@dataclass(frozen=True, slots=True)
class NativeWeights:
    """Of a head that drafts there may be no final_norm, but an embed_norm, and token_ids, int32: what the rows of the
    output head stand for. See native.h."""

    embedding: PackedWeight
    layers: tuple[NativeLayer, ...]
    final_norm: torch.Tensor | None
    head: NativeLinear
    embed_norm: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None


def load_native_weights(source: WeightSource, progress: Progress | None = None) -> NativeWeights:
    """WeightsError names what is missing, of another shape, or left over."""
    reader, config = _Reader(source, progress), source.config
    refuse_unknown(config)
    embedding = reader.matrix("embedding.weight", config.vocab_size, config.hidden_size)
    layers = tuple(_layer(reader, config, f"layers.{i}.") for i in range(config.num_layers))
    head = embedding
    if "head.weight" in source.shapes:
        head = reader.matrix("head.weight", config.vocab_size, config.hidden_size)
    elif config.tied is False:
        log.warning("tie_word_embeddings is false but there is no output head: the embedding serves as one")
    final_norm = reader.vector("final_norm.weight", config.hidden_size) * config.logit_scale
    reader.finish()
    return NativeWeights(embedding, layers, final_norm, NativeLinear((head,)))


def refuse_unknown(config: ModelConfig) -> None:
    """NotNativeError for what the native decoder does not compute, by name."""
    known = {
        "layer norm": config.norm == "rms",
        "norms after attention and feed-forward part": config.norms == PRE_NORMS,
        "a norm of all query heads together": config.qk_norm in ("", "head"),
        f"the activation {config.activation}": config.activation == "silu",
        "a feed-forward part without a gate": config.gated,
        "a mixture of experts": config.experts is None,
        "latent attention": config.latent is None,
        "soft-capping": not config.attention_softcap and not config.logit_softcap,
        "rotary frequencies that follow from the context (longrope)": config.rope.kind != "longrope",
        "partial rotary embedding": config.turned == config.head_dim,
        "layers without rotary embedding": all(kind.rotary for kind in config.layers),
        "a scaled embedding": config.embedding_scale == 1.0,
        "scaled residuals": config.residual_scale == 1.0,
    }
    missing = [what for what, is_known in known.items() if not is_known]
    if missing:
        raise NotNativeError(f"native kernels do not compute {', '.join(missing)}")


def return_freed_memory() -> None:
    """glibc keeps what loading took and freed, a third of a small model's weights; other libraries return it anyway."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _layer(reader: _Reader, config: ModelConfig, prefix: str) -> NativeLayer:
    hidden, heads, ffn = config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size
    kv, dim = config.num_kv_heads * config.head_dim, config.head_dim
    qkv = [(f"{prefix}q", heads), (f"{prefix}k", kv), (f"{prefix}v", kv)]
    return NativeLayer(
        attn_norm=reader.vector(f"{prefix}attn_norm.weight", hidden),
        ffn_norm=reader.vector(f"{prefix}ffn_norm.weight", hidden),
        q_norm=reader.vector(f"{prefix}q_norm.weight", dim) if config.qk_norm else None,
        k_norm=reader.vector(f"{prefix}k_norm.weight", dim) if config.qk_norm else None,
        qkv=reader.linear(qkv, hidden, config.qkv_bias),
        out=reader.linear([(f"{prefix}out", hidden)], heads, config.out_bias),
        gate=reader.linear([(f"{prefix}gate", ffn)], hidden, config.mlp_bias),
        up=reader.linear([(f"{prefix}up", ffn)], hidden, config.mlp_bias),
        down=reader.linear([(f"{prefix}down", hidden)], ffn, config.mlp_bias),
    )


class _Reader:
    """Reads tensors by name, at most once each."""

    def __init__(self, source: WeightSource, progress: Progress | None) -> None:
        self._source = source
        self._ledger = TensorLedger(source, progress)
        self._memory = WeightMemory()
        self.finish = self._ledger.finish

    def vector(self, name: str, size: int) -> torch.Tensor:
        """float32, with zeros up to a multiple of 16."""
        self._ledger.check(name, (size,))
        out = torch.zeros(-(-size // TILE_ROWS) * TILE_ROWS)
        self._source.read_into(name, out[:size])
        self._ledger.taken(name)
        return out

    def linear(self, parts: list[tuple[str, int]], in_features: int, bias: bool) -> NativeLinear:
        weights = tuple(self.matrix(f"{name}.weight", rows, in_features) for name, rows in parts)
        if not bias:
            return NativeLinear(weights)
        biases = [self.vector(f"{name}.bias", rows)[:rows] for name, rows in parts]
        return NativeLinear(weights, torch.cat(biases))

    def matrix(self, name: str, rows: int, columns: int) -> PackedWeight:
        """Packed a run of rows at a time, so that a large one is not unpacked whole."""
        self._ledger.check(name, (rows, columns))
        step = max(TILE_ROWS, CHUNK_BYTES // columns // TILE_ROWS * TILE_ROWS)
        runs = [_packed(self._source.stored(name, i, min(rows, i + step))) for i in range(0, rows, step)]
        self._ledger.taken(name)
        return self._memory.keep(runs[0] if len(runs) == 1 else _joined(runs, rows))


def _packed(stored: Codes | torch.Tensor) -> PackedWeight:
    return pack(stored) if isinstance(stored, Codes) else pack_dense(stored)


def _joined(runs: list[PackedWeight], rows: int) -> PackedWeight:
    def joined(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
        present = [part for part in parts if part is not None]
        return torch.cat(present) if present else None

    return dataclasses.replace(
        runs[0], rows=rows, codes=torch.cat([run.codes for run in runs]), high=joined([run.high for run in runs]),
        d=joined([run.d for run in runs]), m=joined([run.m for run in runs]), sub=joined([run.sub for run in runs]),
        sub_min=joined([run.sub_min for run in runs]),
    )  # fmt: skip
