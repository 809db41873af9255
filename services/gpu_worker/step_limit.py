"""How many tokens a step may have where memory has run out. *Pure.*

Half of what did not fit; after a while without trouble it doubles, since what took the memory may have given it back.
"""

from __future__ import annotations

GOOD_STEPS = 256  # at the limit or below it, before it doubles
NO_LIMIT = 1 << 24


class StepLimit:
    def __init__(self) -> None:
        self.num_tokens = NO_LIMIT
        self._num_good = 0

    def ran_out(self, num_tokens: int) -> None:
        """A step of so many tokens did not fit."""
        self.num_tokens = max(1, min(self.num_tokens, num_tokens // 2))
        self._num_good = 0

    def went_well(self) -> None:
        if self.num_tokens == NO_LIMIT:
            return
        self._num_good += 1
        if self._num_good >= GOOD_STEPS:
            self.num_tokens = min(NO_LIMIT, 2 * self.num_tokens)
            self._num_good = 0
