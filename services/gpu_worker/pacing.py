"""When the next commit is due that is not urgent. *Pure*: times are seconds of any monotonic clock.

Tokens go every `interval_s`, stretched so that commits keep Redis below a tenth of a core; a running set that has
nothing to say is shown every `REPORT_S`, which is also how a cancel reaches a sequence in prefill. What a commit costs
Redis is reckoned from its size: its round trip mostly tells how busy this machine's cores are, and where compute
threads use all of them it would slow the streams for nothing.
"""

from __future__ import annotations

REPORT_S = 0.1
DETAILS_S = 0.4  # by when a report says which blocks were taken and sealed while nobody waits to hear of it
MAX_INTERVAL_S = 0.1
MAX_SHARE = 0.1  # of a core, for commits
COMMIT_S = 0.0002  # of Redis' time: measured 0.2 / 0.3 / 0.7 / 4.3 ms at 1 / 8 / 32 / 256 sequences
ENTRY_S = 0.000016


class Pacer:
    def __init__(self, interval_s: float) -> None:
        self._shortest_s = interval_s
        self._commit_s = 0.0
        self._last = float("-inf")  # start of the last flush that left nothing behind

    @property
    def interval_s(self) -> float:
        return max(self._shortest_s, min(self._commit_s / MAX_SHARE, MAX_INTERVAL_S))

    def due_in(self, now: float, *, pending: bool, running: bool) -> float | None:
        """Seconds until the next flush, 0 or less: now; None: there is nothing to say."""
        if pending:
            return self._last + self.interval_s - now
        if running:
            return self._last + REPORT_S - now
        return None

    def flushed(self, started: float, num_entries: int, everything: bool) -> None:
        """A flush has ended; num_entries: sequences in its commit. Only those that carried everything count."""
        if everything:
            self._last = started
            self._commit_s = COMMIT_S + ENTRY_S * num_entries
