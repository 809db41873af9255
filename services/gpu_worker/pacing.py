"""When the next commit is due that is not urgent. *Pure*: times are seconds of any monotonic clock.

Tokens go every `interval_s`, stretched so that commits take at most a tenth of a core; a running set that has nothing
to say is shown every `REPORT_S`, which is also how a cancel reaches a sequence in prefill.
"""

from __future__ import annotations

REPORT_S = 0.1
MAX_INTERVAL_S = 0.1
MAX_SHARE = 0.1  # of a core, for commits
GROWTH = 1.02  # of what a commit is taken to cost, a flush


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

    def flushed(self, started: float, commit_s: float, everything: bool) -> None:
        """A flush has ended; commit_s is the round trip of its commit.

        One that waited for a busy core says little about what it costs, so a shorter one counts at once, a longer
        one little by little. Only those that carried everything are compared.
        """
        if everything:
            self._last = started
            self._commit_s = min(commit_s, GROWTH * self._commit_s) if self._commit_s else commit_s
