"""How many drafts a step computes for each sequence: as many as make the most tokens a second expected. *Pure.*"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq


def choose_lengths(
    survivals: Seq[Seq[float]], num_sampled: int, num_rows: int, num_free: int, cost: Callable[[int], float]
) -> list[int]:
    """Drafts of each sequence. survivals: of its drafts, that it and all before it are right, so they do not rise.

    num_sampled: tokens that the step draws without drafts; num_rows: that it computes without them; num_free: drafts
    that fit. cost: of a step of so many rows."""
    order = sorted(
        ((chance, i) for i, chances in enumerate(survivals) for chance in chances), key=lambda each: -each[0]
    )  # stable, so the drafts of a sequence stay in order
    best, best_count, expected = num_sampled / cost(num_rows), 0, float(num_sampled)
    for count, (chance, _) in enumerate(order[:num_free], start=1):
        expected += chance
        rate = expected / cost(num_rows + count)
        if rate > best:
            best, best_count = rate, count
    lengths = [0] * len(survivals)
    for _, i in order[:best_count]:
        lengths[i] += 1
    return lengths
