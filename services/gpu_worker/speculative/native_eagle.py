"""An EAGLE head on native ops: guesses for several sequences at once, from what the target's layers read.

Its layer is a decoder of one layer with a KV cache of its own, under the target's block ids. Slot p has the row of
token p + 1 with what the target computed for token p, as in the published implementations; a guess goes on from the
last such row with the head's own. What it draws it draws with the request's noise, so that it agrees with the target
as often as it can.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.packed_weight import PackedWeight
from kernels.philox import MASK
from services.gpu_worker.batch import Sequence
from services.gpu_worker.model.config import ModelConfig
from services.gpu_worker.model.native_decoder import NativeDecoder, native_head
from services.gpu_worker.native_inputs import NativeInputs, Noise
from services.gpu_worker.sampler import GREEDY_BELOW
from services.gpu_worker.speculative.head_config import EagleConfig, drafting_layer, read_eagle
from services.gpu_worker.weights.head_files import HeadFiles, draft_token_ids
from services.gpu_worker.weights.native_loader import NativeLayer, NativeLinear, NativeWeights


@dataclass(frozen=True, slots=True)
class Wanted:
    """taps [rows, taps, hidden_size]: of the tokens from `first` on, up to the last but one if something is to be
    guessed. count: of guesses, which must have slots but for the last; 0 where the head only catches up.
    base: of its slots, the first that the head has computed, at the beginning of a block."""

    seq: Sequence
    first: int
    taps: torch.Tensor
    count: int
    base: int = 0


@dataclass(frozen=True, slots=True)
class Guess:
    """logprob: what the head gave it."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """fc: what makes rows of taps, or of embedding and taps; first_norm: of rows, where the stream begins behind it."""

    fc: NativeLinear
    first_norm: torch.Tensor | None
    decoder: NativeWeights


def load_eagle(folder: Path, kind: str, target: ModelConfig, shared: NativeWeights) -> tuple[EagleConfig, EagleWeights]:
    """shared: of the target, whose embedding and output head a head may use. ConfigError, WeightsError."""
    files = HeadFiles(folder)
    config = read_eagle(files.values, "eagle3" if kind == "eagle3" else "eagle", target)
    weights = _fused(files, config, shared) if config.is_fused else _plain(files, config, shared)
    files.finish()
    return config, weights


def _fused(files: HeadFiles, config: EagleConfig, shared: NativeWeights) -> EagleWeights:
    layer, size = config.layer, config.layer.hidden_size
    files.rename("layers.0.", "midlayer.")
    norm = files.vector("midlayer.hidden_norm.weight", size)
    first, later = (norm, None) if config.norms_first else (None, norm)
    at = "midlayer."
    native = _layer(files, config, at, 2 * size, later, files.vector(f"{at}post_attention_layernorm.weight", size))
    decoder = NativeWeights(
        _embedding(files, config, shared), (native,), files.vector("norm.weight", size),
        NativeLinear((files.matrix("lm_head.weight", config.draft_vocab_size, size),)),
        files.vector(f"{at}input_layernorm.weight", size),
        draft_token_ids(files, config.draft_vocab_size, layer.vocab_size),
    )  # fmt: skip
    fc = files.matrix("fc.weight", size, len(config.tap_layers) * size)
    return EagleWeights(NativeLinear((fc,)), first, decoder)


def _plain(files: HeadFiles, config: EagleConfig, shared: NativeWeights) -> EagleWeights:
    size, at = config.layer.hidden_size, "layers.0."
    native = _layer(files, config, at, size, None, files.vector(f"{at}post_attention_layernorm.weight", size))
    head = shared.head
    if files.has("lm_head.weight"):
        head = NativeLinear((files.matrix("lm_head.weight", config.layer.vocab_size, size),))
    bias = files.vector("fc.bias", size)[:size] if config.fc_bias or files.has("fc.bias") else None
    decoder = NativeWeights(_embedding(files, config, shared), (native,), None, head)
    return EagleWeights(NativeLinear((files.matrix("fc.weight", size, 2 * size),), bias), None, decoder)


def _embedding(files: HeadFiles, config: EagleConfig, shared: NativeWeights) -> PackedWeight:
    if not files.has("embed_tokens.weight"):
        return shared.embedding
    return files.dense("embed_tokens.weight", config.layer.vocab_size, config.layer.hidden_size)


def _layer(
    files: HeadFiles, config: EagleConfig, at: str, into: int, attn_norm: torch.Tensor | None, ffn_norm: torch.Tensor
) -> NativeLayer:
    layer = config.layer
    size, inner = layer.hidden_size, layer.intermediate_size
    heads, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim

    def linear(name: str, rows: int, columns: int, bias: bool) -> NativeLinear:
        weight = files.matrix(f"{at}{name}.weight", rows, columns)
        return NativeLinear((weight,), files.vector(f"{at}{name}.bias", rows)[:rows] if bias else None)

    q, k, v = (linear(f"self_attn.{n}_proj", rows, into, layer.qkv_bias) for n, rows in
               (("q", heads), ("k", kv), ("v", kv)))  # fmt: skip
    biases = [part.bias for part in (q, k, v) if part.bias is not None]
    return NativeLayer(
        attn_norm=attn_norm, ffn_norm=ffn_norm, q_norm=None, k_norm=None,
        qkv=NativeLinear((*q.parts, *k.parts, *v.parts), torch.cat(biases) if biases else None),
        out=linear("self_attn.o_proj", size, heads, layer.out_bias),
        gate=linear("mlp.gate_proj", inner, size, layer.mlp_bias),
        up=linear("mlp.up_proj", inner, size, layer.mlp_bias),
        down=linear("mlp.down_proj", size, inner, layer.mlp_bias),
    )  # fmt: skip


def noise_of(seq: Sequence, place: int = 0) -> Noise | None:
    """With which the target draws the token so many places behind those that it has; None: without."""
    params = seq.params
    if params.temperature < GREEDY_BELOW:
        return None
    return (params.temperature, params.seed & MASK, params.seed >> 32, seq.num_output_tokens + place, seq.choice)


class NativeEagle:
    """Computes while the target does not: both use one pool of threads."""

    def __init__(
        self, config: EagleConfig, weights: EagleWeights, target: NativeDecoder, *, num_blocks: int,
        block_size: int, max_model_len: int,
    ) -> None:  # fmt: skip
        self.config = config
        self.later_s = self.aside_s = 0.0
        self._weights = weights  # which the native code points to
        self._block_size = block_size
        library, pool = target.native
        self._decoder = NativeDecoder(
            drafting_layer(config), weights.decoder, library, pool=pool, num_blocks=num_blocks, block_size=block_size,
            max_model_len=max_model_len,
        )  # fmt: skip
        self._head = native_head(weights.fc, weights.first_norm, not config.is_fused)

    def guess(self, wanted: Seq[Wanted]) -> list[list[Guess]]:
        """Tokens that may follow each; fewer than asked for where the head has come to no number."""
        taps, counts = [own.taps for own in wanted], [own.count for own in wanted]
        found, self.later_s = self._decoder.guess(self._inputs(wanted), self._head, taps, counts)
        return [[Guess(*each) for each in own] for own in found]

    def _inputs(self, wanted: Seq[Wanted]) -> NativeInputs:
        """Of the first place. Positions count from the base on: only their differences are seen."""
        size, row = self._block_size, 0
        tokens: list[int] = []
        positions: list[int] = []
        row_slots: list[int] = []
        spans: list[int] = []
        block_ids: list[int] = []
        samples: list[int] = []
        noise: dict[int, Noise] = {}
        for number, own in enumerate(wanted):
            seq, first, count = own.seq, own.first, len(own.taps)
            end = first + count
            tokens += seq.token_ids[first + 1 : end + 1]
            spans += (row, count, first - own.base, len(block_ids))
            positions += range(first - own.base, end - own.base)
            row_slots += [seq.block_ids[slot // size] * size + slot % size for slot in range(first, end)]
            block_ids += seq.block_ids[own.base // size : -(-(end + max(0, own.count - 1)) // size)]
            row += count
            samples.append(row - 1)
            if (own_noise := noise_of(seq)) is not None:
                noise[number] = own_noise
        return NativeInputs(tokens, positions, row_slots, spans, block_ids, samples, noise, [], [])
