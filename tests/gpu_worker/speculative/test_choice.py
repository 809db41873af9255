from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gpu_worker.speculative.choice import WORTH, choose_fairly, choose_lengths, may_pay


def linear(fixed: float) -> Callable[[int], float]:
    return lambda num_rows: fixed + num_rows


chances = st.lists(st.floats(0, 1), max_size=3).map(lambda own: [_product(own[: i + 1]) for i in range(len(own))])


rises = st.sampled_from((0.0, 0.0, 0.2, 1.0, 5.0))  # of a step's cost, by a row more


def _product(values: list[float]) -> float:
    result = 1.0
    for value in values:
        result *= value
    return result


@given(st.lists(chances, min_size=1, max_size=4), st.floats(0.1, 20.0), st.lists(rises, min_size=16, max_size=16),
       st.integers(0, 12))  # fmt: skip
def test_nothing_else_would_make_more_tokens_a_second(
    survivals: list[list[float]], fixed: float, rises: list[float], num_free: int
) -> None:
    count = len(survivals)

    def cost(num_rows: int) -> float:
        return fixed + sum(rises[:num_rows])

    def rate(lengths: tuple[int, ...]) -> float:
        expected = count + sum(sum(own[:n]) for own, n in zip(survivals, lengths, strict=True))
        return expected / cost(count + sum(lengths))

    got = choose_lengths(survivals, count, count, num_free, cost)
    every = [ls for ls in product(*(range(len(own) + 1) for own in survivals)) if sum(ls) <= num_free]
    best = max(map(rate, every))
    assert sum(got) <= num_free
    assert rate(tuple(got)) == pytest.approx(best) if any(got) else best <= WORTH * rate(tuple(got)) + 1e-9


def test_free_rows_take_every_draft_and_dear_ones_none() -> None:
    own = [[0.5, 0.25], [0.1]]
    assert choose_lengths(own, 2, 2, 100, lambda rows: 1.0) == [2, 1]
    assert choose_lengths(own, 2, 2, 100, lambda rows: float(rows)) == [0, 0]


def test_a_step_of_more_rows_is_not_taken_for_cheaper() -> None:
    """As measured costs say by chance."""
    costs = {1: 2.0, 2: 3.2, 3: 1.0, 4: 5.0}
    assert choose_lengths([[0.4, 0.2, 0.2]], 1, 1, 9, costs.__getitem__) == [0]


def test_drafts_that_pay_together_alone_are_found() -> None:
    """One would not, nor would two."""
    assert choose_lengths([[0.5] * 6], 1, 1, 9, lambda rows: 1.0 if rows == 1 else 3.0) == [6]


def test_a_step_that_jumps_in_cost_is_filled_or_left() -> None:
    """Rows in pairs: the second of a pair costs nothing."""
    assert choose_lengths([[0.9, 0.8, 0.7, 0.6]], 1, 1, 9, lambda rows: 2.0 + (rows + 1) // 2) == [3]


@pytest.mark.parametrize("num_prompt_rows", [0, 1, 256])
def test_a_prompt_beside_which_drafts_are_computed_makes_no_row_cheap(num_prompt_rows: int) -> None:
    """What it takes is taken anyway: a token more saves a step without it."""
    cost, own = linear(8.0), [[0.9, 0.6, 0.15, 0.1, 0.05]]
    assert choose_lengths(own, 1, 1, 9, cost) == [2]
    assert choose_lengths(own, 1, 1 + num_prompt_rows, 9, cost) == [2]


@pytest.mark.parametrize(
    ("others", "num_free", "max_cost", "lengths"),
    [
        ([], 99, 20.0, [8, 8]),  # nobody is without
        ([[]], 99, 200.0, [3, 3, 0]),
        ([[]], 4, 200.0, [3, 1, 0]),
        ([[]], 99, 37.0, [3, 1, 0]),
        ([[]], 99, 20.0, [0, 0, 0]),
        ([[0.0]], 99, 200.0, [3, 3, 0]),  # has guesses that are worth nothing
    ],
)
def test_those_without_drafts_wait_for_those_of_others_for_a_bounded_time(
    others: list[list[float]], num_free: int, max_cost: float, lengths: list[int]
) -> None:
    survivals, num_rows = [[0.9] * 8] * 2 + others, 2 + len(others)
    assert choose_fairly(survivals, num_rows, num_rows, num_free, linear(33.0 - num_rows), max_cost) == lengths


@given(st.floats(0.0, 20.0), st.integers(1, 8), st.integers(0, 40))
def test_what_may_pay_is_what_would_if_all_were_right(fixed: float, num_sampled: int, num_free: int) -> None:
    cost, plain = linear(fixed), num_sampled / (fixed + num_sampled)
    would = any((num_sampled + n) / cost(num_sampled + n) > plain for n in range(1, num_free + 1))
    assert may_pay(num_sampled, num_sampled, num_free, cost) == would
    assert not may_pay(num_sampled, num_sampled, num_free, lambda rows: rows**1.5)
