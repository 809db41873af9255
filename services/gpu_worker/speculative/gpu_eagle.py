"""An EAGLE head on a GPU's ops: what `native_eagle` does, for all sequences of a step together.

What is drawn at a place is read at the next on the device: all places are put in the queue, and the host waits once,
for all tokens. What places read but for that is known before, so it comes by one transfer. Later places become graphs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from kernels.attention import attention_batch
from kernels.draw_tokens import DrawRows, draw_rows, draw_tokens
from kernels.gumbel import NoiseKey
from kernels.kv_cache import empty_kv_cache
from kernels.sample_tokens import TokenChoice
from services.gpu_worker.batch import Sequence
from services.gpu_worker.cuda_graphs import Recorder
from services.gpu_worker.engine import memory_errors
from services.gpu_worker.gpu_inputs import DeviceInputs, upload
from services.gpu_worker.model.config import ModelConfig
from services.gpu_worker.model.gpu_decoder import GpuDecoder, normed_sum
from services.gpu_worker.model.gpu_feed_forward import gpu_feed_forward
from services.gpu_worker.model.layers import DecoderWeights, FeedForwardWeights, LayerWeights, Norm, Product
from services.gpu_worker.sampler import GREEDY_BELOW
from services.gpu_worker.speculative.head_config import EagleConfig, drafting_layer, read_eagle
from services.gpu_worker.speculative.native_eagle import Guess, Wanted
from services.gpu_worker.speculative.place_graphs import PlaceGraphs
from services.gpu_worker.weights.device_heads import DeviceHeads
from services.gpu_worker.weights.head_files import HeadFiles, draft_token_ids


@dataclass(frozen=True, slots=True)
class GpuEagleWeights:
    """fc, embed_norm and row_norm: what makes what the layer reads of embedding and row. token_ids: int64, what the
    output head's rows stand for; None if those are the target's."""

    fc: Product
    embed_norm: Norm | None
    row_norm: Norm | None
    decoder: DecoderWeights
    token_ids: torch.Tensor | None


def load_gpu_eagle(
    folder: Path, kind: Literal["eagle", "eagle3"], target: ModelConfig, shared: DecoderWeights, device: torch.device,
    dtype: torch.dtype,
) -> tuple[EagleConfig, GpuEagleWeights]:  # fmt: skip
    """As `native_eagle.load_eagle`."""
    files = HeadFiles(folder)
    config = read_eagle(files.values, kind, target)
    with torch.inference_mode(), memory_errors():
        weights = (_fused if config.is_fused else _plain)(files, config, shared, DeviceHeads(files, device, dtype))
    files.finish()
    return config, weights


def _fused(files: HeadFiles, config: EagleConfig, shared: DecoderWeights, made: DeviceHeads) -> GpuEagleWeights:
    layer, size, eps, at = config.layer, config.layer.hidden_size, config.layer.norm_eps, "midlayer."
    files.rename("layers.0.", at)
    ids = draft_token_ids(files, config.draft_vocab_size, layer.vocab_size)
    norm = made.norm("norm", size, eps)
    table = made.table("embed_tokens", layer.vocab_size, size) if files.has("embed_tokens.weight") else shared.embedding
    head = made.output("lm_head", config.draft_vocab_size, size)
    return GpuEagleWeights(
        made.linear([("fc", size)], len(config.tap_layers) * size), made.norm(f"{at}input_layernorm", size, eps),
        made.norm(f"{at}hidden_norm", size, eps),
        DecoderWeights(table, (_layer(config, at, 2 * size, made),), norm, head),
        None if ids is None else ids.long().to(norm.weight.device),
    )  # fmt: skip


def _plain(files: HeadFiles, config: EagleConfig, shared: DecoderWeights, made: DeviceHeads) -> GpuEagleWeights:
    layer, size = config.layer, config.layer.hidden_size
    head = made.output("lm_head", layer.vocab_size, size) if files.has("lm_head.weight") else shared.head
    table = made.table("embed_tokens", layer.vocab_size, size) if files.has("embed_tokens.weight") else shared.embedding
    fc = made.linear([("fc", size)], 2 * size, config.fc_bias or files.has("fc.bias"))
    decoder = DecoderWeights(table, (_layer(config, "layers.0.", size, made),), shared.final_norm, head)
    return GpuEagleWeights(fc, None, None, decoder, None)


def _layer(config: EagleConfig, at: str, into: int, made: DeviceHeads) -> LayerWeights:
    layer = config.layer
    size, inner = layer.hidden_size, layer.intermediate_size
    heads, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    attn = f"{at}self_attn."
    return LayerWeights(
        attn_norm=None,
        qkv=made.linear([(f"{attn}q_proj", heads), (f"{attn}k_proj", kv), (f"{attn}v_proj", kv)], into, layer.qkv_bias),
        q_norm=None, k_norm=None, out=made.linear([(f"{attn}o_proj", size)], heads, layer.out_bias),
        attn_post_norm=None, ffn_norm=made.norm(f"{at}post_attention_layernorm", size, layer.norm_eps),
        ffn=FeedForwardWeights(
            made.linear([(f"{at}mlp.gate_proj", inner), (f"{at}mlp.up_proj", inner)], size, layer.mlp_bias),
            made.linear([(f"{at}mlp.down_proj", size)], inner, layer.mlp_bias),
        ),
        ffn_post_norm=None,
    )  # fmt: skip


def choice_of(seq: Sequence, place: int) -> TokenChoice:
    """How the target draws the token so many places behind those that it has; without the request's filters."""
    params = seq.params
    key = NoiseKey(params.seed, seq.choice, seq.num_output_tokens + place)
    return TokenChoice(key, 0.0 if params.temperature < GREEDY_BELOW else params.temperature)


