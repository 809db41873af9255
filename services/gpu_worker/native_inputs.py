"""A step as the flat lists that the native decoder is given. *Pure.*"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from kernels.philox import MASK
from services.gpu_worker.attention_plan import Geometry
from services.gpu_worker.batch import Chunk
from services.gpu_worker.sampler import GREEDY_BELOW, needs_only_logits
from services.gpu_worker.step_inputs import check_chunk, input_ids

Noise = tuple[float, int, int, int, int]  # temperature; seed, low and high half; position; choice


@dataclass(frozen=True, slots=True)
class NativeInputs:
    """N rows, the chunks' tokens one after the other."""

    token_ids: list[int]  # [N]; -1 - i: what sample i of the step before draws
    positions: list[int]  # [N]
    row_slots: list[int]  # [N]: block * block_size + place in it, where a row's K and V go
    spans: list[int]  # [chunks x 4]: first row, rows, first position, place of its blocks in block_ids
    block_ids: list[int]
    sample_rows: list[int]  # [S]
    noise: dict[int, Noise]  # of the sample rows that are not drawn by the largest logit
    sample_chunks: list[int]  # number of the chunk of each sample row
    host_samples: list[int]  # numbers of the sample rows whose token must be drawn from the logits, outside
    path_ends: list[int] = field(default_factory=list)  # [N + 1], or none: see `struct step` in kernels/native/native.h
    path_slots: list[int] = field(default_factory=list)
    masked: list[int] = field(default_factory=list)  # of those drawn by the step, once it is told what a grammar allows


class Masks:
    """Room for what some of a step's samples may be; until it is said, anything."""

    def __init__(self, masked: list[int], num_samples: int, vocab_size: int) -> None:
        self.numbers = array("i", [-1] * num_samples)
        self.bits = np.zeros((len(masked), 4 * -(-vocab_size // 32)), np.uint8)
        self._places = {sample: i for i, sample in enumerate(masked)}

    def allow(self, sample: int, mask: bytes) -> None:
        place = self._places[sample]
        given = np.frombuffer(mask, np.uint8)[: self.bits.shape[1]]
        self.bits[place, : len(given)] = given
        self.numbers[sample] = place

    def addresses(self) -> tuple[int, int]:
        return self.numbers.buffer_info()[0], self.bits.ctypes.data


def build_native_inputs(
    chunks: Seq[Chunk], geometry: Geometry, drawn_before: Mapping[int, int] | None = None
) -> NativeInputs:
    """SequenceError for a chunk that lies outside the vocabulary, the context, its tokens or its blocks.

    drawn_before: of a step in flight, id() of each sequence that it draws for, and the number of its sample row."""
    before = drawn_before or {}
    token_ids: list[int] = []
    positions: list[int] = []
    row_slots: list[int] = []
    spans: list[int] = []
    block_ids: list[int] = []
    sample_rows: list[int] = []
    noise: dict[int, Noise] = {}
    sample_chunks: list[int] = []
    host_samples: list[int] = []
    masked: list[int] = []
    size = geometry.block_size
    paths: dict[int, list[int]] = {}
    for number, chunk in enumerate(chunks):
        sample = before.get(id(chunk.seq))
        check_chunk(chunk, geometry, num_drawing=sample is not None, trees=True)
        start, end, blocks = chunk.start, chunk.start + chunk.num_rows, chunk.seq.block_ids
        first_row = len(token_ids)
        spans += (first_row, chunk.num_rows, start, len(block_ids))
        token_ids += input_ids(chunk)
        if len(token_ids) < first_row + chunk.num_rows:
            assert sample is not None
            token_ids.append(-1 - sample)
        positions += chunk.positions if chunk.draft else range(start, end)
        slots = [blocks[place // size] * size + place % size for place in range(start, end)]
        row_slots += slots
        if chunk.draft and not chunk.draft.is_chain:
            for place in range(len(chunk.draft)):
                paths[first_row + chunk.count + place] = [slots[chunk.count + p] for p in chunk.draft.path(place)]
        block_ids += blocks[: -(-end // size)]
        params = chunk.seq.params
        for row in chunk.logit_rows:
            position = positions[first_row + row] + 1 - chunk.seq.num_prompt_tokens
            if position < 0 or not needs_only_logits(params, position):
                host_samples.append(len(sample_rows))
            else:
                if params.constraint is not None:
                    masked.append(len(sample_rows))
                if params.temperature >= GREEDY_BELOW:
                    key = (params.seed & MASK, params.seed >> 32, position, chunk.seq.choice)
                    noise[len(sample_rows)] = (params.temperature, *key)
            sample_chunks.append(number)
            sample_rows.append(first_row + row)
    return NativeInputs(
        token_ids, positions, row_slots, spans, block_ids, sample_rows, noise, sample_chunks, host_samples,
        *_paths(paths, len(token_ids)), masked,
    )  # fmt: skip


def _paths(paths: Mapping[int, list[int]], num_rows: int) -> tuple[list[int], list[int]]:
    if not paths:
        return [], []
    path_ends, path_slots = [0], []
    for row in range(num_rows):
        path_slots += paths.get(row, [])
        path_ends.append(len(path_slots))
    return path_ends, path_slots
