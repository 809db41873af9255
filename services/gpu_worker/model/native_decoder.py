"""The decoder on native ops: the model as the structures that one C call a step reads. Knows no files, no sampling."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.gumbel_argmax import NativeOps
from kernels.native.library import NativeLibrary, Pool
from kernels.native.structs import Layer, Linear, Matrix, Model, Step, address
from services.gpu_worker.model.config import ModelConfig
from services.gpu_worker.model.decoder import rope_tables
from services.gpu_worker.native_inputs import NativeInputs
from services.gpu_worker.weights.native_loader import NativeLayer, NativeLinear, NativeWeights

LAYOUT = "block-head-16slot-dim-k"  # of the KV cache, see `struct layer` in kernels/native/native.h
KV_BYTES = 2  # float16


@dataclass(frozen=True, slots=True)
class NativeCache:
    """K and V of one layer. numpy takes zeroed pages from the system, which cost nothing until written."""

    k: np.ndarray[Any, np.dtype[np.float16]]
    v: np.ndarray[Any, np.dtype[np.float16]]


def block_bytes(config: ModelConfig, block_size: int) -> int:
    """Of one KV block in all layers."""
    slot = config.num_kv_heads * (config.head_dim + _padded(config.head_dim))
    return config.num_layers * block_size * slot * KV_BYTES


class NativeDecoder:
    def __init__(
        self, config: ModelConfig, weights: NativeWeights, library: NativeLibrary, *, num_threads: int,
        num_blocks: int, block_size: int, max_model_len: int,
    ) -> None:  # fmt: skip
        cos, signed_sin = rope_tables(config, weights.rope_factors, max_model_len)
        half = config.head_dim // 2
        self._kept: tuple[Any, ...] = (weights, cos[:, :half].contiguous(), signed_sin[:, half:].contiguous())
        slots = num_blocks * config.num_kv_heads * block_size
        sizes = slots * config.head_dim, slots * _padded(config.head_dim)
        self.caches = tuple(NativeCache(*(np.zeros(n, np.float16) for n in sizes)) for _ in weights.layers)
        self._layers = (Layer * config.num_layers)(*map(_layer, weights.layers, self.caches))
        self._model = Model(
            config.hidden_size, config.intermediate_size, config.num_layers, config.num_heads, config.num_kv_heads,
            config.head_dim, config.vocab_size, block_size, config.rms_norm_eps,
            config.head_dim**-0.5 * math.log2(math.e), address(self._kept[1]), address(self._kept[2]),
            address(weights.final_norm), weights.embedding.matrix(), _linear(weights.head), self._layers,
        )  # fmt: skip
        self._library = library
        self._pool: Pool | None = None
        self._decoder: Any = None
        self._logits = torch.empty(0, config.vocab_size)
        self._best = np.empty(0, np.int32)
        self.set_num_threads(num_threads)

    @property
    def num_weight_bytes(self) -> int:
        """In memory; an embedding that is the output head too counts once."""
        weights: NativeWeights = self._kept[0]
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
        self._close()
        self._pool = Pool(self._library, num_threads)
        self._decoder = self._library.decoder_new(ctypes.byref(self._model), self._pool.pointer)
        if not self._decoder:
            raise MemoryError("no memory for the decoder")

    def forward(self, inputs: NativeInputs) -> tuple[torch.Tensor, list[int]]:
        """Write the K and V of all rows to the caches; the logits of the sample rows, float32 [S, vocab_size], and the
        first of the largest of each (-1 where a logit is not finite). The next call overwrites the logits."""
        num_samples = len(inputs.sample_rows)
        if num_samples > len(self._logits):
            self._logits = torch.empty(num_samples, self._logits.shape[1])
            self._best = np.empty(num_samples, np.int32)
        step = Step(
            len(inputs.token_ids), len(inputs.spans), num_samples, 0,
            *(a.ctypes.data for a in (inputs.token_ids, inputs.positions, inputs.row_blocks, inputs.spans,
                                      inputs.block_ids, inputs.sample_rows)),
            self._logits.data_ptr(), self._best.ctypes.data,
        )  # fmt: skip
        if self._library.decoder_step(self._decoder, ctypes.byref(step)):
            raise MemoryError(f"no memory for a step of {len(inputs.token_ids)} tokens")
        return self._logits[:num_samples], self._best[:num_samples].tolist()

    def _close(self) -> None:
        if self._decoder:
            self._library.decoder_free(self._decoder)
            self._decoder = None
        if self._pool is not None:
            self._pool.close()

    def __del__(self) -> None:
        if hasattr(self, "_pool"):
            self._close()


def _padded(head_dim: int) -> int:
    return -(-head_dim // 16) * 16


def _layer(layer: NativeLayer, cache: NativeCache) -> Layer:
    return Layer(
        *(address(t) for t in (layer.attn_norm, layer.ffn_norm, layer.q_norm, layer.k_norm)),
        *map(_linear, (layer.qkv, layer.out, layer.gate, layer.up, layer.down)),
        cache.k.ctypes.data, cache.v.ctypes.data,
    )  # fmt: skip


def _linear(linear: NativeLinear) -> Linear:
    parts = (Matrix * 3)(*(part.matrix() for part in linear.parts))
    return Linear(len(linear.parts), sum(part.rows for part in linear.parts), parts, address(linear.bias))
