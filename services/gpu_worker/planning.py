"""What a worker would allocate for a model, and what fits: by the engines' own sizing, before anything is loaded.

On a card, where nobody else is thought to be, the pool is what weights and a step leave of the worker's share. On a CPU
it is a setting, or a share of the memory that is available.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

import torch

from kernels.attention import MOST_PART_BYTES, PART
from kernels.log_sums import MAX_ELEMENTS
from kernels.packed_weight import TILE_ROWS, packed_bytes
from services.gpu_worker.composer import MAX_SCORES
from services.gpu_worker.device import computed_types
from services.gpu_worker.engine import USEFUL_CONTEXTS, context_length
from services.gpu_worker.gpu_memory import NOTHING_BESIDE, Beside, Budget
from services.gpu_worker.kv_pool import block_bytes, cache_dtype, num_blocks_for
from services.gpu_worker.model import native_decoder
from services.gpu_worker.model.config import ModelConfig, NotNativeError
from services.gpu_worker.speculative.head_proposer import MAX_KEPT_ROWS
from services.gpu_worker.speculative.model_speculator import MAX_CATCH_UP_TOKENS
from services.gpu_worker.weights.native_loader import refuse_unknown
from services.gpu_worker.weights.outline import Outline


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of a worker that its memory depends on."""

    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_bytes: int | None = None
    memory_share: float = 0.9  # of a card
    dtype: str = "auto"  # that a card computes in


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


def cpu_block_bytes(config: ModelConfig, asked: str, limits: Limits) -> int:
    """Of the engine that `cpu_engine` says."""
    if cpu_engine(config, asked, limits) == "native":
        return native_decoder.block_bytes(config, limits.block_size, limits.kv_cache_dtype)
    return block_bytes(config, limits.block_size, cache_dtype(limits.kv_cache_dtype))


