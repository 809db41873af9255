"""The engine on native ops: a step's chunks in, sampled tokens out. Steps run on a thread of the native code.

Like `engine.TorchEngine` in everything but speed and rounding: products take activations of 8 bits (see
`kernels.matmul_a8`), the KV cache is float16 or int8. P2 holds because every op's rows are independent, by design.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import torch

from kernels.native.library import NativeLibrary
from services.gpu_worker.attention_plan import Geometry
from services.gpu_worker.batch import Chunk, Drawn, EngineInfo, SampledToken
from services.gpu_worker.engine import (
    USEFUL_CONTEXTS,
    TellTaps,
    WantsTaps,
    context_length,
    memory_errors,
    tell_taps,
)
from services.gpu_worker.kv_pool import num_blocks_for
from services.gpu_worker.model.config import ConfigError, ModelConfig, NotNativeError
from services.gpu_worker.model.native_decoder import (
    KV_DTYPES,
    NativeDecoder,
    NativeRun,
    block_bytes,
    cache_layout,
)
from services.gpu_worker.native_inputs import NativeInputs, build_native_inputs
from services.gpu_worker.sampler import Draw, sample
from services.gpu_worker.speculative.verify import drawn_by_chunk, draws_of, kept_of_trees
from services.gpu_worker.variant import native_variant
from services.gpu_worker.weights.loader import Progress, open_source
from services.gpu_worker.weights.native_loader import load_native_weights, return_freed_memory

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 128, 256)


class NativeStep:
    def __init__(
        self, decoder: NativeDecoder, chunks: Seq[Chunk], inputs: NativeInputs, run: NativeRun, tell: TellTaps | None
    ) -> None:
        # alone, a sequence gains less than two wake-ups a step cost
        self.may_be_followed = len(chunks) > 1 and not (inputs.host_samples or any(c.draft for c in chunks))
        self.samples = {id(chunks[i].seq): n for n, i in enumerate(inputs.sample_chunks) if chunks[i].sample}
        self._decoder = decoder
        self._chunks = chunks  # also keeps the sequences, and so their ids
        self._inputs = inputs
        self._tell = tell
        self._draws: list[Draw] | None = None  # once the tokens before it are known
        self._failure: Exception | None = None
        self.run = run

    @property
    def has_ended(self) -> bool:
        return self.run.has_ended

    def wait_until_late(self) -> None:
        self._allow()
        self.run.wait_until_late()

    def _known_draws(self) -> list[Draw]:
        if self._draws is None:
            self._draws = draws_of(self._chunks, self._inputs.sample_chunks)
        return self._draws

    def _allow(self) -> None:
        """Says what grammars allow, while the step computes what it will draw from. It never waits in vain: what fails
        here is told with its results."""
        if not self._inputs.masked or self._draws is not None:
            return
        try:
            draws = self._known_draws()
            for n in self._inputs.masked:
                seq, draw = self._chunks[self._inputs.sample_chunks[n]].seq, draws[n]
                if draw.num_unknown or seq.finish:  # the step before was for nothing, or its last: nobody takes this
                    continue
                mask = draw.mask()
                if mask is not None:
                    self.run.allow(n, mask)
        except Exception as e:
            self._failure = e
        finally:
            self.run.draw()

    def results(self) -> list[Drawn]:
        inputs, chunks = self._inputs, self._chunks
        self._allow()
        tokens = [SampledToken(token_id) if token_id >= 0 else None for token_id in self.run.wait()]
        if self._failure is not None:
            raise self._failure
        rows = [n for n in inputs.host_samples if tokens[n] is not None]
        if rows:
            draws = self._known_draws()
            with torch.inference_mode(), memory_errors():
                by_host = sample([self.run.logits[n] for n in rows], [draws[n] for n in rows], self._decoder.native)
            for n, token in zip(rows, by_host, strict=True):
                tokens[n] = token
        drawn = drawn_by_chunk(chunks, inputs.sample_chunks, tokens)
        taps = self.run.taps
        if any(c.draft and not c.draft.is_chain for c in chunks):
            chunks, rows, moves = kept_of_trees(chunks, drawn, inputs.row_slots)
            taps = None if taps is None else taps[rows]
            self._decoder.move_slots(moves)
        if self._tell is not None and taps is not None:
            tell_taps(self._tell, chunks, taps)
        return drawn


class NativeEngine:
    """Build one with `load`. `step` may be repeated: after an exception nothing but unused KV slots has changed."""

    def __init__(self, decoder: NativeDecoder, config: ModelConfig, geometry: Geometry, info: EngineInfo) -> None:
        self.info = info
        self.config = config
        self.decoder = decoder
        self._geometry = geometry
        self._before: NativeStep | None = None
        self._tap_layers: tuple[int, ...] = ()
        self._tell_taps: TellTaps | None = None
        self._wants_taps: WantsTaps = lambda chunks: True

    def tap(self, layers: tuple[int, ...], tell: TellTaps, wants: WantsTaps = lambda chunks: True) -> None:
        """From now on tells, of each step that has ended, what these layers read for its rows, as `hidden_rows` has it,
        where that was wanted when it began; of a tree of drafts, of the rows that were right. In the thread that takes
        the step's results."""
        self._tap_layers, self._tell_taps, self._wants_taps = layers, tell, wants

    def _tapped(self, chunks: Seq[Chunk]) -> None:
        """Says what the next step keeps."""
        self.decoder.tap_layers = self._tap_layers if self._tap_layers and self._wants_taps(chunks) else ()

    @classmethod
    def load(
        cls,
        model: Path,
        library: NativeLibrary,
        *,
        num_threads: int,
        kv_cache_bytes: int | None = None,
        block_size: int = 16,
        max_model_len: int | None = None,
        kv_cache_dtype: str = "auto",
        quantization: str = "none",
        progress: Progress | None = None,
        num_blocks: int | None = None,
        draft_block_bytes: int = 0,
    ) -> NativeEngine:
        """ValueError (ConfigError, WeightsError, GGUFError) if the model cannot be served as asked.

        num_blocks: of the pool, if not as many as kv_cache_bytes buys with draft_block_bytes more for each.
        Leaves torch with one thread in the whole process: its threads would fight the pool's for cores.
        """
        if kv_cache_dtype not in KV_DTYPES:
            raise NotNativeError(f"native kernels do not know kv_cache_dtype {kv_cache_dtype} ({', '.join(KV_DTYPES)})")
        if block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size: {block_size} is not one of {', '.join(map(str, BLOCK_SIZES))}")
        source = open_source(model, quantization)
        config = source.config
        length = context_length(config, max_model_len)
        most_useful = USEFUL_CONTEXTS * -(-length // block_size)
        size = block_bytes(config, block_size, kv_cache_dtype) + draft_block_bytes
        num_blocks = num_blocks or num_blocks_for(kv_cache_bytes, size, most_useful)
        torch.set_num_threads(num_threads)
        with torch.inference_mode(), memory_errors():
            decoder = NativeDecoder(
                config, load_native_weights(source, progress), library, num_threads=num_threads,
                num_blocks=num_blocks, block_size=block_size, max_model_len=length,
                kv_cache_dtype=kv_cache_dtype,
            )  # fmt: skip
        return_freed_memory()
        torch.set_num_threads(1)
        geometry = Geometry(
            num_blocks, block_size, config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size, length
        )
        variant = native_variant(
            source.identity, library.name, block_size=block_size, layout=cache_layout(kv_cache_dtype)
        )
        info = EngineInfo(variant, config.vocab_size, length, block_size, num_blocks, "cpu", is_native=True)
        return cls(decoder, config, geometry, info)

    def step(self, chunks: Seq[Chunk]) -> list[Drawn]:
        """As `Engine.step`. SequenceError, before anything is computed, for a chunk that cannot be; and after, for a
        sequence whose logits are not finite. ValueError for parameters that `sampler.validate` refuses; MemoryError."""
        if not chunks:
            return []
        inputs = build_native_inputs(chunks, self._geometry)
        self._tapped(chunks)
        with memory_errors():
            run = self.decoder.run(inputs)
        return NativeStep(self.decoder, chunks, inputs, run, self._tell_taps).results()

    def begin(self, chunks: Seq[Chunk]) -> NativeStep:
        """As `OverlappingEngine.begin`."""
        before = self._before
        inputs = build_native_inputs(chunks, self._geometry, before.samples if before else None)
        self._tapped(chunks)
        with memory_errors():
            run = self.decoder.begin(inputs, before.run if before else None)
        self._before = NativeStep(self.decoder, chunks, inputs, run, self._tell_taps)
        return self._before

    def hidden_rows(self, chunk: Chunk, layers: tuple[int, ...]) -> torch.Tensor:
        """What these layers read for the chunk's rows, float32 [rows, layers, hidden_size], the number of layers
        standing for what the last leaves, and one more for that, normed; the chunk's KV is written."""
        kept, self.decoder.tap_layers = self.decoder.tap_layers, layers
        try:
            run = self.decoder.run(build_native_inputs([replace(chunk, sample=False)], self._geometry))
        finally:
            self.decoder.tap_layers = kept
        run.wait()
        assert run.taps is not None
        return run.taps

    def sample_logits(self, chunks: Seq[Chunk]) -> tuple[list[int], torch.Tensor]:
        """As `vocab_map.LogitsEngine`."""
        inputs = build_native_inputs(chunks, self._geometry)
        with memory_errors():
            return inputs.sample_chunks, self.decoder.forward(inputs)[0]

    def logits(self, chunk: Chunk, first: int) -> torch.Tensor:
        """Of the chunk's rows from `first` on, float32 [rows, vocab_size], until the next call; its KV is written."""
        inputs = build_native_inputs([chunk], self._geometry)
        return self.decoder.forward(replace(inputs, sample_rows=list(range(first, chunk.count))))[0]
