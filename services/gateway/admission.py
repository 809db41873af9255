"""When a request is told to come back later, and how much later: from how fast the queue has been draining, or from
when its API key may have more. *Pure.*"""

from __future__ import annotations

import math
from collections import deque

from services.gateway.errors import ApiError
from shared.scripts import Admission

WINDOW_S = 20.0
MAX_RETRY_AFTER_S = 60
MAX_READINGS = 256


class TryLater(ApiError):
    """A refusal that does not lie in the request: the answer carries Retry-After."""

    def __init__(
        self, status: int, message: str, *, code: str, retry_after_s: int, admission: Admission | None = None
    ) -> None:
        super().__init__(status, message, code=code)
        self.retry_after_s = retry_after_s
        self.admission = admission


def unavailable(message: str, code: str, retry_after_s: int = 1) -> TryLater:
    return TryLater(503, message, code=code, retry_after_s=retry_after_s)


def refused(admission: Admission, num_prompt_tokens: int, drained: DrainMeter) -> TryLater:
    """What a client is told of an admission that was not accepted."""
    number = admission.number
    match admission.status:
        case "key_open":
            sentence = f"{number} requests of this API key are open, as many as it may have"
            return TryLater(
                429, sentence, code="concurrency_limit_exceeded", retry_after_s=1, admission=admission
            )  # fmt: skip
        case "key_requests" | "key_tokens":
            what = admission.status.removeprefix("key_")
            sentence = f"this API key has used its {number} {what} a minute"
            wait_s = max(1, math.ceil(admission.wait_ms / 1000))
            return TryLater(429, sentence, code="rate_limit_exceeded", retry_after_s=wait_s, admission=admission)
        case "full_requests":
            sentence, num_queued = f"the queue is full ({number} requests wait)", number
        case _:
            sentence, num_queued = f"the queue is full ({number} tokens wait)", number // num_prompt_tokens
    return TryLater(
        429, sentence, code="queue_full", retry_after_s=drained.retry_after_s(num_queued), admission=admission
    )


def rate_limit_headers(admission: Admission) -> dict[str, str]:
    """What OpenAI says of each limit that there is: how much, what is left, and after what time all of it is."""
    limits, headers = admission.key_limits, dict[str, str]()
    for what, limit, left, reset_ms in (
        ("requests", limits.requests_per_minute, admission.requests_left, admission.requests_reset_ms),
        ("tokens", limits.tokens_per_minute, admission.tokens_left, admission.tokens_reset_ms),
    ):
        if limit:
            headers[f"x-ratelimit-limit-{what}"] = str(limit)
            headers[f"x-ratelimit-remaining-{what}"] = str(left)
            headers[f"x-ratelimit-reset-{what}"] = _duration(reset_ms)
    return headers


def _duration(ms: int) -> str:
    """As OpenAI writes it: 20ms, 1.5s, 6m0s."""
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{ms / 1000:g}s"


class DrainMeter:
    """How fast the whole deployment's queue drains, from readings of how many sequences have ever left it."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque()

    def read(self, num_left: int, now: float) -> None:
        if self._readings and num_left < self._readings[-1][1]:
            self._readings.clear()  # Redis has come back with less than it had
        self._readings.append((now, num_left))
        while self._readings[0][0] < now - WINDOW_S and len(self._readings) > 2 or len(self._readings) > MAX_READINGS:
            self._readings.popleft()

    def retry_after_s(self, num_queued: int) -> int:
        """Seconds until about half of the queue has drained; 1 while nothing is known, never more than a minute."""
        if not self._readings:
            return 1
        (began, first), (ended, last) = self._readings[0], self._readings[-1]
        if last - first < 2:
            return 1 if ended - began < WINDOW_S else MAX_RETRY_AFTER_S  # just begun, or it does not drain at all
        rate = (last - first) / max(0.1, ended - began)
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(num_queued / 2 / rate)))
