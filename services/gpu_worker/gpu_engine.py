"""The engine on a GPU's ops: a step's chunks in, sampled tokens out. A step is only put in the device's queue.

As `engine.TorchEngine` in what it computes, in the type that the device computes in. All steps are on one stream, so
they run in the order in which they begin, and what a step draws the next one reads there, before the host has seen it.
Where Triton's kernels are interpreted, and in tests of everything but kernels, the device is the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from kernels.kv_cache import KvCache, empty_kv_cache
from services.gpu_worker.attention_plan import Geometry
from services.gpu_worker.batch import Chunk, Drawn, EngineInfo, Sequence
from services.gpu_worker.block_tables import BlockTables
from services.gpu_worker.composer import MAX_SCORES
from services.gpu_worker.cuda_graphs import DecodeGraphs, Recorder
from services.gpu_worker.device import computed_types
from services.gpu_worker.device_sampler import draw, needs_history
from services.gpu_worker.engine import USEFUL_CONTEXTS, TellTaps, WantsTaps, context_length, memory_errors
from services.gpu_worker.gpu_inputs import DeviceInputs, build_inputs, upload
from services.gpu_worker.gpu_memory import NOTHING_BESIDE, Beside, Budget, Card
from services.gpu_worker.gpu_step import GpuStep
from services.gpu_worker.kv_pool import block_bytes, num_blocks_for
from services.gpu_worker.model.config import ModelConfig
from services.gpu_worker.model.gpu_decoder import GpuDecoder, Taps
from services.gpu_worker.speculative.verify import draws_of
from services.gpu_worker.variant import gpu_variant, kind_of
from services.gpu_worker.weights.library_products import LibraryOnDevice
from services.gpu_worker.weights.loader import Progress, load_weights, open_source
from services.gpu_worker.weights.on_device import OnDevice
from services.gpu_worker.weights.outline import outline
from services.gpu_worker.weights.source import WeightSource
from shared.protocol import SamplingParams

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step may be, and the share of a card that the worker may use."""

    max_num_batched_tokens: int
    max_num_seqs: int
    memory_share: float


DEFAULT_LIMITS = StepLimits(512, 64, 0.9)


