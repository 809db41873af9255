"""The decoder on native ops: the model as the structures that one C call a step reads. Knows no files, no sampling."""

from __future__ import annotations

import ctypes
import itertools
import math
from array import array
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from ctypes import addressof, c_float, c_int32, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.native.library import NativeLibrary, Pool
from kernels.native.structs import Chains, Draw, Head, Layer, Linear, Matrix, Model, NoiseKey, Step, address
from kernels.sample_tokens import NativeOps
from services.gpu_worker.kv_pool import SCALE_BYTES
from services.gpu_worker.model.config import ModelConfig
from services.gpu_worker.model.rope import rope_tables
from services.gpu_worker.native_inputs import Masks, NativeInputs
from services.gpu_worker.weights.native_loader import NativeLayer, NativeLinear, NativeWeights

LAYOUT = "block-head-16slot-dim-k"  # of the KV cache, see `struct layer` in kernels/native/native.h
KV_DTYPES: Mapping[str, type[np.float16 | np.int8]] = {"auto": np.float16, "float16": np.float16, "int8": np.int8}

Array = np.ndarray[Any, Any]
Chain = list[tuple[int, float]]  # guesses, each with the log-probability that the head gave it


@dataclass(frozen=True, slots=True)
class NativeCache:
    """K and V of one layer. numpy takes zeroed pages from the system, which cost nothing until written."""

    k: Array  # float16 or int8
    v: Array
    k_scale: Array | None = None  # float32 a slot and head, in eight bits
    v_scale: Array | None = None


def native_cache(config: ModelConfig, num_slots: int, kv_cache_dtype: str) -> NativeCache:
    dtype, heads = KV_DTYPES[kv_cache_dtype], num_slots * config.num_kv_heads
    k, v = (np.zeros(heads * dim, dtype) for dim in (config.head_dim, _padded(config.head_dim)))
    return NativeCache(k, v, *(np.zeros(heads, np.float32) for _ in "kv" if dtype is np.int8))


def block_bytes(config: ModelConfig, block_size: int, kv_cache_dtype: str) -> int:
    """Of one KV block in all layers, with scales."""
    width = np.dtype(KV_DTYPES[kv_cache_dtype]).itemsize
    head_bytes = (config.head_dim + _padded(config.head_dim)) * width + (2 * SCALE_BYTES if width == 1 else 0)
    return config.num_layers * block_size * config.num_kv_heads * head_bytes


def cache_layout(kv_cache_dtype: str) -> str:
    """Part of the kernel variant: what a block's bytes mean."""
    return LAYOUT if KV_DTYPES[kv_cache_dtype] is np.float16 else f"{LAYOUT}-{kv_cache_dtype}"


class NativeRun:
    """A step with the memory that it reads and writes: computed at once, or by the runner once it has been handed over.

    The runner may still have a step that nobody asks about any more, so the decoder keeps the last two."""

    def __init__(self, library: NativeLibrary, runner: Any, step: Step, kept: tuple[Any, ...], logits: torch.Tensor,
                 taps: torch.Tensor | None, drawn: ctypes.Array[c_int32], masks: Masks | None) -> None:  # fmt: skip
        self.drawn = drawn
        self._masks = masks
        self.taps = taps  # float32 [N, the decoder's tap_layers, hidden_size], its own, once the step has ended
        self._logits = logits
        self._library = library
        self._runner = runner
        self._step = step
        self._kept = kept
        self._number = -1

    @property
    def logits(self) -> torch.Tensor:
        """float32 [S, vocab_size]; a run that begins later overwrites them."""
        return self._logits[: len(self.drawn)]

    def allow(self, sample: int, mask: bytes) -> None:
        """What may be drawn for a sample that `NativeInputs.masked` has, as `Answer.mask_after` says it."""
        assert self._masks is not None
        self._masks.allow(sample, mask)

    def draw(self) -> None:
        """There is no more to `allow`: a step with such samples waits for this before it draws."""
        self._library.runner_allow(self._runner, ctypes.byref(self._step))

    @property
    def has_ended(self) -> bool:
        return bool(self._library.runner_has_ended(self._runner, self._number))

    def hand_over(self) -> None:
        self._number = self._library.runner_submit(self._runner, ctypes.byref(self._step))
        if self._number < 0:
            raise RuntimeError("two steps are under way already")

    def wait_until_late(self) -> None:
        self._library.runner_wait_until_late(self._runner, self._number)

    def wait(self) -> list[int]:
        """What is drawn for each sample row: -1 where a logit is not finite. Computes what was not handed over."""
        if self._number < 0:
            failed = self._library.runner_run(self._runner, ctypes.byref(self._step))
        else:
            failed = self._library.runner_wait(self._runner, self._number)
        self._check(failed)
        return list(self.drawn)

    def guess(self, head: Head, taps: Seq[torch.Tensor], counts: Seq[int]) -> tuple[list[Chain], float]:
        """See `NativeDecoder.guess`."""
        num, places = len(counts), max(1, *counts)
        ids, logprobs = (c_int32 * (num * places))(*[-1] * (num * places)), (c_float * (num * places))()
        pointers, wanted = (c_void_p * num)(*(t.data_ptr() for t in taps)), (c_int32 * num)(*counts)
        chains = Chains(
            ctypes.pointer(head), ctypes.pointer(self._step), addressof(pointers), addressof(wanted), addressof(ids),
            addressof(logprobs), places,
        )  # fmt: skip
        self._check(self._library.runner_chains(self._runner, ctypes.byref(chains)))
        pairs = list(zip(ids, logprobs, strict=True))
        found = [[p for p in pairs[n * places : n * places + count] if p[0] >= 0] for n, count in enumerate(counts)]
        return found, chains.later_s

    def _check(self, failed: int) -> None:
        if failed:
            raise MemoryError(f"no memory for a step of {self._step.num_rows} tokens")


