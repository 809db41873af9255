"""How likely a draft is right, by how much speaks for it, learnt from every token that was drawn. *Pure.*

It needs no drafts to learn from: what would have been guessed is compared with what came, at no cost. So an estimate
stays true while nothing is drafted. A sequence begins with what its worker has seen in others, and soon has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

from services.gpu_worker.speculative.proposer import KIND

NUM_KINDS = 5  # of strengths
NUM_LEVELS = 12  # of each: 0 to 7 one by one, then doubling
SHARE_KEPT = 0.95  # of what was counted, when one more is
NEGLIGIBLE = 0.01  # chance of a draft that is not worth asking about: a row costs more than that of any step
PRIOR_WEIGHT = 6.0  # what others have shown counts as so many tokens


@lru_cache(maxsize=NUM_KINDS * KIND)
def level_of(strength: int) -> int:
    kind, strength = divmod(strength, KIND)
    return kind * NUM_LEVELS + (strength if strength < 8 else min(NUM_LEVELS - 1, 4 + strength.bit_length()))


def expected_of(strength: int) -> float:
    return strength / (strength + 2)


class Acceptance:
    """share_kept: of what was counted, when one more is. prior: where nothing is known yet; unknown: where that is
    not either."""

    def __init__(
        self, prior: Acceptance | None = None, share_kept: float = SHARE_KEPT,
        unknown: Callable[[int], float] = expected_of,
    ) -> None:  # fmt: skip
        self._prior = prior
        self._share_kept = share_kept
        self._unknown = unknown
        self._right = [0.0] * (NUM_KINDS * NUM_LEVELS)
        self._tried = [0.0] * (NUM_KINDS * NUM_LEVELS)

    def observe_all(self, guessed: Iterable[tuple[int, bool]]) -> None:
        for strength, was_right in guessed:
            self.observe(strength, was_right)

    def observe(self, strength: int, was_right: bool) -> None:
        self._observe(level_of(strength), was_right)

    def _observe(self, level: int, was_right: bool) -> None:
        kept = self._share_kept
        self._right[level] = kept * self._right[level] + was_right
        self._tried[level] = kept * self._tried[level] + 1.0
        if self._prior is not None:
            self._prior._observe(level, was_right)

    def probability(self, strength: int) -> float:
        """That a draft of this strength is right, if those before it were."""
        return self._probability(strength, level_of(strength))

    def _probability(self, strength: int, level: int) -> float:
        prior = self._prior
        expected = self._unknown(strength) if prior is None else prior._probability(strength, level)
        return (self._right[level] + PRIOR_WEIGHT * expected) / (self._tried[level] + PRIOR_WEIGHT)

    def survival(self, strengths: Iterable[int]) -> list[float]:
        """Of drafts that follow each other, each: that it and all before it are right. Without those that have next to
        no chance."""
        chances, chance = [], 1.0
        for strength in strengths:
            chance *= self._probability(strength, level_of(strength))
            if chance < NEGLIGIBLE:
                break
            chances.append(chance)
        return chances
