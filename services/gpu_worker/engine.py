"""The engine on torch and CPU: a step's chunks in, sampled tokens out. Synchronous, in whatever thread calls it.

Owns the model and the KV pool's bytes. Knows no Redis, no scheduling, and nothing of who owns which block. P2 holds
because every op's rows are independent (see `kernels/`) and sampling looks at one row at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch

from kernels.paged_attention import TILE, shapes_agree
from services.gpu_worker.attention_plan import PREFILL_GROUP_ROWS, Geometry
from services.gpu_worker.batch import Chunk, Drawn, EngineInfo
from services.gpu_worker.kv_pool import KVPool, block_bytes, cache_dtype, num_blocks_for
from services.gpu_worker.model.config import ConfigError, ModelConfig, NotNativeError
from services.gpu_worker.model.decoder import Decoder
from services.gpu_worker.model.transformers_decoder import TransformersModel
from services.gpu_worker.sampler import sample
from services.gpu_worker.speculative.verify import drawn_by_chunk, draws_of
from services.gpu_worker.step_inputs import StepInputs, build_step_inputs
from services.gpu_worker.variant import kernel_variant
from services.gpu_worker.weights.loader import Progress, load_weights, open_source

log = logging.getLogger(__name__)

TellTaps = Callable[[Seq[Chunk], torch.Tensor], None]  # chunks of a step, and what layers have read for their rows
WantsTaps = Callable[[Seq[Chunk]], bool]

_NO_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "out of memory", "ALLOC_FAILED")
USEFUL_CONTEXTS = 256  # full contexts that the default pool holds at most


class AnyDecoder(Protocol):
    def forward(self, inputs: StepInputs, pool: KVPool) -> torch.Tensor:
        """Write the K and V of all rows to the pool; the logits of the sample rows, float32 [S, vocab_size]."""
        ...


class OpenedModel(Protocol):
    config: ModelConfig
    identity: str


class TorchEngine:
    """Build one with `load`. `step` may be repeated: after an exception nothing but unused KV slots has changed."""

    def __init__(self, decoder: AnyDecoder, pool: KVPool, geometry: Geometry, info: EngineInfo) -> None:
        self.info = info
        self._decoder = decoder
        self._pool = pool
        self._geometry = geometry

    @classmethod
    def load(
        cls,
        model: Path,
        *,
        kv_cache_bytes: int | None = None,
        block_size: int = 16,
        max_model_len: int | None = None,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        quantization: str = "none",
        model_impl: str = "headrace",
        num_threads: int | None = None,
        progress: Progress | None = None,
        num_blocks: int | None = None,
        draft_block_bytes: int = 0,
    ) -> TorchEngine:
        """Seconds to minutes. ValueError (ConfigError, WeightsError, GGUFError) if the model cannot be served as asked.

        num_blocks: of the pool, if not as many as kv_cache_bytes buys with draft_block_bytes more for each.
        num_threads sets torch's for the whole process. progress is told (elements read, elements in all).
        """
        if dtype not in ("auto", "float32"):
            raise ConfigError(f"dtype: {dtype!r} is not supported on CPU (known: auto, float32)")
        if block_size < 1 or TILE % block_size:
            raise ConfigError(f"block_size: {block_size} does not divide {TILE}")
        kv_dtype = cache_dtype(kv_cache_dtype)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        source, decoder_of = _opened(model, quantization, model_impl, progress)
        config = source.config
        length = context_length(config, max_model_len, windows=True)
        size, most_useful = block_bytes(config, block_size, kv_dtype), USEFUL_CONTEXTS * -(-length // block_size)
        num_blocks = num_blocks or num_blocks_for(kv_cache_bytes, size + draft_block_bytes, most_useful)
        with torch.inference_mode(), memory_errors():
            decoder = decoder_of(length)
            pool = KVPool(
                num_blocks=num_blocks,
                block_size=block_size,
                num_layers=config.num_layers,
                num_kv_heads=config.cache_heads,
                head_dim=config.cache_dim,
                dtype=kv_dtype,
                shared=config.latent is not None,
            )
            # longrope's frequencies follow from the context, so other lengths are other models
            identity = f"{source.identity}-{length}" if config.rope.kind == "longrope" else source.identity
            variant = kernel_variant(identity, block_size=block_size, dtype="float32", kv_dtype=kv_dtype)
            geometry = _geometry(config, num_blocks, block_size, length)
        info = EngineInfo(variant, config.vocab_size, length, block_size, num_blocks, "cpu")
        return cls(decoder, pool, geometry, info)

    def step(self, chunks: Seq[Chunk]) -> list[Drawn]:
        """As `Engine.step`. SequenceError, before anything is computed, for a chunk that cannot be; and after, for a
        sequence whose logits are not finite. ValueError for parameters that `sampler.validate` refuses; MemoryError."""
        if not chunks:
            return []
        with torch.inference_mode(), memory_errors():
            inputs = build_step_inputs(chunks, self._geometry)
            logits = self._decoder.forward(inputs, self._pool)
            draws = draws_of(chunks, inputs.sample_chunks)
            finite = logits.amax(-1).isfinite()  # a NaN anywhere in a row is its maximum
            rows = finite.nonzero().flatten().tolist()
            tokens = dict(zip(rows, sample([logits[n] for n in rows], [draws[n] for n in rows]), strict=True))
        return drawn_by_chunk(chunks, inputs.sample_chunks, [tokens.get(n) for n in range(len(draws))])

    def hidden_rows(self, chunk: Chunk, layers: tuple[int, ...]) -> torch.Tensor:
        """As `Decoder.hidden_rows`, of the chunk's rows. ConfigError where transformers' code computes."""
        if not isinstance(self._decoder, Decoder):
            raise ConfigError("model_impl: what layers read is not known of models that transformers' code computes")
        with torch.inference_mode(), memory_errors():
            inputs = build_step_inputs([replace(chunk, sample=False)], self._geometry)
            return self._decoder.hidden_rows(inputs, self._pool, layers)

    def sample_logits(self, chunks: Seq[Chunk]) -> tuple[tuple[int, ...], torch.Tensor]:
        """As `vocab_map.LogitsEngine`."""
        with torch.inference_mode(), memory_errors():
            inputs = build_step_inputs(chunks, self._geometry)
            return inputs.sample_chunks, self._decoder.forward(inputs, self._pool)

    def logits(self, chunk: Chunk, first: int) -> torch.Tensor:
        """Of the chunk's rows from `first` on, float32 [rows, vocab_size]; its KV is written."""
        with torch.inference_mode(), memory_errors():
            inputs = build_step_inputs([replace(chunk, sample=True)], self._geometry)
            return self._decoder.forward(replace(inputs, sample_rows=torch.arange(first, chunk.count)), self._pool)