class NativeDecoder:
    def __init__(
        self, config: ModelConfig, weights: NativeWeights, library: NativeLibrary, *, num_blocks: int,
        block_size: int, max_model_len: int, num_threads: int = 1, kv_cache_dtype: str = "auto",
        pool: Pool | None = None,
    ) -> None:  # fmt: skip
        """weights: of a head that drafts may have no layers.
        pool: of another decoder, that never computes while this one does; else its own, of num_threads."""
        cos, signed_sin = rope_tables(config, max_model_len)
        half = config.head_dim // 2
        self._kept: tuple[Any, ...] = (weights, cos[:, :half].contiguous(), signed_sin[:, half:].contiguous())
        self.caches = tuple(native_cache(config, num_blocks * block_size, kv_cache_dtype) for _ in weights.layers)
        self._layers = (Layer * len(weights.layers))(*map(_layer, weights.layers, self.caches))
        self._model = Model(
            config.hidden_size, config.intermediate_size, len(weights.layers), config.num_heads, config.num_kv_heads,
            config.head_dim, config.vocab_size, block_size, config.norm_eps,
            config.query_scale * math.log2(math.e), address(self._kept[1]), address(self._kept[2]),
            address(weights.final_norm), address(weights.embed_norm), address(weights.token_ids),
            weights.embedding.matrix(), _linear(weights.head), self._layers,
        )  # fmt: skip
        self._library = library
        self._pool: Pool | None = None
        self._runner: Any = None
        self._runs: deque[NativeRun] = deque(maxlen=2)  # handed over last
        self._logits = torch.empty(0, config.vocab_size)
        self._logits_address = 0
        self._hidden_size = config.hidden_size
        self.tap_layers: tuple[int, ...] = ()  # of which layers steps keep the input, see native.h
        self._use(pool or Pool(library, num_threads))

    @property
    def weights(self) -> NativeWeights:
        weights: NativeWeights = self._kept[0]
        return weights

    @property
    def num_weight_bytes(self) -> int:
        """In memory; an embedding that is the output head too counts once."""
        weights = self.weights
        linears = [weights.head, *(n for x in weights.layers for n in (x.qkv, x.out, x.gate, x.up, x.down))]
        parts = {id(part): part.num_bytes for linear in linears for part in linear.parts}
        return sum((parts | {id(weights.embedding): weights.embedding.num_bytes}).values())

    @property
    def native(self) -> NativeOps:
        """The ops with the pool, for a caller that runs no step meanwhile."""
        assert self._pool is not None
        return self._library, self._pool

    def set_num_threads(self, num_threads: int) -> None:
        """Not while a step runs."""
        self._use(Pool(self._library, num_threads))

    def _use(self, pool: Pool) -> None:
        runner = self._library.runner_new(ctypes.byref(self._model), pool.pointer)
        if not runner:
            raise MemoryError("no memory for the decoder")
        self._close()
        self._pool, self._runner = pool, runner

    def begin(self, inputs: NativeInputs, after: NativeRun | None = None) -> NativeRun:
        """Hands a step over to the runner, which has at most two at a time.

        after: the one before, if it draws tokens that this one reads."""
        run = self._prepare(inputs, after)
        run.hand_over()
        self._runs.append(run)
        return run

    def guess(
        self, inputs: NativeInputs, head: Head, taps: Seq[torch.Tensor], counts: Seq[int]
    ) -> tuple[list[Chain], float]:
        """As the layer of a head that drafts: chains of so many tokens of each of the inputs' sequences, shorter where
        it comes to no number; and the seconds that all places but the first took. Not while steps are under way.

        taps: float32 [rows, ...], contiguous: what the head reads for a sequence's rows. Each has a sample, its last
        row, and blocks for what is guessed too."""
        return self._prepare(inputs, None).guess(head, taps, counts)

    def run(self, inputs: NativeInputs, rows: torch.Tensor | None = None) -> NativeRun:
        """A step to `wait` for, which computes it. Not while others are under way.

        rows: float32 [N, hidden_size], contiguous, that the first layer reads in the embeddings' place."""
        return self._prepare(inputs, None, rows)

    def _prepare(self, inputs: NativeInputs, after: NativeRun | None, rows: torch.Tensor | None = None) -> NativeRun:
        """A step writes the K and V of all rows to the caches, and draws."""
        num_samples = len(inputs.sample_rows)
        if num_samples > len(self._logits):
            self._logits = torch.empty(num_samples, self._logits.shape[1])
            self._logits_address = self._logits.data_ptr()
        parts = (
            inputs.token_ids, inputs.positions, inputs.row_slots, inputs.spans, inputs.block_ids, inputs.sample_rows,
            inputs.path_ends, inputs.path_slots,
        )  # fmt: skip
        drawn, draws = (c_int32 * num_samples)(), (Draw * num_samples)()
        for sample, (temperature, *key) in inputs.noise.items():
            draws[sample] = Draw(temperature, NoiseKey(*key))
        ints, tap_layers = array("i", itertools.chain(*parts)), array("i", self.tap_layers)
        num_rows, num_taps = len(inputs.token_ids), len(self.tap_layers)
        taps = torch.empty(num_rows, num_taps, self._hidden_size) if num_taps else None
        masks = Masks(inputs.masked, num_samples, self._model.vocab_size) if inputs.masked else None
        start = ints.buffer_info()[0]
        addresses = [start + ints.itemsize * end for end in itertools.accumulate(map(len, parts), initial=0)]
        paths = addresses[6:8] if inputs.path_ends else (None, None)
        before = after.drawn if after else drawn
        step = Step(
            num_rows, len(inputs.spans) // 4, num_samples, num_taps,
            *addresses[:6], addressof(draws), addressof(before), self._logits_address, addressof(drawn),
            address(rows), tap_layers.buffer_info()[0] if num_taps else None, address(taps), *paths,
            *(masks.addresses() if masks else (None, None)), masks is not None,
        )  # fmt: skip
        kept = (ints, draws, before, rows, tap_layers)
        return NativeRun(self._library, self._runner, step, kept, self._logits, taps, drawn, masks)

    def forward(self, inputs: NativeInputs) -> tuple[torch.Tensor, list[int]]:
        """A whole step: its logits, and what is drawn from them."""
        run = self.run(inputs)
        drawn = run.wait()
        return run.logits, drawn

    def move_slots(self, moves: Seq[tuple[int, int]]) -> None:
        """K and V of all layers from slot to slot, one after the other. Not while a step runs."""
        slots_from, slots_to = ((c_int32 * len(moves))(*(move[i] for move in moves)) for i in range(2))
        self._library.move_slots(ctypes.byref(self._model), slots_from, slots_to, len(moves))

    def _close(self) -> None:
        if self._runner:
            self._library.runner_free(self._runner)
            self._runner = None
        self._pool = None  # which ends once nobody has it

    def __del__(self) -> None:
        if hasattr(self, "_pool"):
            self._close()


def _padded(head_dim: int) -> int:
    return -(-head_dim // 16) * 16


def _layer(layer: NativeLayer, cache: NativeCache) -> Layer:
    return Layer(
        *(address(t) for t in (layer.attn_norm, layer.ffn_norm, layer.q_norm, layer.k_norm)),
        *map(_linear, (layer.qkv, layer.out, layer.gate, layer.up, layer.down)),
        *(None if a is None else a.ctypes.data for a in (cache.k, cache.v, cache.k_scale, cache.v_scale)),
    )  # fmt: skip


def native_head(fc: NativeLinear, first_norm: torch.Tensor | None, reads_embedding: bool) -> Head:
    """What makes the rows that a head's layer reads; whoever holds it keeps both."""
    return Head(fc.parts[0].columns, reads_embedding, _linear(fc), address(first_norm))


def _linear(linear: NativeLinear) -> Linear:
    parts = (Matrix * 3)(*(part.matrix() for part in linear.parts))
    return Linear(len(linear.parts), sum(part.rows for part in linear.parts), parts, address(linear.bias))
