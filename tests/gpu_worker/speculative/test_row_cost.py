from __future__ import annotations

import random

import pytest

from services.gpu_worker.speculative.row_cost import KEPT_STEPS, RowCost


def seconds(num_rows: int) -> float:
    return 0.005 + 0.001 * num_rows


def test_nothing_known_is_a_constant() -> None:
    assert RowCost().relative(1) == RowCost().relative(100) == 1.0


def test_ratios_are_those_of_the_steps_seen_and_between_them() -> None:
    cost = RowCost()
    for num_rows in (1, 2, 4, 8):
        cost.observe(num_rows, seconds(num_rows))
    for num_rows in range(1, 9):
        assert cost.relative(num_rows) / cost.relative(1) == pytest.approx(seconds(num_rows) / seconds(1))


def test_where_one_size_is_known_the_next_is_taken_for_as_cheap() -> None:
    cost = RowCost()
    cost.observe(4, seconds(4))
    assert cost.relative(5) == cost.relative(4) == 4 * cost.relative(1)
    assert cost.relative(10) == 2 * cost.relative(4)


def test_more_rows_than_were_seen_cost_what_those_between_did() -> None:
    cost = RowCost()
    for num_rows in (1, 2, 8):
        cost.observe(num_rows, seconds(num_rows))
    assert cost.relative(24) / cost.relative(1) == pytest.approx(seconds(24) / seconds(1))


def test_one_row_more_has_its_own_price_also_where_steps_have_changing_numbers() -> None:
    """Else a batch would be drafted for at a loss, each size hiding in its neighbour."""
    cost, rng = RowCost(), random.Random(6)
    for _ in range(2000):
        num_rows = rng.choice((16, 17, 18, 19))
        cost.observe(num_rows, seconds(num_rows))
    for num_rows in (17, 18, 19):
        assert cost.relative(num_rows) / cost.relative(16) == pytest.approx(seconds(num_rows) / seconds(16), rel=0.003)


def test_noise_averages_out() -> None:
    cost, rng = RowCost(), random.Random(5)
    for _ in range(3000):
        num_rows = rng.choice((1, 2, 4, 8))
        cost.observe(num_rows, seconds(num_rows) * rng.lognormvariate(0.0, 0.2) * (10 if rng.random() < 0.01 else 1))
    for num_rows in (2, 4, 8):
        assert cost.relative(num_rows) / cost.relative(1) == pytest.approx(seconds(num_rows) / seconds(1), rel=0.12)


def test_a_machine_that_slows_down_keeps_its_ratios() -> None:
    """Also those of sizes that do not run meanwhile."""
    cost = RowCost()
    for num_rows in (1, 2, 4, 8):
        cost.observe(num_rows, seconds(num_rows))
    before = cost.relative(8) / cost.relative(1)
    for _ in range(100):
        cost.observe(1, 2 * seconds(1))
    assert cost.relative(8) / cost.relative(1) == pytest.approx(before, rel=0.2)


def test_what_was_not_seen_for_long_is_tried_again() -> None:
    cost = RowCost()
    for num_rows in (1, 2, 4, 8):
        cost.observe(num_rows, 100 * seconds(num_rows) if num_rows == 2 else seconds(num_rows))
    assert cost.relative(2) > 50 * cost.relative(1)
    for _ in range(KEPT_STEPS + 5):
        cost.observe(1, seconds(1))
    assert cost.relative(2) == cost.relative(1)  # tried again
    for _ in range(KEPT_STEPS + 5):
        cost.observe(16, seconds(16))
    assert cost.relative(1) == cost.relative(16) / 16 > 0.0
