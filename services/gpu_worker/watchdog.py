"""Whether the engine still does its work, as seen from the thread that keeps the lease. *Pure.*

A step that takes longer than any should is not believed at once: a process that was stopped and goes on again sees
much time pass in one step, and is well.
"""

from __future__ import annotations

from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.failures import EngineHung

HUNG_LOOKS = 3
LOOK_AGAIN_S = 0.1


class Watchdog:
    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._num_steps = -1
        self._num_looks = 0  # in a row that found the same step too long

    @property
    def suspects(self) -> bool:
        """Look again soon."""
        return self._num_looks > 0

    def check_thread(self) -> None:
        """Raises what ended the engine's thread."""
        if self._loop.failure is not None:
            raise self._loop.failure

    def check(self) -> None:
        """WorkerFailure if the thread has ended, or if its step does not end."""
        self.check_thread()
        hung, num_steps = self._loop.hung, self._loop.num_steps
        self._num_looks = self._num_looks + 1 if hung and num_steps == self._num_steps else int(bool(hung))
        self._num_steps = num_steps
        if self._num_looks >= HUNG_LOOKS:
            raise EngineHung("the engine's step does not end", hung)