def plan_cpu(
    outline: Outline, limits: Limits, engine: str = "auto", draft: Outline | None = None, beside: Beside | None = None
) -> Plan:
    """draft: of a model that guesses, which has as many blocks. ValueError (ConfigError) for settings that the worker
    would refuse."""
    config = outline.config
    kind = cpu_engine(config, engine, limits)
    length = context_length(config, limits.max_model_len, windows=kind == "torch")
    weights, step, size = (beside.weight_bytes, beside.step_bytes, beside.block_bytes) if beside else (0, 0, 0)
    for each in (outline, draft):
        if each is not None:
            size += cpu_block_bytes(each.config, engine, limits)
            is_native = cpu_engine(each.config, engine, limits) == "native"
            weights += _native_weights(each) if is_native else _torch_weights(each)
            step += _step_bytes(each.config, limits, min(length, each.config.max_position_embeddings))
    most_useful = USEFUL_CONTEXTS * -(-length // limits.block_size)
    num_blocks = num_blocks_for(limits.kv_cache_bytes, size, most_useful)
    return _plan(kind, outline, length, weights, step, limits, size, num_blocks)


def plan_card(outline: Outline, limits: Limits, memory_bytes: int, beside: Beside = NOTHING_BESIDE) -> Plan:
    """A plan of 0 blocks where the weights alone are too many. ValueError as the GPU engine."""
    config = outline.config
    length = context_length(config, limits.max_model_len, windows=True)
    computed, kv_dtype = computed_types(torch.device("cuda"), limits.dtype, limits.kv_cache_dtype)
    size = block_bytes(config, limits.block_size, kv_dtype) + beside.block_bytes
    most_useful = USEFUL_CONTEXTS * -(-length // limits.block_size)
    weights = outline.device_bytes(computed) + beside.weight_bytes
    step = _card_step_bytes(config, limits, length, computed.itemsize) + beside.step_bytes
    budget = Budget(memory_bytes, memory_bytes, limits.memory_share)
    num_blocks = budget.room(taken=weights, step=step, block_bytes=size, most_useful=most_useful)
    if num_blocks and limits.kv_cache_bytes is not None:
        num_blocks = num_blocks_for(limits.kv_cache_bytes, size, most_useful)
    return _plan("card", outline, length, weights, step, limits, size, num_blocks)


def draft_beside(outline: Outline, limits: Limits, device: torch.device) -> Beside:
    """A model that guesses for another on a GPU: it reads no more at once than it may to catch up."""
    config = outline.config
    length = min(limits.max_model_len or config.max_position_embeddings, config.max_position_embeddings)
    computed, kv_dtype = computed_types(device, limits.dtype, limits.kv_cache_dtype)
    own = replace(limits, max_num_batched_tokens=draft_tokens(limits.max_num_seqs))
    step = _card_step_bytes(config, own, length, computed.itemsize)
    return Beside(outline.device_bytes(computed), step, block_bytes(config, limits.block_size, kv_dtype))


def head_beside(layer: ModelConfig, weight_bytes: int, num_taps: int, limits: Limits, device: torch.device) -> Beside:
    """An EAGLE head on a GPU. layer: its own; num_taps: layers of the model that it reads, whose rows are kept."""
    computed, _ = computed_types(device, limits.dtype, "auto")
    own = replace(limits, max_num_batched_tokens=draft_tokens(limits.max_num_seqs))
    length = min(limits.max_model_len or layer.max_position_embeddings, layer.max_position_embeddings)
    step = _card_step_bytes(layer, own, length, computed.itemsize)
    kept = (2 * limits.max_num_batched_tokens + MAX_KEPT_ROWS) * num_taps * layer.hidden_size * computed.itemsize
    return Beside(weight_bytes, step + kept, block_bytes(layer, limits.block_size, computed))


def draft_tokens(max_num_seqs: int) -> int:
    """Of a draft model's largest step, however few the served model's has."""
    return MAX_CATCH_UP_TOKENS + max_num_seqs


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


def _logit_rows(limits: Limits, length: int) -> tuple[int, int]:
    """Of the largest step: those that are drawn from, and those that tell how likely a prompt's tokens are."""
    num_samples = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    first = min(limits.max_num_batched_tokens - num_samples + 1, length)
    return num_samples, min(first - 1, MAX_SCORES)


def head_step_bytes(layer: ModelConfig, limits: Limits, num_taps: int, num_kept_rows: int) -> int:
    """layer: a head's own; num_taps: layers of the model that it reads, of a step under way, of one before and of
    rows that are kept."""
    rows = 2 * limits.max_num_batched_tokens + num_kept_rows
    length = min(limits.max_model_len or layer.max_position_embeddings, layer.max_position_embeddings)
    return _step_bytes(layer, limits, length) + 4 * rows * num_taps * layer.hidden_size


def _step_bytes(config: ModelConfig, limits: Limits, length: int) -> int:
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    row = 4 * (3 * config.hidden_size + 2 * heads + 2 * config.intermediate_size)
    logits = 4 * sum(_logit_rows(limits, length)) * config.vocab_size
    return limits.max_num_batched_tokens * row + logits + 4 * length * config.turned


def _mixture(config: ModelConfig) -> int:
    """Numbers of a token, at most, where its experts are computed: into them and out of them."""
    if config.experts is None:
        return 0
    size, hidden = config.experts.intermediate_size, config.hidden_size
    return config.experts.num_used * max(size * (3 if config.gated else 2), size + hidden) + hidden


def _part_bytes(config: ModelConfig, limits: Limits, length: int) -> int:
    """Of the sums over parts of the keys, where attention keeps them for another kernel; it may do without."""
    num_parts, numbers = ceil(length / PART), limits.max_num_batched_tokens * config.num_heads
    dim = config.head_dim if config.latent is None else config.latent.rank
    if num_parts == 1 or 4 * numbers * num_parts * dim > MOST_PART_BYTES:
        return 0
    return 4 * numbers * num_parts * (dim + 2)


def _attention_bytes(config: ModelConfig, limits: Limits, length: int, width: int) -> int:
    """The most where a layer attends: with the parts' sums, or where heads' numbers become hidden ones."""
    hidden, num_heads, parts = config.hidden_size, config.num_heads, _part_bytes(config, limits, length)
    row = limits.max_num_batched_tokens * width
    if config.latent is not None:
        latent, up = config.latent, config.latent.nope_dim + config.latent.rope_dim
        queries = num_heads * up + latent.q_rank  # of a latent of their own, if there is one
        kept = 3 * hidden + queries + 2 * latent.row + num_heads * (latent.row + latent.rank)
        routing = 12 * limits.max_num_batched_tokens * num_heads
        return row * kept + routing + max(parts, row * (num_heads * latent.value_dim + hidden))
    turned = (num_heads + config.num_kv_heads) * config.head_dim
    made = turned + config.num_kv_heads * config.head_dim  # queries, keys and values
    normed = turned if config.qk_norm else 0
    kept = 3 * hidden + made + normed + num_heads * config.head_dim
    return max(row * (3 * hidden + made + 2 * normed), row * kept + max(parts, row * hidden))


def _card_step_bytes(config: ModelConfig, limits: Limits, length: int, width: int) -> int:
    """The most that `gpu_engine.largest_step` holds, in a layer or where it draws. width: bytes of an activation."""
    inner = max(config.intermediate_size * (3 if config.gated else 2), _mixture(config))
    fed = limits.max_num_batched_tokens * width * (4 * config.hidden_size + inner)
    layer = max(_attention_bytes(config, limits, length, width), fed)
    num_samples, num_scores = _logit_rows(limits, length)
    num_logits = (num_samples + num_scores) * config.vocab_size
    # Logits as the model gives them, kept for log-probabilities, and then either scaled to be drawn from, or, of a
    # prompt's tokens, some of them compared (a byte) and counted (4) for their ranks.
    ranking = 5 * min(num_logits, max(MAX_ELEMENTS, config.vocab_size)) if num_scores else 0
    drawing = 8 * num_logits + max(4 * num_logits, ranking)
    num_tables = 1 if config.local_rope is None else 2
    return max(layer, drawing) + num_tables * 4 * length * config.turned
