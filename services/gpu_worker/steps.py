"""How a step begins and how it ends: of engines that go from one to the next by themselves, and of others."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from services.gpu_worker.batch import Chunk, Drawn, Engine


class Step(Protocol):
    """A step that has begun. may_be_followed: the next may begin before this one's results are taken."""

    may_be_followed: bool

    @property
    def has_ended(self) -> bool: ...

    def wait_until_late(self) -> None:
        """Returns when it is nearly over: time to begin the next. Called once the step before is taken."""
        ...

    def results(self) -> list[Drawn]:
        """Waits for its end; as `Engine.step`."""
        ...


@runtime_checkable
class OverlappingEngine(Engine, Protocol):
    """Goes from one step to the next by itself, if that has begun in time."""

    def begin(self, chunks: Seq[Chunk]) -> Step:
        """Steps run in the order in which they begin, at most two at a time; what they read of the sequences is copied
        here. Tokens that only the step before knows are taken from there; it may not have drafts. Raises as `step`
        does before it computes."""
        ...


def results_of(step: Step, chunks: Seq[Chunk]) -> list[Drawn]:
    drawn = step.results()
    if [len(d) > len(c.scored) for d, c in zip(drawn, chunks, strict=True)] != [c.sample for c in chunks]:
        raise ValueError("the engine's results do not match its chunks")
    return drawn


@dataclass(frozen=True, slots=True)
class Begun:
    """A step that has begun at some time, with so many tokens of prefill. follows: there was no pause before."""

    chunks: Seq[Chunk]
    step: Step
    num_prefill: int
    at: float
    follows: bool


class WholeStep:
    """A step of an engine that computes in its caller's thread."""

    may_be_followed = False
    has_ended = True

    def __init__(self, engine: Engine, chunks: Seq[Chunk]) -> None:
        self._engine = engine
        self._chunks = chunks

    def wait_until_late(self) -> None:
        return

    def results(self) -> list[Drawn]:
        return self._engine.step(self._chunks)


class RefusedStep:
    """A step that an engine did not begin: its results are the error."""

    may_be_followed = False
    has_ended = True

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait_until_late(self) -> None:
        return

    def results(self) -> list[Drawn]:
        raise self._error


def starter(engine: Engine, overlap: bool) -> Callable[[Seq[Chunk]], Step]:
    """What begins the steps of an engine, and never raises. overlap: if it can."""
    return partial(_begin, engine) if overlap and isinstance(engine, OverlappingEngine) else partial(WholeStep, engine)


def _begin(engine: OverlappingEngine, chunks: Seq[Chunk]) -> Step:
    try:
        return engine.begin(chunks)
    except Exception as e:
        return RefusedStep(e)
