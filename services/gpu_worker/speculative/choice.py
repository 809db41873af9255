"""How many drafts a step computes for each sequence: as many as make the most tokens a second expected. *Pure.*"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from operator import itemgetter

from services.gpu_worker.speculative.row_cost import RowCost

WORTH = 1.02  # times as many tokens a second must be expected: what steps cost is known no better
MAX_SHARE = 0.1  # of a step's time, that the drafts of one sequence add for others who have none


def choose_fairly(
    survivals: Seq[Seq[float]], num_sampled: int, num_rows: int, num_free: int, cost: Callable[[int], float],
    max_cost: float,
) -> list[int]:  # fmt: skip
    """As `choose_lengths`; and where others take part without drafts, those of one sequence make a step longer by no
    more than MAX_SHARE of it, and all together not longer than max_cost."""
    lengths = choose_lengths(survivals, num_sampled, num_rows, num_free, cost)
    if all(lengths) or not any(lengths):
        return lengths
    own = _num_within((1 + MAX_SHARE) * cost(num_rows), max(lengths), num_rows, cost)
    num_free = _num_within(max_cost, num_free, num_rows, cost)
    return choose_lengths([chances[:own] for chances in survivals], num_sampled, num_rows, num_free, cost)


def choose_in_time(
    survivals: Seq[Seq[float]], num_sampled: int, num_rows: int, num_free: int, cost: RowCost, max_step_s: float,
    spent_s: float,
) -> list[int]:  # fmt: skip
    """As `choose_fairly`, with the time that guessing has taken already."""
    unit_s = cost.unit_s or 1.0
    spent = spent_s / unit_s
    return choose_fairly(
        survivals, num_sampled, num_rows, num_free, lambda num: spent + cost.relative(num), max_step_s / unit_s
    )


def may_pay(num_sampled: int, num_rows: int, num_free: int, cost: Callable[[int], float]) -> bool:
    """Could a step with drafts make more tokens a second if all were right?"""
    plain, count = cost(num_rows), num_free
    while count > 0:
        if (num_sampled + count) * plain > num_sampled * cost(num_rows + count):
            return True
        count //= 2
    return False


def _num_within(most_cost: float, most: int, num_rows: int, cost: Callable[[int], float]) -> int:
    """How many drafts, up to `most`, a step of this cost has room for."""
    return next((n for n in range(most) if cost(num_rows + n + 1) > most_cost), most)


def choose_lengths(
    survivals: Seq[Seq[float]], num_sampled: int, num_rows: int, num_free: int, cost: Callable[[int], float]
) -> list[int]:
    """Drafts of each sequence. survivals: of its drafts, that it and all before it are right, so they do not rise.

    num_sampled: tokens that the step draws without drafts; num_rows: that it computes without them. Those of prompts
    are computed anyway: a token more saves no such step, but a part of one without. num_free: drafts that fit. cost: of
    a step of so many rows, which is taken for no less than one of fewer."""
    plain = cost(num_rows)
    prompts = plain - cost(num_sampled) if num_rows > num_sampled else 0.0
    order = [(chance, i) for i, chances in enumerate(survivals) for chance in chances]
    if len(survivals) > 1:
        order.sort(key=itemgetter(0), reverse=True)  # stable, so the drafts of a sequence stay in order
    spent = plain - prompts
    best, best_count, expected = WORTH * num_sampled / spent, 0, float(num_sampled)
    num_left = min(num_free, len(order))
    for count, (chance, _) in enumerate(order[:num_free], start=1):
        if expected + num_left * chance <= best * spent:  # not even if the rest cost nothing
            break
        expected += chance
        num_left -= 1
        spent = max(spent, cost(num_rows + count) - prompts)
        if expected > best * spent:
            best, best_count = expected / spent, count
    lengths = [0] * len(survivals)
    for _, i in order[:best_count]:
        lengths[i] += 1
    return lengths
