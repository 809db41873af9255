"""Later guesses of a head on a GPU as CUDA graphs: layer and output head for a row of each sequence, launched at once.

As `cuda_graphs.DecodeGraphs`, of whose buckets they are; what is drawn from the logits is launched by itself.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.gpu_worker.cuda_graphs import RECORDED_AFTER, SIZES, Bucket, Recorder, bucket_of, emptied, fill_up
from services.gpu_worker.gpu_inputs import DeviceInputs, num_bytes, upload

log = logging.getLogger(__name__)

# Token ids and rows of the place before, and what the place reads else -> what the layer leaves, and logits.
Compute = Callable[[torch.Tensor, torch.Tensor, DeviceInputs], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Graph:
    buffer: torch.Tensor  # uint8: what it reads, but for
    ids: torch.Tensor
    rows: torch.Tensor
    replay: Callable[[], None]
    left: torch.Tensor  # what it writes
    logits: torch.Tensor


class PlaceGraphs:
    def __init__(
        self, compute: Compute, recorder: Recorder, device: torch.device, *, block_size: int, max_model_len: int,
    ) -> None:  # fmt: skip
        self._compute = compute
        self._recorder = recorder
        self._device = device
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._graphs: dict[Bucket, _Graph] = {}
        self._met: Counter[Bucket] = Counter()
        self._due: list[tuple[Bucket, DeviceInputs, torch.Tensor]] = []

    def run(
        self, ids: torch.Tensor, rows: torch.Tensor, inputs: DeviceInputs
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As `compute`, until the next one runs; None if there is no graph. inputs: on the host."""
        bucket = bucket_of(inputs, SIZES[-1], self._max_model_len)
        if bucket is None:
            return None
        graph, num = self._graphs.get(bucket), len(ids)
        if graph is None:
            self._met[bucket] += 1
            if self._met[bucket] == RECORDED_AFTER:
                self._due.append((bucket, inputs, rows))
            return None
        upload(fill_up(inputs, bucket, self._block_size).tensors(), self._device, graph.buffer)
        graph.ids[:num].copy_(ids)
        graph.rows[:num].copy_(rows)
        graph.replay()
        return graph.left[:num], graph.logits[:num]

    def record_due(self) -> None:
        """Graphs that have become due, while a step waits. What cannot be recorded is computed as before."""
        while self._due:
            self._record(*self._due.pop())

    def _record(self, bucket: Bucket, like: DeviceInputs, like_rows: torch.Tensor) -> None:
        host = emptied(fill_up(like, bucket, self._block_size))
        try:
            buffer = torch.empty(num_bytes(host.tensors()), dtype=torch.uint8, device=self._device)
            inputs = host.with_tensors(upload(host.tensors(), self._device, buffer))
            ids = torch.zeros(bucket.num_seqs, dtype=torch.int64, device=self._device)
            rows = like_rows.new_zeros(bucket.num_seqs, like_rows.shape[1])
            left = torch.empty_like(rows)

            def run() -> torch.Tensor:
                own, logits = self._compute(ids, rows, inputs)
                left.copy_(own)
                return logits

            replay, logits = self._recorder.record(run)
        except (RuntimeError, MemoryError) as e:
            log.warning("no graph of guesses of %s: %s", bucket, e)
            return
        self._graphs[bucket] = _Graph(buffer, ids, rows, replay, left, logits)
