"""An event loop whose time stands still until a test moves it, and that knows when nothing more can happen.

Knows nothing of Redis but how many of its answers are awaited.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

RESOLUTION_S = 1e-6  # timers this close are due: sums of floating-point times differ by less
ANSWER_TIMEOUT_S = 30.0  # of real time: a Redis that does not answer for so long has died


class Clock:
    """Monotonic seconds, for the loop and for everything that takes a clock."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class QuietSelector(selectors.DefaultSelector):
    """Where a loop would block, it blocks only for an answer of Redis; else `on_quiet` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.num_awaited = 0
        self.on_quiet: Callable[[], Any] = lambda: None

    def select(self, timeout: float | None = None) -> Any:
        if timeout is not None and timeout <= RESOLUTION_S / 2:
            return super().select(0)
        if self.num_awaited:
            events = super().select(ANSWER_TIMEOUT_S)
            assert events, "Redis does not answer"
            return events
        self.on_quiet()
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.quiet_selector = QuietSelector()
        super().__init__(self.quiet_selector)
        self._clock_resolution = RESOLUTION_S

    def time(self) -> float:
        return self.clock.now

    def run_until_quiet(self) -> None:
        """Runs everything that can run at this time."""
        quiet = self.create_future()
        self.quiet_selector.on_quiet = lambda: quiet.done() or quiet.set_result(None)
        self.run_until_complete(quiet)
