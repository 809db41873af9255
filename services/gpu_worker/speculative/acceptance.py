"""How likely a draft is right, by how much speaks for it, learnt from every token that was drawn. *Pure.*

It needs no drafts to learn from: what would have been guessed is compared with what came, at no cost. So an estimate
stays true while nothing is drafted. A sequence begins with what its worker has seen in others, and soon has its own.
"""

from __future__ import annotations

NUM_LEVELS = 12  # of strength: 0 to 7 one by one, then doubling
SHARE_KEPT = 0.95  # of what was counted, when one more is
NEGLIGIBLE = 0.01  # chance of a draft that is not worth asking about: a row costs more than that of any step
PRIOR_WEIGHT = 6.0  # what others have shown counts as so many tokens


def level_of(strength: int) -> int:
    return strength if strength < 8 else min(NUM_LEVELS - 1, 4 + strength.bit_length())


class Acceptance:
    """share_kept: of what was counted, when one more is. prior: where nothing is known yet."""

    def __init__(self, prior: Acceptance | None = None, share_kept: float = SHARE_KEPT) -> None:
        self._prior = prior
        self._share_kept = share_kept
        self._right = [0.0] * NUM_LEVELS
        self._tried = [0.0] * NUM_LEVELS

    def observe(self, strength: int, was_right: bool) -> None:
        level, kept = level_of(strength), self._share_kept
        self._right[level] = kept * self._right[level] + was_right
        self._tried[level] = kept * self._tried[level] + 1.0
        if self._prior is not None:
            self._prior.observe(strength, was_right)

    def probability(self, strength: int) -> float:
        """That a draft of this strength is right, if those before it were."""
        level = level_of(strength)
        expected = strength / (strength + 2) if self._prior is None else self._prior.probability(strength)
        return (self._right[level] + PRIOR_WEIGHT * expected) / (self._tried[level] + PRIOR_WEIGHT)

    def survival(self, strength: int, count: int, max_strength: int) -> list[float]:
        """Of each of so many drafts, the first of this strength: that it and all before it are right. Without those
        that have next to no chance."""
        chances, chance = [], 1.0
        for i in range(count):
            chance *= self.probability(min(strength + i, max_strength))
            if chance < NEGLIGIBLE:
                break
            chances.append(chance)
        return chances
