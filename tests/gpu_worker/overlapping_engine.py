"""The scripted engine as one that goes from a step to the next by itself.

A step computes as late as it may: when its results are taken, from what its sequences were when it began. So whatever
changes meanwhile, and is not meant to, shows.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq
from dataclasses import replace

from services.gpu_worker.batch import Chunk, Drawn, Sequence
from services.gpu_worker.scripted_engine import ScriptedEngine


class OverlappingStep:
    def __init__(
        self, engine: OverlappingScripted, number: int, chunks: Seq[Chunk], before: OverlappingStep | None
    ) -> None:
        self.may_be_followed = all(c.seq.params.logprobs is None and not c.draft for c in chunks)
        self._engine = engine
        self._number = number
        self._chunks = chunks
        self._copies = [replace(c, seq=_copy(c)) for c in chunks]
        self._before = before
        self._drawn: dict[int, int] = {}
        self.has_ended = False

    def wait_until_late(self) -> None:
        self._engine.events.append(f"late {self._number}")

    def results(self) -> list[Drawn]:
        self._engine.events.append(f"end {self._number}")
        for chunk, copy in zip(self._chunks, self._copies, strict=True):
            if chunk.start + chunk.count > len(copy.seq.token_ids):
                assert self._before is not None
                copy.seq.token_ids.append(self._before._drawn[id(chunk.seq)])
        self.has_ended = True
        results = self._engine.scripted.step(self._copies)
        self._drawn = {id(c.seq): t[-1].token_id for c, t in zip(self._chunks, results, strict=True) if t}
        self._before = None
        return results


def _copy(chunk: Chunk) -> Sequence:
    seq = chunk.seq
    return replace(seq, token_ids=list(seq.token_ids), block_ids=list(seq.block_ids))


class OverlappingScripted:
    def __init__(self, scripted: ScriptedEngine) -> None:
        self.info = scripted.info
        self.scripted = scripted
        self.events: list[str] = []
        self.rows: list[list[str]] = []  # whose, of each step
        self.late: Container[int] = ()  # steps that begin when the one before has ended
        self._last: OverlappingStep | None = None

    def begin(self, chunks: Seq[Chunk]) -> OverlappingStep:
        self.rows.append([c.seq.sid for c in chunks])
        self.events.append(f"begin {len(self.rows)}")
        if self._last is not None and len(self.rows) in self.late:
            self._last.has_ended = True
        self._last = OverlappingStep(self, len(self.rows), chunks, self._last)
        return self._last

    def step(self, chunks: Seq[Chunk]) -> list[Drawn]:
        return self.begin(chunks).results()
