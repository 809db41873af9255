"""What a worker would allocate for a model, and what fits: by the engines' own sizing, before anything is loaded.

A card holds matrices as the file quantises them, else in 16 bits, and its pool is what they leave of the share of its
memory that a worker may use. On a CPU the pool is a setting, or a share of the memory that is available.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch

from kernels.packed_weight import TILE_ROWS, packed_bytes
from services.gpu_worker.engine import USEFUL_CONTEXTS, context_length
from services.gpu_worker.kv_pool import block_bytes, cache_dtype, num_blocks_for
from services.gpu_worker.model import native_decoder
from services.gpu_worker.model.config import ModelConfig, NotNativeError
from services.gpu_worker.weights.native_loader import refuse_unknown
from services.gpu_worker.weights.outline import Outline, Outlined


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of a worker that its memory depends on."""

    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_bytes: int | None = None  # of a CPU
    memory_share: float = 0.9  # of a card


@dataclass(frozen=True, slots=True)
class Plan:
    """step_bytes: activations and logits of the largest step, and tables of rotary angles."""

    engine: str  # "native", "torch" or "card"
    num_parameters: int
    max_model_len: int
    weight_bytes: int
    step_bytes: int
    block_size: int
    block_bytes: int
    num_blocks: int

    @property
    def kv_bytes_per_token(self) -> float:
        return self.block_bytes / self.block_size

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def num_sequences(self, context: int) -> int:
        """How many of that many tokens the pool holds at once."""
        return self.num_blocks // ceil(context / self.block_size)

    def bytes_for(self, context: int, concurrency: int) -> int:
        """A pool that holds that."""
        return concurrency * ceil(context / self.block_size) * self.block_bytes


def cpu_engine(config: ModelConfig, asked: str, limits: Limits) -> str:
    """What `engines.load_engine` would choose where there is a compiler."""
    if asked == "torch" or limits.kv_cache_dtype not in native_decoder.KV_DTYPES:
        return "torch"
    try:
        refuse_unknown(config)
        context_length(config, limits.max_model_len)
    except NotNativeError:
        if asked == "native":
            raise
        return "torch"
    return "native"


def plan_cpu(outline: Outline, limits: Limits, engine: str = "auto") -> Plan:
    """ValueError (ConfigError) for settings that the worker would refuse."""
    config = outline.config
    kind = cpu_engine(config, engine, limits)
    length = context_length(config, limits.max_model_len, windows=kind == "torch")
    if kind == "native":
        size = native_decoder.block_bytes(config, limits.block_size, limits.kv_cache_dtype)
    else:
        size = block_bytes(config, limits.block_size, cache_dtype(limits.kv_cache_dtype))
    most_useful = USEFUL_CONTEXTS * -(-length // limits.block_size)
    num_blocks = num_blocks_for(limits.kv_cache_bytes, size, most_useful)
    weights = _native_weights(outline) if kind == "native" else _torch_weights(outline)
    return _plan(kind, outline, length, weights, _step_bytes(config, limits, length, 4), limits, size, num_blocks)


def plan_card(outline: Outline, limits: Limits, memory_bytes: int) -> Plan:
    """A plan of 0 blocks where the weights alone are too many."""
    config = outline.config
    length = context_length(config, limits.max_model_len, windows=True)
    dtype = torch.bfloat16 if limits.kv_cache_dtype == "auto" else cache_dtype(limits.kv_cache_dtype)
    size = block_bytes(config, limits.block_size, dtype)
    weights = card_weight_bytes(outline)
    step = _step_bytes(config, limits, length, 2)
    left = int(memory_bytes * limits.memory_share) - weights - step
    return _plan("card", outline, length, weights, step, limits, size, max(0, left // size))


def _plan(engine: str, outline: Outline, length: int, weights: int, step: int, limits: Limits, size: int,
          num_blocks: int) -> Plan:  # fmt: skip
    num_parameters = sum(p.num_elements for p in outline.parameters)
    return Plan(engine, num_parameters, length, weights, step, limits.block_size, size, num_blocks)


def _native_weights(outline: Outline) -> int:
    return sum(
        packed_bytes(p.native_type, *p.shape) if len(p.shape) == 2 else 4 * -(-p.num_elements // TILE_ROWS) * TILE_ROWS
        for p in outline.parameters
    )


def _torch_weights(outline: Outline) -> int:
    """float32 all; an embedding that is the output head too is there a second time, packed for products."""
    config = outline.config
    twice = config.vocab_size * config.hidden_size if config.tied else 0
    return 4 * (twice + sum(p.num_elements for p in outline.parameters))


def card_weight_bytes(outline: Outline) -> int:
    return sum(map(_card_bytes, outline.parameters))


def _card_bytes(parameter: Outlined) -> int:
    return int(parameter.num_elements * (parameter.file_bits if parameter.quantized_as else 16) / 8)


def _step_bytes(config: ModelConfig, limits: Limits, length: int, width: int) -> int:
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    row = width * (3 * config.hidden_size + 2 * heads + 2 * config.intermediate_size)
    logits = 4 * limits.max_num_seqs * config.vocab_size
    return limits.max_num_batched_tokens * row + logits + 4 * length * config.turned
