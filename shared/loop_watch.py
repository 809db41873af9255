"""An event loop that knows when it last was free, and a thread that says what blocks it.

The loop is busy from the end of one wait for events until it waits again. Its lag is measured by that, turn by turn; a
thread looks twice a second whether the present turn has lasted too long, and then logs the stack of the loop's thread,
once a turn. Nothing wakes an idle loop, and the thread's looks cost about 0.01 % of a core. Where native code holds the
interpreter's lock the thread cannot look; the lag still tells.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
import sys
import threading
import time
import traceback
from typing import Any

log = logging.getLogger(__name__)

STALL_S = 0.5  # a turn that takes longer is worth a line in the log
LOOK_S = 0.5
MAX_FRAMES = 8  # the innermost: a log line is short


class _WatchedSelector(selectors.DefaultSelector):
    """busy_since: monotonic time at which the last wait for events ended; 0 during one."""

    def __init__(self) -> None:
        super().__init__()
        self.busy_since = time.monotonic()
        self.longest_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.longest_s = max(self.longest_s, time.monotonic() - self.busy_since)
        self.busy_since = 0.0
        try:
            return super().select(timeout)
        finally:
            self.busy_since = time.monotonic()


class WatchedLoop(asyncio.SelectorEventLoop):
    """num_stalls: turns so far that took longer than stall_s, as far as the thread saw them."""

    def __init__(self, stall_s: float = STALL_S) -> None:
        self._watched = _WatchedSelector()
        super().__init__(self._watched)
        self.num_stalls = 0
        self._stall_s = stall_s
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def run_forever(self) -> None:
        """Watched while it runs."""
        self._over.clear()
        ident = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, args=(ident,), name="loop watch", daemon=True)
        self._watched.busy_since = time.monotonic()
        self._thread.start()
        try:
            super().run_forever()
        finally:
            self._over.set()
            self._thread.join()

    def take_lag_s(self) -> float:
        """How long the longest turn since the last call has taken: so long others may have waited."""
        longest_s, self._watched.longest_s = self._watched.longest_s, 0.0
        return longest_s

    def _watch(self, ident: int) -> None:
        told, looked_at = 0.0, time.monotonic()
        while not self._over.wait(LOOK_S):
            since, now = self._watched.busy_since, time.monotonic()
            on_time = now - looked_at < LOOK_S + self._stall_s / 2  # else the whole process has stood still
            looked_at = now
            if since and since != told and now - since > self._stall_s and on_time:
                told = since
                self._tell(ident, now - since)

    def _tell(self, ident: int, seconds: float) -> None:
        self.num_stalls += 1
        frame = sys._current_frames().get(ident)
        frames = reversed(traceback.extract_stack(frame, None)[-MAX_FRAMES:]) if frame is not None else ()
        stack = " < ".join(f"{f.name} ({'/'.join(f.filename.split('/')[-2:])}:{f.lineno})" for f in frames)
        log.warning("the event loop has been blocked for %.1f s by %s", seconds, stack)


def lag_s() -> tuple[float, int]:
    """(longest turn of the running loop since the last call, stalls ever); zeros for a loop that is not watched."""
    loop: Any = asyncio.get_running_loop()
    return (loop.take_lag_s(), loop.num_stalls) if isinstance(loop, WatchedLoop) else (0.0, 0)
