"""From a model's files to `DecoderWeights`: every parameter is read once, and nothing in the files is left over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.gpu_worker.model.config import ALL_NORMS, LatentConfig, ModelConfig
from services.gpu_worker.model.layers import (
    DecoderWeights,
    ExpertWeights,
    FeedForwardWeights,
    LatentWeights,
    LayerWeights,
    Norm,
    Product,
)
from services.gpu_worker.weights.gguf import GGUFSource
from services.gpu_worker.weights.names import is_place
from services.gpu_worker.weights.online import QuantizingSource
from services.gpu_worker.weights.placement import Ends, InMemory, Placement
from services.gpu_worker.weights.safetensors import SafetensorsSource
from services.gpu_worker.weights.source import Coded, WeightsError, WeightSource

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (elements done, elements in all)


def open_source(path: Path, quantization: str = "none") -> WeightSource:
    """A GGUF file, or a folder in the Hugging Face layout; quantization: what to make of floats, see `online`."""
    if not path.exists():
        raise WeightsError(f"{path}: there is no such file or folder")
    source: WeightSource = SafetensorsSource(path) if path.is_dir() else GGUFSource(path)
    return source if quantization == "none" else QuantizingSource(source, quantization)


def load_weights(
    source: WeightSource, progress: Progress | None = None, placement: Placement | None = None
) -> DecoderWeights:
    """Read, fuse and place everything; WeightsError names what is missing, of another shape, or left over."""
    reader = _Reader(source, progress, placement or InMemory())
    config = source.config
    ends = _ends(reader, config)
    weights = DecoderWeights(
        embedding=ends.embedding,
        layers=tuple(_layer(reader, config, i) for i in range(config.num_layers)),
        final_norm=reader.norm("final_norm", config.hidden_size),
        head=ends.head,
    )
    reader.finish()
    return weights


def _layer(reader: _Reader, config: ModelConfig, number: int) -> LayerWeights:
    at, hidden = f"layers.{number}.", config.hidden_size
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norms: dict[str, Any] = {
        name: reader.norm(at + name, hidden) if name in config.norms else None for name in ALL_NORMS
    }
    q_size, k_size = (heads, kv) if config.qk_norm == "row" else (config.head_dim, config.head_dim)
    sparse = config.layers[number].sparse
    ffn = _experts(reader, config, at) if sparse else _ffn(reader, config, at, config.intermediate_size)
    if config.latent is not None:
        return _latent_layer(reader, config, config.latent, at, norms, ffn)
    return LayerWeights(
        **norms,
        qkv=reader.linear([(f"{at}q", heads), (f"{at}k", kv), (f"{at}v", kv)], hidden, config.qkv_bias),
        q_norm=reader.head_norm(f"{at}q_norm", q_size) if config.qk_norm else None,
        k_norm=reader.head_norm(f"{at}k_norm", k_size) if config.qk_norm else None,
        out=reader.linear([(f"{at}out", hidden)], heads, config.out_bias),
        ffn=ffn,
    )


def _latent_layer(
    reader: _Reader, config: ModelConfig, latent: LatentConfig, at: str, norms: Mapping[str, Any],
    ffn: FeedForwardWeights | ExpertWeights,
) -> LayerWeights:  # fmt: skip
    heads, hidden, rank = config.num_heads, config.hidden_size, latent.rank
    head_rows = latent.nope_dim + latent.rope_dim
    q_order = torch.arange(heads * head_rows).view(heads, -1)[:, _turned_last(latent, latent.nope_dim)].flatten()
    q_down = torch.arange(latent.q_rank) if latent.q_rank else q_order
    order = torch.cat((q_down, len(q_down) + _turned_last(latent, rank)))
    down = [(f"{at}q_a" if latent.q_rank else f"{at}q", len(q_down)), (f"{at}kv_a", latent.row)]
    key_up, value_up = _up_projections(reader, latent, heads, at)
    halves = None if reader.placement.turns_pairs else order
    q_halves = None if reader.placement.turns_pairs else q_order
    return LayerWeights(
        **norms,
        qkv=reader.linear(down, hidden, False, halves),
        q_norm=reader.head_norm(f"{at}q_norm", latent.q_rank) if latent.q_rank else None,
        k_norm=reader.head_norm(f"{at}k_norm", rank),
        out=reader.linear([(f"{at}out", hidden)], heads * latent.value_dim, config.out_bias),
        ffn=ffn,
        latent=LatentWeights(
            q_up=reader.linear([(f"{at}q_b", len(q_order))], latent.q_rank, False, q_halves) if latent.q_rank else None,
            key_up=reader.placement.by_head(key_up),
            value_up=reader.placement.by_head(value_up),
        ),
    )


def _up_projections(reader: _Reader, latent: LatentConfig, heads: int, at: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of keys [H, rank, nope_dim] and of values [H, value_dim, rank]; files have them as one or apart."""
    rank, nope = latent.rank, latent.nope_dim
    if f"{at}k_b.weight" in reader.source.shapes:
        key = reader.weight([(f"{at}k_b", heads * rank)], nope).view(heads, rank, nope)
        return key, reader.weight([(f"{at}v_b", heads * latent.value_dim)], rank).view(heads, -1, rank)
    up = reader.weight([(f"{at}kv_b", heads * (nope + latent.value_dim))], rank).view(heads, -1, rank)
    return up[:, :nope].transpose(1, 2), up[:, nope:]


def _turned_last(latent: LatentConfig, first: int) -> torch.Tensor:
    """The order of rows in which, after the first, turned ones come in halves."""
    turned = torch.arange(latent.rope_dim)
    if latent.in_pairs:
        turned = turned.view(-1, 2).t().flatten()
    return torch.cat((torch.arange(first), first + turned))


