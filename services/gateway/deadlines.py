"""How long a client lets the parts of its request take, and the timers of the parts that a gateway sees.

Queue, first token and the whole are enforced by the scheduler, by Redis' time, also where no gateway is left. The
gateway has timers beside it, by its own monotonic clock: for the time between tokens, which only a reader sees, and so
that a client is told in time when no scheduler is there. One outcome reaches the client, whoever is first. Whether a
sequence still queues is for Redis to say.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence

from services.gateway.errors import BadRequest
from services.gateway.open_request import OpenRequest
from services.gateway.openai_schema import MAX_TIMEOUT_S, Timeouts
from shared import timeouts
from shared.protocol import Outcome, TimeLimits
from shared.settings import GatewaySettings, LimitSettings

HEADER = "X-Request-Timeout"
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,3})?")

QUEUE_GRACE_S = 0.5  # for a scheduler to end first what waited too long


def time_limits(
    gateway: GatewaySettings, limits: LimitSettings, headers: Mapping[str, str], asked: Timeouts | None
) -> TimeLimits:
    """The server's, of which a client may shorten each; its header is about the whole."""
    asked = asked or Timeouts()
    return TimeLimits(
        queue_ms=_shortest_ms(limits.queue_timeout_s, asked.queue),
        first_token_ms=_shortest_ms(limits.first_token_timeout_s, asked.first_token),
        inter_token_ms=_shortest_ms(limits.inter_token_timeout_s, asked.inter_token),
        total_ms=_shortest_ms(gateway.request_timeout_s, asked.total, _from_header(headers)),
    )


def _shortest_ms(*seconds: float | None) -> int:
    """0 where there is none: the shortest that anybody asks for is 1 ms."""
    shortest_s = min((s for s in seconds if s), default=0)
    return max(1, round(shortest_s * 1000)) if shortest_s else 0


def _from_header(headers: Mapping[str, str]) -> float | None:
    text = headers.get(HEADER)
    if text is None:
        return None
    if _SECONDS.fullmatch(text) is None or not 0 < float(text) <= MAX_TIMEOUT_S:
        raise BadRequest(f"{HEADER} must be a number of seconds above 0, at most {MAX_TIMEOUT_S}", param=HEADER)
    return float(text)


class Timers:
    """Of one call. expire is called once at most; a token costs none of them anything. end_if_never_placed: of a choice
    of a request, which then ends with this outcome."""

    def __init__(
        self, limits: TimeLimits, requests: Sequence[OpenRequest], expire: Callable[[Outcome], None],
        end_if_never_placed: Callable[[OpenRequest, int, Outcome], None], *, resumed: bool,
    ) -> None:  # fmt: skip
        """resumed: the call was taken up again, so that what counts from its admission is the scheduler's alone."""
        self._requests = requests
        self._expire = expire
        self._end_if_never_placed = end_if_never_placed
        self._inter_token_s = limits.inter_token_ms / 1000
        self._loop = asyncio.get_running_loop()
        self._handles: dict[str, asyncio.TimerHandle] = {}
        self._arm("total", limits.total_ms / 1000, lambda: expire(timeouts.TOTAL))
        self._arm("inter token", self._inter_token_s, self._check_gaps)
        if not resumed:
            self._arm("first token", limits.first_token_ms / 1000, self._check_first)
            self._arm("queue", limits.queue_ms and limits.queue_ms / 1000 + QUEUE_GRACE_S, self._check_queue)

    def cancel(self) -> None:
        for handle in self._handles.values():
            handle.cancel()

    def _arm(self, name: str, seconds: float, check: Callable[[], None]) -> None:
        if seconds > 0:
            self._handles[name] = self._loop.call_later(seconds, check)

    def _check_queue(self) -> None:
        for request in self._requests:
            for choice in request.open_choices:
                if not request.heard_at[choice]:
                    self._end_if_never_placed(request, choice, timeouts.QUEUE)

    def _check_first(self) -> None:
        if any(not request.heard_at[choice] for request in self._requests for choice in request.open_choices):
            self._expire(timeouts.FIRST_TOKEN)

    def _check_gaps(self) -> None:
        """Looks when the next one could be due at the earliest."""
        now = time.monotonic()
        heard = [request.heard_at[choice] for request in self._requests for choice in request.open_choices]
        left_s = min((at for at in heard if at), default=now) + self._inter_token_s - now
        if left_s <= 0:
            self._expire(timeouts.INTER_TOKEN)
        else:
            self._arm("inter token", left_s, self._check_gaps)
