"""Whether something has paid lately, measured in windows of steps, in circumstances of each kind. *Pure.*

What has not paid in a window rests, the longer the more often that has happened, and is then tried for a window again.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

WINDOW = 64  # steps
FIRST_REST = 1024
MOST_RESTS = 4  # each twice as long as the one before
LEAST_SHARE = 0.02  # gained of the time


@dataclass(slots=True)
class _Record:
    num_steps: int = 0  # of the present window
    seconds: float = 0.0
    gain_s: float = 0.0
    rests_until: int = 0
    num_rests: int = 0


class Worth:
    def __init__(self) -> None:
        self._records: dict[Hashable, _Record] = {}

    def may(self, kind: Hashable, now: int) -> bool:
        """now: in steps."""
        record = self._records.get(kind)
        return record is None or now >= record.rests_until

    def note(self, kind: Hashable, now: int, seconds: float, gain_s: float) -> None:
        """A step of this kind with it has taken so long, and gained so much."""
        record = self._records.setdefault(kind, _Record())
        record.num_steps += 1
        record.seconds += seconds
        record.gain_s += gain_s
        if record.num_steps < WINDOW:
            return
        num_rests = 0
        if record.gain_s < LEAST_SHARE * record.seconds:
            num_rests = min(MOST_RESTS, record.num_rests + 1)
            record.rests_until = now + (FIRST_REST << num_rests - 1)
        record.num_steps, record.seconds, record.gain_s, record.num_rests = 0, 0.0, 0.0, num_rests