def draw_drafted(
    logits: torch.Tensor, rows: DrawRows, token_ids: torch.Tensor | None, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [n, draft vocabulary] -> tokens of the target, NOT_FINITE for none, and their log-probabilities."""
    wide = logits
    if token_ids is not None:
        wide = logits.new_full((len(logits), vocab_size), -torch.inf)
        wide[:, token_ids] = logits
    ids = draw_tokens(wide, rows)
    return ids, wide.gather(1, ids.clamp(min=0)[:, None])[:, 0] - logits.logsumexp(-1)


def guesses_of(
    drawn: Seq[tuple[torch.Tensor, torch.Tensor]], members: Seq[Seq[int]], num_wanted: int
) -> list[list[Guess]]:
    """Waits for the device. drawn: at each place, as `draw_drafted`, by its members; a chain ends before what is no
    token."""
    ids, logprobs = (torch.cat(values).tolist() for values in zip(*drawn, strict=True))
    found: list[list[Guess]] = [[] for _ in range(num_wanted)]
    known = iter(zip(ids, logprobs, strict=True))
    for place, own in enumerate(members):
        for member in own:
            token_id, logprob = next(known)
            if token_id >= 0 and len(found[member]) == place:
                found[member].append(Guess(token_id, logprob))
    return found


@dataclass(frozen=True, slots=True)
class _Place:
    """members: of those wanted, who has a guess here; from_before: int64, which of the place before they are, or, at
    the first, nothing."""

    members: list[int]
    inputs: DeviceInputs
    draws: DrawRows
    from_before: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        return [*self.inputs.tensors(), *self.draws.tensors(), self.from_before]

    def with_tensors(self, tensors: list[torch.Tensor]) -> _Place:
        return _Place(self.members, self.inputs.with_tensors(tensors), self.draws.with_tensors(tensors[-6:-1]),
                      tensors[-1])  # fmt: skip


class GpuEagle:
    """Computes while the target does not. dtype: what is computed in, and kept in its cache."""

    def __init__(
        self, config: EagleConfig, weights: GpuEagleWeights, *, num_blocks: int, block_size: int, max_model_len: int,
        device: torch.device, dtype: torch.dtype, recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        """recorder: of graphs of later places."""
        self.config = config
        self.later_s = self.aside_s = 0.0
        self._weights = weights
        self._block_size = block_size
        self.device = device
        self.dtype = dtype
        self._layer = drafting_layer(config)
        with torch.inference_mode(), memory_errors():
            self._decoder = GpuDecoder(self._layer, weights.decoder, max_model_len)
            self.cache = empty_kv_cache(
                num_blocks, self._layer.num_kv_heads, block_size, self._layer.head_dim, dtype, device
            )
        self._graphs = None
        if recorder is not None:
            self._graphs = PlaceGraphs(
                self._place, recorder, device, block_size=block_size, max_model_len=max_model_len
            )

    def guess(self, wanted: Seq[Wanted]) -> list[list[Guess]]:
        """As `native_eagle.NativeEagle.guess`. Places are thought to take equally long."""
        started = time.monotonic()
        with torch.inference_mode(), memory_errors():
            host = self._places(wanted)
            places = self._uploaded(host)
            drawn = self._chains(wanted, places, host)
            found = guesses_of(drawn, [place.members for place in places], len(wanted))
            ended = time.monotonic()
            if self._graphs is not None:
                self._graphs.record_due()
        self.later_s = (ended - started) * (len(places) - 1) / len(places)
        self.aside_s = time.monotonic() - ended
        return found

    def _chains(
        self, wanted: Seq[Wanted], places: Seq[_Place], host: Seq[_Place]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """host: the places before they were brought to the device."""
        weights, drawn = self._weights, []
        ids = places[0].inputs.token_ids
        taps = torch.cat([own.taps for own in wanted]).flatten(1)
        rows = weights.fc(taps) if self.config.is_fused else taps
        for number, place in enumerate(places):
            found = None
            if number:
                ids, rows = ids.clamp(min=0)[place.from_before], rows[place.from_before]
                found = None if self._graphs is None else self._graphs.run(ids, rows, host[number].inputs)
            if not place.members:  # all only catch up
                self._left(ids, rows, place.inputs)
                return [(ids[:0], torch.empty(0, device=self.device))]
            rows, logits = found or self._place(ids, rows, place.inputs)
            ids, logprobs = draw_drafted(logits, place.draws, weights.token_ids, self.config.layer.vocab_size)
            drawn.append((ids, logprobs))
        return drawn

    def _place(self, ids: torch.Tensor, rows: torch.Tensor, inputs: DeviceInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layer leaves of the sample rows, and logits of the draft vocabulary."""
        decoder, left = self._weights.decoder, self._left(ids, rows, inputs)
        return left, decoder.head(normed_sum(left, None, decoder.final_norm) if self.config.is_fused else left)

    def _left(self, ids: torch.Tensor, rows: torch.Tensor, inputs: DeviceInputs) -> torch.Tensor:
        """What the layer leaves of the sample rows. Before, the KV of all is stored."""
        weights, config = self._weights, self._layer
        (layer,), embeds = weights.decoder.layers, weights.decoder.embedding(ids)
        if weights.embed_norm is None:
            residual = into = weights.fc(torch.cat((embeds, rows), 1))
        else:
            normed = normed_sum(rows, None, weights.row_norm)
            into = torch.cat((normed_sum(embeds, None, weights.embed_norm), normed), 1)
            residual = normed if self.config.norms_first else rows
        added = self._decoder.attention(into, layer, config.layers[0], self.cache, inputs)
        residual, added = (x.index_select(0, inputs.sample_rows) for x in (residual, added))
        if not len(residual):
            return residual
        y = normed_sum(residual, added, layer.ffn_norm)
        return residual + gpu_feed_forward(y, layer.ffn, config)

    # --- what places read --------------------------------------------------------------------------------------------

    def _uploaded(self, places: Seq[_Place]) -> list[_Place]:
        each = [place.tensors() for place in places]
        there = iter(upload([tensor for tensors in each for tensor in tensors], self.device))
        return [place.with_tensors([next(there) for _ in tensors]) for place, tensors in zip(places, each, strict=True)]

    def _places(self, wanted: Seq[Wanted]) -> list[_Place]:
        """On the host. Each reads one row a sequence but for the first, where all are caught up with."""
        places: list[_Place] = []
        before = {i: i for i in range(len(wanted))}
        for number in range(max(1, *(own.count for own in wanted))):
            members = [i for i, own in enumerate(wanted) if own.count > number]
            read = range(len(wanted)) if not number else members
            sampled = [n for n, i in enumerate(read) if wanted[i].count > number]
            inputs = self._inputs([wanted[i] for i in read], number, sampled)
            draws = draw_rows([choice_of(wanted[i].seq, number) for i in members])
            places.append(_Place(members, inputs, draws, torch.tensor([before[i] for i in members])))
            before = {i: n for n, i in enumerate(members)}
        return places

    def _inputs(self, wanted: Seq[Wanted], place: int, sampled: list[int]) -> DeviceInputs:
        """Positions count from the base on: only their differences are seen. Of later places tokens are not known."""
        size, row = self._block_size, 0
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        nums, lengths, tables, lasts = [], [], [], []
        for own in wanted:
            end, ids = own.first + len(own.taps), own.seq.block_ids
            first, last = (end + place - 1, end + place) if place else (own.first, end)
            token_ids += [0] if place else own.seq.token_ids[first + 1 : last + 1]
            positions += range(first - own.base, last - own.base)
            slots += [ids[slot // size] * size + slot % size for slot in range(first, last)]
            nums.append(last - first)
            lengths.append(last - own.base)
            tables.append(ids[own.base // size : -(-last // size)])
            row += last - first
            lasts.append(row - 1)
        group = self._layer.num_heads // self._layer.num_kv_heads
        return DeviceInputs(
            torch.tensor(token_ids), torch.tensor(positions, dtype=torch.int32), torch.tensor(slots),
            torch.tensor([lasts[n] for n in sampled], dtype=torch.int64),
            (attention_batch(nums, lengths, tables, group),),
        )  # fmt: skip
