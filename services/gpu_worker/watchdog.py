"""Whether the engine still does its work, as seen from the thread that keeps the lease.

A step that takes longer than any should is looked at again before it is given up. After a pause of the whole process
(it was stopped, or the machine slept) the step has its time once more: it stood still too, and may be well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.failures import EngineHung

HUNG_LOOKS = 3
LOOK_AGAIN_S = 0.1
PAUSE_S = 3.0  # between two looks, which are at most 2 s apart


class Watchdog:
    def __init__(self, loop: EngineLoop, clock: Callable[[], float] = time.monotonic) -> None:
        self._loop = loop
        self._clock = clock
        self._looked_at = math.inf
        self._trusted_until = -math.inf
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
        now, hung, num_steps = self._clock(), self._loop.hung, self._loop.num_steps
        if now - self._looked_at > PAUSE_S:
            self._trusted_until = now + self._loop.hang_s
        self._looked_at = now
        if not hung or now < self._trusted_until:
            self._num_looks = 0
        else:
            self._num_looks = self._num_looks + 1 if num_steps == self._num_steps else 1
        self._num_steps = num_steps
        if self._num_looks >= HUNG_LOOKS:
            raise EngineHung("the engine's step does not end", hung)
