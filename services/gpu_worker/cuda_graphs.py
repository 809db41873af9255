"""Decoding steps as CUDA graphs: one launch in the place of some hundred, where rows and keys fit into a bucket.

A step of one row a sequence is filled up to its bucket's size, and what it reads is copied to where the graph reads it.
A bucket's steps are computed one kernel after the other until it has been met often enough; then its graph is recorded
between two steps, so that nobody waits at the start for graphs that nobody needs. Rows have the same bits either way.
"""

from __future__ import annotations

import dataclasses
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from services.gpu_worker.gpu_inputs import DeviceInputs, num_bytes, upload
from services.gpu_worker.model.gpu_decoder import Taps

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # sequences
SHORTEST, LENGTH_FACTOR = 1024, 4  # keys of the first bucket, and from one to the next
RECORDED_AFTER = 3  # steps of a bucket
NOWHERE = -1  # slot of a row that is not there


class Forward(Protocol):
    def __call__(self, inputs: DeviceInputs, /, *, taps: Taps | None) -> torch.Tensor: ...


class Recorder(Protocol):
    """Takes down what a function puts in the device's queue, to be put there again as a whole."""

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """(replay, what the function returns: each replay writes it anew). May wait for the device."""
        ...


class CudaRecorder:
    """Graphs share their memory: they run one after the other, and what one returns is read before the next."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        run()  # compiles what has not been: that must not happen while it is recorded
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # others may allocate
            out = run()
        return graph.replay, out


@dataclass(frozen=True, slots=True)
class Bucket:
    num_seqs: int
    longest: int  # keys of a sequence


def bucket_of(inputs: DeviceInputs, max_num_seqs: int, max_model_len: int) -> Bucket | None:
    """The smallest that the step fits in; None unless it has one row a sequence, each sampled, and few enough."""
    num_rows = inputs.token_ids.shape[0]
    if len(inputs.batches) != 1 or inputs.batches[0].seq_lens.shape[0] != num_rows or num_rows > SIZES[-1]:
        return None
    if inputs.sample_rows.shape[0] != num_rows or num_rows > max_num_seqs:
        return None
    length = SHORTEST
    while length < inputs.batches[0].longest:
        length *= LENGTH_FACTOR
    return Bucket(min(SIZES[bisect_left(SIZES, num_rows)], max_num_seqs), min(length, max_model_len))


def fill_up(inputs: DeviceInputs, bucket: Bucket, block_size: int) -> DeviceInputs:
    """With rows that read no key and store nowhere, and room in the block tables, on the host. Any of the sequences may
    be far longer than the others."""
    missing = bucket.num_seqs - inputs.token_ids.shape[0]
    (batch,) = inputs.batches
    width = -(-bucket.longest // block_size)

    def filled(tensor: torch.Tensor, value: int) -> torch.Tensor:
        return F.pad(tensor, (0, missing), value=value)

    seqs = torch.arange(bucket.num_seqs + 1, dtype=torch.int32)
    whole = dataclasses.replace(
        batch, num_rows=bucket.num_seqs, longest=bucket.longest, uneven=bucket.longest > SHORTEST,
        block_tables=F.pad(batch.block_tables, (0, width - batch.block_tables.shape[1], 0, missing)),
        seq_lens=filled(batch.seq_lens, 1), row_starts=seqs, tile_seqs=seqs[:-1].clone(),
        tile_tokens=torch.zeros_like(seqs[:-1]), positions=filled(batch.positions, 0), ends=filled(batch.ends, 0),
    )  # fmt: skip
    return DeviceInputs(
        filled(inputs.token_ids, 0), filled(inputs.positions, 0), filled(inputs.slots, NOWHERE),
        torch.arange(bucket.num_seqs), (whole,),
    )  # fmt: skip


def emptied(inputs: DeviceInputs) -> DeviceInputs:
    """Of the same shape, without a row: what a graph may be recorded with while others' keys lie in the cache."""
    (batch,) = inputs.batches
    none = dataclasses.replace(
        batch, block_tables=torch.zeros_like(batch.block_tables), seq_lens=torch.ones_like(batch.seq_lens),
        positions=torch.zeros_like(batch.positions), ends=torch.zeros_like(batch.ends),
    )  # fmt: skip
    return DeviceInputs(
        torch.zeros_like(inputs.token_ids), torch.zeros_like(inputs.positions),
        torch.full_like(inputs.slots, NOWHERE), inputs.sample_rows, (none,),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Graph:
    buffer: torch.Tensor  # uint8: what it reads
    inputs: DeviceInputs  # views of that
    replay: Callable[[], None]
    logits: torch.Tensor  # float32 [num_seqs, vocab_size]
    taps: Taps | None  # which each replay fills anew


class DecodeGraphs:
    def __init__(
        self, forward: Forward, recorder: Recorder, device: torch.device, *, block_size: int, max_num_seqs: int,
        max_model_len: int,
    ) -> None:  # fmt: skip
        self._forward = forward
        self._recorder = recorder
        self._device = device
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._graphs: dict[Bucket, _Graph] = {}
        self._met: Counter[Bucket] = Counter()
        self._due: tuple[Bucket, DeviceInputs] | None = None
        self._tap_layers: tuple[int, ...] = ()

    def tap(self, layers: tuple[int, ...]) -> None:
        """From now on graphs keep what these read, whether a step wants it or not."""
        self._tap_layers, self._due = layers, None
        self._graphs.clear()
        self._met.clear()

    def run(
        self, inputs: DeviceInputs, fill_in: Callable[[torch.Tensor], None], taps: Taps | None = None
    ) -> torch.Tensor | None:
        """The step's logits, until the next one runs; None if there is no graph for it. inputs: on the host; fill_in is
        given the token ids once they are on the device. taps: to be filled, of the layers that graphs keep."""
        bucket = bucket_of(inputs, self._max_num_seqs, self._max_model_len)
        if bucket is None:
            return None
        graph = self._graphs.get(bucket)
        if graph is None:
            self._met[bucket] += 1
            if self._met[bucket] == RECORDED_AFTER:
                self._due = bucket, inputs
            return None
        upload(fill_up(inputs, bucket, self._block_size).tensors(), self._device, graph.buffer)
        fill_in(graph.inputs.token_ids)
        graph.replay()
        num_rows = inputs.token_ids.shape[0]
        if taps is not None and graph.taps is not None:
            taps.rows = graph.taps.rows[:num_rows].clone()
        return graph.logits[:num_rows]

    def record_due(self) -> None:
        """After a step has begun: a graph that has become due. What cannot be recorded is computed as before."""
        if self._due is None:
            return
        (bucket, like), self._due = self._due, None
        host = emptied(fill_up(like, bucket, self._block_size))
        try:
            buffer = torch.empty(num_bytes(host.tensors()), dtype=torch.uint8, device=self._device)
            inputs = host.with_tensors(upload(host.tensors(), self._device, buffer))
            taps = Taps(self._tap_layers) if self._tap_layers else None
            replay, logits = self._recorder.record(lambda: self._forward(inputs, taps=taps))
        except (RuntimeError, MemoryError) as e:
            log.warning("no graph of %d sequences of %d tokens: %s", bucket.num_seqs, bucket.longest, e)
            return
        self._graphs[bucket] = _Graph(buffer, inputs, replay, logits, taps)
        log.debug("recorded a graph of %d sequences of %d tokens", bucket.num_seqs, bucket.longest)