def largest_step(engine: GpuEngine, limits: StepLimits) -> None:
    """As many tokens, samples and scores of prompts as may be, of the longest sequences; the engine's first block takes
    what they store."""
    info = engine.info
    params = SamplingParams(
        max_tokens=1, temperature=1.0, top_p=0.9, logprobs=20, repetition_penalty=1.1, logit_bias={0: 1.0}, seed=0,
        prompt_logprobs=20,
    )  # fmt: skip
    chunks, left, length = [], limits.max_num_batched_tokens, info.max_model_len
    token_ids, block_ids = [0] * length, [0] * -(-length // info.block_size)
    for number in range(min(limits.max_num_seqs, left)):
        later = min(limits.max_num_seqs, limits.max_num_batched_tokens) - number - 1
        count = min(left - later, length)
        num_scores = min(count - 1, MAX_SCORES) if number == 0 else 0
        seq = Sequence(
            sid="largest", epoch=0, choice=0, params=params, num_prompt_tokens=length, token_ids=token_ids,
            block_ids=block_ids, score_from=length - 1 - num_scores,
        )  # fmt: skip
        chunks.append(Chunk(seq, length - count, count, True))
        left -= count
    engine.step(chunks)


class GpuEngine:
    """Build one with `load`. `step` may be repeated: after an exception nothing but unused KV slots has changed."""

    def __init__(
        self, decoder: GpuDecoder, caches: tuple[KvCache, ...], geometry: Geometry, info: EngineInfo,
        device: torch.device, graphs: DecodeGraphs | None = None, fast: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.info = info
        self.decoder = decoder
        self._caches = caches
        self._geometry = geometry
        self.device = device
        self._graphs = graphs
        self._fast = fast
        self.dtype = dtype  # computed in
        self._tables = BlockTables()
        self._before: GpuStep | None = None
        self._tap_layers: tuple[int, ...] = ()
        self._tell_taps: TellTaps | None = None
        self._wants_taps: WantsTaps = lambda chunks: True

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    @property
    def recorder(self) -> Recorder | None:
        return None if self._graphs is None else self._graphs.recorder

    def tap(self, layers: tuple[int, ...], tell: TellTaps, wants: WantsTaps = lambda chunks: True) -> None:
        """As `NativeEngine.tap`; rows stay on the device, in the type that is computed in. Chunks come in the order of
        their rows."""
        self._tap_layers, self._tell_taps, self._wants_taps = layers, tell, wants
        if self._graphs is not None:
            self._graphs.tap(layers)

    @classmethod
    def load(
        cls,
        model: Path,
        device: torch.device,
        *,
        kv_cache_bytes: int | None = None,
        block_size: int = 16,
        max_model_len: int | None = None,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        quantization: str = "none",
        limits: StepLimits = DEFAULT_LIMITS,
        card: Card | None = None,
        recorder: Recorder | None = None,
        fast: bool = False,
        progress: Progress | None = None,
        num_blocks: int | None = None,
        beside: Beside = NOTHING_BESIDE,
    ) -> GpuEngine:
        """ValueError (ConfigError, WeightsError, GGUFError) if the model cannot be served as asked.

        dtype auto is bfloat16, and float32 where the device is the CPU; the cache's is what is computed in. card: where
        there is one, what weights and a step leave of it is the pool's, unless kv_cache_bytes says how large that is.
        beside: what others will take of it, and of each block. num_blocks: for such another, to whom memory was left.
        recorder: of graphs, with which decoding steps are launched at once. fast: libraries multiply many rows, and
        tiles of attention are as large as rows make worth while; a row's numbers may then depend on how many there are.
        """
        computed, kv_dtype = computed_types(device, dtype, kv_cache_dtype)
        source = open_source(model, quantization)
        config = source.config
        length = context_length(config, max_model_len, windows=True)
        budget = None
        if card is not None and num_blocks is None:
            budget = Budget(card.total_bytes, card.free_bytes(), limits.memory_share)
            budget.check_weights(outline(model, quantization).device_bytes(computed) + beside.weight_bytes)
        decoder = _decoder(source, LibraryOnDevice if fast else OnDevice, device, computed, length, progress)
        identity = f"{source.identity}-{length}" if config.rope.kind == "longrope" else source.identity
        variant = gpu_variant(identity, device, block_size=block_size, dtype=computed, kv_dtype=kv_dtype, fast=fast)

        def with_pool(num_blocks: int) -> GpuEngine:
            geometry = Geometry(
                num_blocks, block_size, config.num_heads, config.cache_heads, config.cache_dim, config.vocab_size,
                length,
            )  # fmt: skip
            info = EngineInfo(variant, config.vocab_size, length, block_size, num_blocks, kind_of(device))
            caches = _caches(config, num_blocks, block_size, kv_dtype, device)
            larger = fast and computed != torch.float32 and config.latent is None  # tiles; those of latents are alike
            graphs = _graphs(decoder, caches, recorder, device, geometry, limits, larger)
            return cls(decoder, caches, geometry, info, device, graphs, larger, computed)

        size = block_bytes(config, block_size, kv_dtype) + beside.block_bytes
        most_useful = USEFUL_CONTEXTS * -(-length // block_size)
        if card is None:
            return with_pool(num_blocks or num_blocks_for(kv_cache_bytes, size, most_useful))
        if budget is None:
            return _tried(with_pool(num_blocks or 1), limits)
        run = partial(largest_step, with_pool(1), limits)
        return with_pool(_num_blocks(card, budget, run, beside, kv_cache_bytes, size, most_useful))

    def step(self, chunks: Seq[Chunk]) -> list[Drawn]:
        """As `Engine.step`. SequenceError, before anything is computed, for a chunk that cannot be; and after, for a
        sequence whose logits are not finite. ValueError for parameters that `sampler.validate` refuses; MemoryError."""
        return self._begin(chunks, None).results() if chunks else []

    def begin(self, chunks: Seq[Chunk]) -> GpuStep:
        """As `OverlappingEngine.begin`."""
        self._before = self._begin(chunks, self._before)
        return self._before

    def sample_logits(self, chunks: Seq[Chunk]) -> tuple[tuple[int, ...], torch.Tensor]:
        """As `vocab_map.LogitsEngine`, on the device."""
        inputs, sample_chunks = build_inputs(chunks, self._geometry, fast=self._fast, tables=self._tables)
        with torch.inference_mode(), memory_errors():
            logits = self._logits(inputs, None)
            if self._graphs is not None:
                self._graphs.record_due()
        return sample_chunks, logits

    def logits(self, chunk: Chunk, first: int) -> torch.Tensor:
        """Of the chunk's rows from `first` on, float32 [rows, vocab_size] on the host; its KV is written."""
        inputs, _ = build_inputs([chunk], self._geometry, fast=self._fast)
        tensors = inputs.tensors()
        tensors[3] = torch.arange(first, chunk.count)
        with torch.inference_mode(), memory_errors():
            return self.decoder.forward(inputs.with_tensors(upload(tensors, self.device)), self._caches).cpu()

    def hidden_rows(self, chunk: Chunk, layers: tuple[int, ...]) -> torch.Tensor:
        """As `NativeEngine.hidden_rows`."""
        inputs, _ = build_inputs([replace(chunk, sample=False)], self._geometry, fast=self._fast)
        taps = Taps(layers)
        with torch.inference_mode(), memory_errors():
            self._logits(inputs, None, taps)
            return taps.rows.float().cpu()

    def _begin(self, chunks: Seq[Chunk], before: GpuStep | None) -> GpuStep:
        inputs, sample_chunks = build_inputs(
            chunks, self._geometry, before.samples if before else None, fast=self._fast, tables=self._tables
        )
        draws = draws_of(chunks, sample_chunks)
        taps = Taps(self._tap_layers) if self._tap_layers and self._wants_taps(chunks) else None
        with torch.inference_mode(), memory_errors():
            tokens = draw(self._logits(inputs, before, taps), draws)
            if self._graphs is not None:
                self._graphs.record_due()
        waits = any(map(needs_history, draws)) or any(c.draft for c in chunks)
        return GpuStep(chunks, sample_chunks, tokens, not waits, taps, self._tell_taps)

    def _logits(self, inputs: DeviceInputs, before: GpuStep | None, taps: Taps | None = None) -> torch.Tensor:
        """inputs: on the host."""

        def fill_in(token_ids: torch.Tensor) -> None:
            if before is not None:
                before.tokens.fill_in(token_ids)

        logits = None if self._graphs is None else self._graphs.run(inputs, fill_in, taps)
        if logits is None:
            inputs = inputs.with_tensors(upload(inputs.tensors(), self.device))
            fill_in(inputs.token_ids)
            logits = self.decoder.forward(inputs, self._caches, taps)
        return logits


def _tried(engine: GpuEngine, limits: StepLimits) -> GpuEngine:
    """Most kernels are compiled then, and the memory is there."""
    largest_step(engine, limits)
    return engine


def _decoder(
    source: WeightSource, placement: type[OnDevice], device: torch.device, dtype: torch.dtype, length: int,
    progress: Progress | None,
) -> GpuDecoder:  # fmt: skip
    with torch.inference_mode(), memory_errors():
        weights = load_weights(source, progress, placement(device, dtype))
        return GpuDecoder(source.config, weights, length)


def _graphs(
    decoder: GpuDecoder, caches: tuple[KvCache, ...], recorder: Recorder | None, device: torch.device,
    geometry: Geometry, limits: StepLimits, fast: bool,
) -> DecodeGraphs | None:  # fmt: skip
    if recorder is None:
        return None
    return DecodeGraphs(
        partial(decoder.forward, caches=caches), recorder, device, block_size=geometry.block_size,
        max_num_seqs=limits.max_num_seqs, max_model_len=geometry.max_model_len,
        group=geometry.num_heads // geometry.num_kv_heads, fast=fast,
    )  # fmt: skip


def _caches(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[KvCache, ...]:
    """Of each layer; with latents keys and values are the same numbers."""
    heads, dim, shared = config.cache_heads, config.cache_dim, config.latent is not None
    with torch.inference_mode(), memory_errors():
        return tuple(
            empty_kv_cache(num_blocks, heads, block_size, dim, dtype, device, shared=shared)
            for _ in range(config.num_layers)
        )


def _num_blocks(
    card: Card, budget: Budget, run: Callable[[], None], beside: Beside, kv_cache_bytes: int | None, block_bytes: int,
    most_useful: int,
) -> int:  # fmt: skip
    """run: the largest step. It is run in any case, since it compiles most kernels."""
    step = card.peak_bytes(run) + beside.step_bytes
    if kv_cache_bytes is not None:
        return num_blocks_for(kv_cache_bytes, block_bytes, most_useful)
    taken = budget.free - card.free_bytes() + beside.weight_bytes
    num_blocks = budget.num_blocks(taken=taken, step=step, block_bytes=block_bytes, most_useful=most_useful)
    if budget.shortened:
        log.warning("%s", budget.shortened)
    return num_blocks
