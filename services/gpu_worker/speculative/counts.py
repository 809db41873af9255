"""What is counted of drafts, and what they have saved. *Pure.*"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from services.gpu_worker.batch import Drawn
from services.gpu_worker.speculative.draft import Draft
from services.gpu_worker.speculative.row_cost import RowCost

OFTEN, SELDOM = 24, 256  # steps with drafts between plain ones
CLEAR = 0.5  # saved of the time, where it need not be known so well
PLAIN_WEIGHT = 0.2  # of the newest step
MOST_OFF = 0.5
HELD_UP = 2.0  # times what its rows would take one by one, which a step takes only if something else holds it up


@dataclass(slots=True)
class Counts:
    """Since the start of the process. num_drafts: times that a sequence had some; accepted: by position, from 0 on;
    saved_s: that steps without would have taken longer for the same tokens."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    saved_s: float = 0.0
    accepted: Counter[int] = field(default_factory=Counter)

    def note(self, draft: Draft, drawn: Drawn, saved_s: float = 0.0) -> None:
        """Of a sequence in a step. saved_s: by each draft."""
        self.num_drafts += 1
        self.num_draft_tokens += len(draft)
        self.saved_s += saved_s * len(draft)
        self.accepted.update(range(len(draft.follow(t.token_id for t in drawn))))


class Savings:
    """What steps with drafts save, against what plain ones of as many sequences have taken lately. When `wants_plain`
    the next step should be one: else what they take would be a guess."""

    def __init__(self, cost: RowCost) -> None:
        self._cost = cost
        self._plain_s: dict[int, float] = {}  # by number of sequences
        self._num_since = 0  # steps with drafts, since the last plain one
        self._share = 0.0  # saved lately, of the time

    @property
    def wants_plain(self) -> bool:
        return self._num_since >= (SELDOM if self._share > CLEAR else OFTEN)

    def plain(self, num_sequences: int, seconds: float) -> None:
        self._num_since = 0
        known = self._plain_s.get(num_sequences, 0.0)
        off = seconds - known
        if known:  # one that was held up says little
            off = max(-MOST_OFF * known, min(MOST_OFF * known, off))
        self._plain_s[num_sequences] = known + (PLAIN_WEIGHT if known else 1.0) * off

    def of(self, num_rows: int, drawn: Seq[Drawn], seconds: float) -> float:
        """How much longer plain steps would have taken for what one of so many rows has drawn."""
        num = len(drawn)
        if num_rows == num:
            return 0.0
        plain_s = self._plain_s.get(num) or self._cost.seconds(num)
        seconds = min(seconds, HELD_UP * plain_s * num_rows / num)  # the rest is no loss by guesses
        if seconds <= 0.0:
            return 0.0
        saved = plain_s * sum(map(len, drawn)) / num - seconds
        self._num_since += 1
        self._share += PLAIN_WEIGHT * (saved / seconds - self._share)
        return saved
