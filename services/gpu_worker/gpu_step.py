"""A step of the GPU engine that has begun: what it draws is known once the device has come to it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from services.gpu_worker.batch import Chunk, Drawn
from services.gpu_worker.device_sampler import PendingTokens
from services.gpu_worker.engine import TellTaps, memory_errors, tell_taps
from services.gpu_worker.gpu_inputs import order_of
from services.gpu_worker.model.gpu_decoder import Taps
from services.gpu_worker.speculative.verify import drawn_by_chunk


class GpuStep:
    """tell: is told of what layers have read (`GpuEngine.tap`), where that was kept."""

    def __init__(
        self, chunks: Seq[Chunk], sample_chunks: Seq[int], tokens: PendingTokens, may_be_followed: bool,
        taps: Taps | None = None, tell: TellTaps | None = None,
    ) -> None:  # fmt: skip
        self.may_be_followed = may_be_followed
        self.samples = {id(chunks[i].seq): n for n, i in enumerate(sample_chunks) if chunks[i].sample}
        self.tokens = tokens
        self._chunks = chunks  # also keeps the sequences, and so their ids
        self._sample_chunks = sample_chunks
        self._taps = taps
        self._tell = tell

    @property
    def has_ended(self) -> bool:
        return self.tokens.are_known

    def wait_until_late(self) -> None:
        """The next may begin at once: it is only put in the queue."""

    def results(self) -> list[Drawn]:
        with memory_errors():
            tokens = self.tokens.wait()
        drawn = drawn_by_chunk(self._chunks, self._sample_chunks, tokens)
        if self._taps is not None and self._tell is not None:
            tell_taps(self._tell, [self._chunks[i] for i in order_of(self._chunks)], self._taps.rows)
        return drawn
