"""What guessing may cost: a small share of all time, and what guesses earn back. *Pure.*

Whatever estimates say, drafting costs a worker no more than SHARE of its time and, once, what may be owed or was kept.
Little is kept for later: what has been earned would be wasted on tries.
"""

from __future__ import annotations

SHARE = 0.01  # of the time of all steps
MOST_STEPS = 64  # whose time may be owed
WEIGHT = 0.05  # of the newest step, in how long they take


class Purse:
    """kept_steps: whose time it may hold, from the first step on."""

    def __init__(self, kept_steps: float = 0.0, share: float = SHARE) -> None:
        self._share = share
        self._kept_steps = kept_steps
        self.balance_s = 0.0
        self._step_s = 0.0

    def step(self, seconds: float, saved_s: float = 0.0, others_s: float = 0.0) -> None:
        """A step has ended that took so long, and so much less than one without drafts would have for its tokens.
        others_s: of those before it that nobody told of."""
        if not self._step_s:
            self.balance_s += self._kept_steps * seconds
        if not saved_s or not self._step_s:  # what is owed is counted in steps without drafts
            self._step_s += (WEIGHT if self._step_s else 1.0) * (seconds - self._step_s)
        self.balance_s = min(
            self._kept_steps * self._step_s, self.balance_s + self._share * (seconds + others_s) + saved_s
        )

    def pay(self, seconds: float) -> None:
        self.balance_s -= seconds

    @property
    def may_try(self) -> bool:
        """What is expected not to pay."""
        return self.balance_s >= 0.0

    @property
    def may_draft(self) -> bool:
        """And read texts for it, where that is expected to pay."""
        return self.balance_s > -MOST_STEPS * self._step_s or not self._step_s
