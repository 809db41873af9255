"""What is counted of drafts, and what they have saved. *Pure.*"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from services.gpu_worker.batch import Drawn
from services.gpu_worker.speculative.draft import Draft
from services.gpu_worker.speculative.row_cost import RowCost


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


def saved_s(cost: RowCost, num_rows: int, drawn: Seq[Drawn], seconds: float) -> float:
    """How much longer steps without drafts would have taken for what one of so many rows has drawn."""
    if seconds <= 0.0 or num_rows == len(drawn):
        return 0.0
    return cost.seconds(len(drawn)) * sum(map(len, drawn)) / len(drawn) - seconds
