"""What ends a worker process before its time, and the exit status that says so. *Pure.*

`blamed`: the places (sid, epoch) that it happened to. They are left as they are, so that a scheduler counts a strike
against them when it cleans up after this worker; all others are handed back without one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from services.gpu_worker.commits import Place
from shared.runtime import EXIT_ENGINE, EXIT_HUNG, EXIT_MEMORY


class WorkerFailure(Exception):
    """Only a new process helps."""

    STATUS: ClassVar[int] = 1

    def __init__(self, message: str, blamed: Collection[Place] = ()) -> None:
        super().__init__(message)
        self.blamed = frozenset(blamed)


class EngineHung(WorkerFailure):
    STATUS = EXIT_HUNG


class EngineBroken(WorkerFailure):
    """The engine cannot compute anything any more, so a failed step says little about the sequence in it."""

    STATUS = EXIT_ENGINE


class OutOfMemory(WorkerFailure):
    """Not even the smallest step fits."""

    STATUS = EXIT_MEMORY


class EngineDied(WorkerFailure):
    """The engine's thread has ended by an error of its own: what it holds may be half changed."""

    STATUS = EXIT_ENGINE