def _ffn(reader: _Reader, config: ModelConfig, at: str, size: int) -> FeedForwardWeights:
    parts = [(f"{at}gate", size), (f"{at}up", size)] if config.gated else [(f"{at}up", size)]
    return FeedForwardWeights(
        into=reader.linear(parts, config.hidden_size, config.mlp_bias),
        down=reader.linear([(f"{at}down", config.hidden_size)], size, config.mlp_bias),
    )


def _experts(reader: _Reader, config: ModelConfig, at: str) -> ExpertWeights:
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None
    size, scores = experts.intermediate_size, reader.placement.scores
    gates = ("gate", "up") if config.gated else ("up",)
    places = [f"{at}experts.{number}." for number in range(experts.num_experts)]
    return ExpertWeights(
        router=scores(reader.weight([(f"{at}router", experts.num_experts)], hidden)),
        choice_bias=reader.read(f"{at}choice.bias", experts.num_experts) if experts.choice_bias else None,
        experts=reader.placement.experts(
            [reader.rows([(place + gate, size) for gate in gates], hidden) for place in places],
            [reader.rows([(f"{place}down", hidden)], size) for place in places],
        ),
        shared=_ffn(reader, config, f"{at}shared.", experts.shared_size) if experts.shared_size else None,
        shared_gate=scores(reader.weight([(f"{at}shared_gate", 1)], hidden)) if experts.shared_gate else None,
    )


def _ends(reader: _Reader, config: ModelConfig) -> Ends:
    """The checkpoint decides whether the output head is the embedding; the configuration may be wrong about it."""
    embedding, head = (reader.rows([(name, config.vocab_size)], config.hidden_size) for name in ("embedding", "head"))
    place = "head.weight"
    name = reader.source.file_name(place)
    if place not in reader.source.shapes:
        if config.tied is False:
            log.warning("tie_word_embeddings is false but there is no %s: the embedding serves as output head", name)
        return reader.placement.ends(embedding, None)
    ends = reader.placement.ends(embedding, head)
    if config.tied and ends.differ:
        log.warning("tie_word_embeddings is true but %s differs from the embedding: it is used", name)
    return ends


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
            raise WeightsError(f"tensor {self.source.file_name(name)!r}: shape {shape} expected, found {found}")
        if name not in self._unread:
            raise WeightsError(f"tensor {self.source.file_name(name)!r} has been read before")

    def taken(self, name: str) -> None:
        self._unread.discard(name)
        self.source.release(name)
        self._done += _num_elements(self.source.shapes[name])
        if self._progress is not None:
            self._progress(self._done, self._total)

    def finish(self) -> None:
        if self._unread:
            names = ", ".join(sorted(map(self._file_name, self._unread))[:5])
            raise WeightsError(f"{len(self._unread)} tensors have no place in this architecture: {names}")

    def _file_name(self, place: str) -> str:
        """A tensor that has no place has kept its name."""
        return self.source.file_name(place) if is_place(place) else place


class _Reader:
    """Reads tensors by name, at most once each, into freshly allocated parameters."""

    def __init__(self, source: WeightSource, progress: Progress | None, placement: Placement) -> None:
        self.source = source
        self.placement = placement
        self._ledger = TensorLedger(source, progress)
        self.finish = self._ledger.finish

    def read(self, name: str, *shape: int) -> torch.Tensor:
        return self.placement.keep(self._fused([(name, shape[0])], shape[1:]))

    def norm(self, place: str, size: int) -> Norm:
        config = self.source.config
        bias = self.read(f"{place}.bias", size) if config.norm == "layer" else None
        return Norm(self.read(f"{place}.weight", size), bias, config.norm_eps)

    def head_norm(self, place: str, size: int) -> Norm:
        return Norm(self.read(f"{place}.weight", size), None, self.source.config.norm_eps)

    def weight(self, parts: list[tuple[str, int]], in_features: int) -> torch.Tensor:
        return self._fused([(f"{name}.weight", rows) for name, rows in parts], (in_features,))

    def linear(
        self, parts: list[tuple[str, int]], in_features: int, bias: bool, order: torch.Tensor | None = None
    ) -> Product:
        """One projection from several with the same input: their rows, one after the other, or in an order."""
        bias_row = self._fused([(f"{name}.bias", rows) for name, rows in parts], ()) if bias else None
        if order is not None:
            return self.placement.product(self.weight(parts, in_features)[order], bias_row)
        return self.placement.projection(self.rows(parts, in_features), bias_row)

    def rows(self, parts: list[tuple[str, int]], in_features: int) -> _Rows:
        return _Rows(self, parts, in_features)

    def stored(self, name: str, shape: tuple[int, int]) -> Coded | torch.Tensor:
        self._ledger.check(name, shape)
        coded = self.source.coded(name)
        stored = self.source.stored(name, 0, shape[0]) if coded is None else coded
        self._ledger.taken(name)
        return stored

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


@dataclass(frozen=True, slots=True)
class _Rows:
    reader: _Reader
    parts: list[tuple[str, int]]  # names, numbers of rows
    in_features: int

    def floats(self) -> torch.Tensor:
        return self.reader.weight(self.parts, self.in_features)

    def stored(self) -> list[Coded | torch.Tensor]:
        return [self.reader.stored(f"{name}.weight", (rows, self.in_features)) for name, rows in self.parts]


def _num_elements(shape: tuple[int, ...]) -> int:
    count = 1
    for dim in shape:
        count *= dim
    return count