def _opened(
    model: Path, quantization: str, model_impl: str, progress: Progress | None
) -> tuple[OpenedModel, Callable[[int], AnyDecoder]]:
    """The model, and what loads its weights for contexts of a length."""
    if model_impl == "transformers":
        other = TransformersModel(model, quantization)
        return other, lambda _: other.decoder()
    source = open_source(model, quantization)
    return source, lambda length: Decoder(source.config, load_weights(source, progress), length)


class _MemoryErrors:
    """No generator: it is entered in every step, with cold caches."""

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError) and (
            isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _NO_MEMORY)
        ):
            raise MemoryError(str(error).splitlines()[0]) from None


_MEMORY_ERRORS = _MemoryErrors()


def memory_errors() -> _MemoryErrors:
    """MemoryError for what torch, libraries and drivers say in other ways, some by the text of a RuntimeError."""
    return _MEMORY_ERRORS


def tell_taps(tell: TellTaps, chunks: Seq[Chunk], rows: torch.Tensor) -> None:
    """What is drawn stands, whatever becomes of guesses."""
    try:
        tell(chunks, rows)
    except Exception:
        log.warning("what layers have read in a step is lost", exc_info=True)


def context_length(config: ModelConfig, asked: int | None, windows: bool = False) -> int:
    """The context to serve: what is asked for, else all the model has. ConfigError if it has less; NotNativeError if
    there are layers with a sliding window that is shorter, and these are not supported."""
    longest, window = config.max_position_embeddings, config.sliding_window
    length = longest if asked is None else asked
    if not 1 <= length <= longest:
        raise ConfigError(f"max_model_len: {length}, but the model's context is {longest}")
    if window is not None and length > window and not windows:
        raise NotNativeError(
            f"native kernels do not compute sliding windows (sliding_window: {window}; max_model_len up to that works)"
        )
    return length


def _geometry(config: ModelConfig, num_blocks: int, block_size: int, max_model_len: int) -> Geometry:
    """With the cheapest shapes of attention that give a row the same bits in decoding and in prefill."""
    geometry = Geometry(
        num_blocks=num_blocks,
        block_size=block_size,
        num_heads=config.num_heads,
        num_kv_heads=config.cache_heads,
        head_dim=config.cache_dim,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        window=config.sliding_window or 0,
    )
    for row_multiple in (4, 8):
        geometry = replace(geometry, row_multiple=row_multiple)
        sizes = tuple(geometry.padded_group_rows(rows) for rows in (1, PREFILL_GROUP_ROWS))
        if shapes_agree(sizes, config.cache_dim):
            return geometry
    return replace(geometry, decode_group_rows=PREFILL_GROUP_ROWS)
