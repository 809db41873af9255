"""Decoding steps as CUDA graphs: one launch in the place of some hundred, where rows and keys fit into a bucket.

A step is filled up to its bucket's size, and what it reads is copied to where the graph reads it. Sequences have a
row each, or all as many as the one with the most drafts, of which some then are nobody's.
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

from kernels.attention import attention_batch
from services.gpu_worker.gpu_inputs import DeviceInputs, num_bytes, upload
from services.gpu_worker.model.gpu_decoder import Taps

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # sequences
SHORTEST, LENGTH_FACTOR = 1024, 4  # keys of the first bucket, and from one to the next
ROWS = (1, 2, 4, 6, 8, 12, 16)  # of each sequence: its token and drafts
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
    num_rows: int = 1  # of each sequence


def bucket_of(inputs: DeviceInputs, max_num_seqs: int, max_model_len: int) -> Bucket | None:
    """The smallest that the step fits in; None unless each row is sampled, and they are few enough."""
    num_rows, num_seqs = inputs.token_ids.shape[0], sum(batch.seq_lens.shape[0] for batch in inputs.batches)
    if inputs.sample_rows.shape[0] != num_rows or not 1 <= num_rows <= min(max_num_seqs, SIZES[-1]):
        return None
    most_rows = 1 if num_seqs == num_rows else max(int(b.row_starts.diff().max()) for b in inputs.batches)
    if most_rows > ROWS[-1] or any(batch.tree is not None for batch in inputs.batches):
        return None
    length = SHORTEST
    while length < max(batch.longest for batch in inputs.batches):
        length *= LENGTH_FACTOR
    rows_each, most_seqs = ROWS[bisect_left(ROWS, most_rows)], min(SIZES[bisect_left(SIZES, num_seqs)], max_num_seqs)
    if rows_each > 1 and (rows_each * most_seqs > min(max_num_seqs, SIZES[-1]) or rows_each > max_model_len):
        return None  # logits of rows that are nobody's take memory too
    return Bucket(most_seqs, min(length, max_model_len), rows_each)


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


def places_in(inputs: DeviceInputs, bucket: Bucket) -> torch.Tensor:
    """Of the step's rows, int64: where each sequence has as many."""
    counts = [n for batch in inputs.batches for n in batch.row_starts.diff().tolist()]
    rows = [seq * bucket.num_rows + n for seq, count in enumerate(counts) for n in range(count)]
    return torch.tensor(rows, dtype=torch.int64)


def spread(
    inputs: DeviceInputs, places: torch.Tensor, bucket: Bucket, block_size: int, group: int, fast: bool
) -> DeviceInputs:
    """As `fill_up`, with as many rows of each sequence. group, fast: see `attention_batch`. Rows that are nobody's have
    the position of the last one of their sequence."""
    num_seqs, each, batches = bucket.num_seqs, bucket.num_rows, inputs.batches
    seq_lens, lasts = torch.ones(num_seqs, dtype=torch.int32), torch.zeros(num_seqs, dtype=torch.int32)
    table = torch.zeros(num_seqs, -(-bucket.longest // block_size), dtype=torch.int32)
    first = 0
    for batch in batches:
        end = first + batch.seq_lens.shape[0]
        table[first:end, : batch.block_tables.shape[1]] = batch.block_tables
        seq_lens[first:end] = batch.seq_lens
        lasts[first:end] = batch.seq_lens - 1
        first = end

    def placed(tensor: torch.Tensor, others: torch.Tensor | int) -> torch.Tensor:
        out = torch.zeros(num_seqs * each, dtype=tensor.dtype) + others
        out[places] = tensor
        return out.to(tensor.dtype)

    positions = placed(inputs.positions, lasts.repeat_interleave(each))
    like = attention_batch([each] * num_seqs, [bucket.longest] * num_seqs, table, group, fast=fast)
    whole = dataclasses.replace(
        like, longest=bucket.longest, uneven=bucket.longest > SHORTEST, seq_lens=seq_lens, positions=positions,
        ends=placed(torch.cat([batch.ends for batch in batches]), 0),
    )  # fmt: skip
    return DeviceInputs(
        placed(inputs.token_ids, 0), positions.clone(), placed(inputs.slots, NOWHERE),
        torch.arange(num_seqs * each), (whole,),
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
    logits: torch.Tensor  # float32 [num_seqs, vocab_size], where all graphs write theirs
    taps: Taps | None  # which each replay fills anew


class DecodeGraphs:
    """group, fast: see `attention_batch`."""

    def __init__(
        self, forward: Forward, recorder: Recorder, device: torch.device, *, block_size: int, max_num_seqs: int,
        max_model_len: int, group: int = 1, fast: bool = False,
    ) -> None:  # fmt: skip
        self._forward = forward
        self.recorder = recorder
        self._device = device
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._group = group
        self._fast = fast
        self._graphs: dict[Bucket, _Graph] = {}
        self._met: Counter[Bucket] = Counter()
        self._due: tuple[Bucket, DeviceInputs] | None = None
        self._tap_layers: tuple[int, ...] = ()
        self._logits: torch.Tensor | None = None

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
        filled, places = self._filled(inputs, bucket)
        upload(filled.tensors(), self._device, graph.buffer)
        fill_in(graph.inputs.token_ids)
        graph.replay()
        read = None if taps is None or graph.taps is None else graph.taps.rows
        if places is not None:
            (places,) = upload([places], self._device)
            logits, read = graph.logits[places], None if read is None else read[places]
        else:
            num_rows = inputs.token_ids.shape[0]
            logits, read = graph.logits[:num_rows], None if read is None else read[:num_rows].clone()
        if taps is not None and read is not None:
            taps.rows = read
        return logits

    def _filled(self, inputs: DeviceInputs, bucket: Bucket) -> tuple[DeviceInputs, torch.Tensor | None]:
        """And `places_in` it, where its rows are not simply the first."""
        if bucket.num_rows == 1:
            return fill_up(inputs, bucket, self._block_size), None
        places = places_in(inputs, bucket)
        return spread(inputs, places, bucket, self._block_size, self._group, self._fast), places

    def record_due(self) -> None:
        """After a step has begun: a graph that has become due. What cannot be recorded is computed as before."""
        if self._due is None:
            return
        (bucket, like), self._due = self._due, None
        host = emptied(self._filled(like, bucket)[0])
        try:
            buffer = torch.empty(num_bytes(host.tensors()), dtype=torch.uint8, device=self._device)
            inputs = host.with_tensors(upload(host.tensors(), self._device, buffer))
            taps = Taps(self._tap_layers) if self._tap_layers else None
            replay, logits = self.recorder.record(lambda: self._kept(self._forward(inputs, taps=taps)))
        except (RuntimeError, MemoryError) as e:
            log.warning("no graph of %s: %s", bucket, e)
            return
        self._graphs[bucket] = _Graph(buffer, inputs, replay, logits, taps)
        log.debug("recorded a graph of %s", bucket)

    def _kept(self, logits: torch.Tensor) -> torch.Tensor:
        """In one place for all graphs: what each gives out stays its own, which of many buckets is more than is spare.
        It is made before the first graph is recorded, when what that will do is done once."""
        if self._logits is None:
            self._logits = logits.new_empty(min(self._max_num_seqs, SIZES[-1]), logits.shape[1])
        return self._logits[: len(logits)].copy_(logits)
