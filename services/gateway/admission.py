"""When a request is told to come back later, and how much later: from how fast the queue has been draining. *Pure.*"""

from __future__ import annotations

import math
from collections import deque

from services.gateway.errors import ApiError

WINDOW_S = 20.0
MAX_RETRY_AFTER_S = 60


class TryLater(ApiError):
    """A refusal that does not lie in the request: the answer carries Retry-After."""

    def __init__(self, status: int, message: str, *, code: str, retry_after_s: int) -> None:
        super().__init__(status, message, code=code)
        self.retry_after_s = retry_after_s


def queue_full(what: str, retry_after_s: int) -> TryLater:
    return TryLater(429, f"the queue is full ({what})", code="queue_full", retry_after_s=retry_after_s)


def unavailable(message: str, code: str, retry_after_s: int = 1) -> TryLater:
    return TryLater(503, message, code=code, retry_after_s=retry_after_s)


class DrainMeter:
    """Counts sequences that left the queue lately. It sees one gateway's: with several, the advice errs to patience."""

    def __init__(self) -> None:
        self._left: deque[float] = deque()

    def sequence_started(self, now: float) -> None:
        self._left.append(now)
        self._forget(now)

    def retry_after_s(self, num_queued: int, now: float) -> int:
        """Seconds until about half of the queue has drained; 1 while nothing is known, never more than a minute."""
        self._forget(now)
        if len(self._left) < 2:
            return 1
        rate = len(self._left) / max(0.1, now - self._left[0])
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(num_queued / 2 / rate)))

    def _forget(self, now: float) -> None:
        while self._left and (self._left[0] < now - WINDOW_S or len(self._left) > 1000):
            self._left.popleft()
