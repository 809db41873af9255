"""What the scheduler's core asks its shell to do. *Pure data.* The shell answers through methods of the core."""

from __future__ import annotations

from dataclasses import dataclass

from shared.protocol import Outcome
from shared.store_calls import StoreCall
from shared.wire import Message
from shared.worker_protocol import Admit


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """Read prompt and log of a queued sequence; answer: `SchedulerCore.on_record`."""

    sid: str


@dataclass(frozen=True, slots=True)
class Call:
    """Send to the store; its answer comes as a message."""

    store: str
    message: StoreCall


@dataclass(frozen=True, slots=True)
class Plan:
    """Append changes to a worker's plan, under this run term; once, however often it is tried."""

    worker: str
    term: int
    changes: tuple[Message, ...]
    number: int


@dataclass(frozen=True, slots=True)
class Assign:
    """Run the assign script; answer: `SchedulerCore.on_assigned`."""

    sid: str
    epoch: int  # expected; the place has epoch + 1
    worker: str
    term: int
    admit: Admit


@dataclass(frozen=True, slots=True)
class Offer:
    """Hand a queued sequence to another scheduler; answer: `SchedulerCore.on_offered`."""

    sid: str
    epoch: int
    scheduler: str


@dataclass(frozen=True, slots=True)
class Requeue:
    sid: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Finish:
    sid: str
    epoch: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class KeepDead:
    """Keep for people that this sequence has ended by an error of its own, if that was the engine's."""

    sid: str


@dataclass(frozen=True, slots=True)
class CheckPlaced:
    """Queue again what the records place on this worker and its running set (sid, epoch) does not show; of the rest,
    tell the core what only the records know (`SchedulerCore.on_placed`)."""

    worker: str
    shown: frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Expel:
    """End this worker's lease: it is alive, and its engine is not."""

    worker: str


Action = ReadRecord | Call | Plan | Assign | Offer | Requeue | Finish | KeepDead | CheckPlaced | Expel
