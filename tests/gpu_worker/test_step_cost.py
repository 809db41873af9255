from __future__ import annotations

import pytest

from services.gpu_worker.step_cost import FIRST_HANG_S, MIN_PREFILL_TOKENS, UNKNOWN_PREFILL_TOKENS, StepCost


def test_before_anything_is_measured_a_little_prefill_fits() -> None:
    cost = StepCost()
    assert cost.max_prefill_tokens(0.1) == UNKNOWN_PREFILL_TOKENS and cost.hang_s(512) == FIRST_HANG_S


def test_prefill_gets_what_decoding_leaves_of_the_time() -> None:
    cost = StepCost()
    for _ in range(100):
        cost.observe(num_decoding=4, num_prefill_tokens=0, num_drawn=4, seconds=0.02)
        cost.observe(num_decoding=4, num_prefill_tokens=100, num_drawn=4, seconds=0.12)
    assert cost.max_prefill_tokens(0.1) == pytest.approx(80, abs=1)
    assert cost.max_prefill_tokens(0.001) == MIN_PREFILL_TOKENS


def test_a_prefill_without_decoding_costs_what_it_takes() -> None:
    cost = StepCost()
    cost.observe(num_decoding=1, num_prefill_tokens=0, num_drawn=1, seconds=0.05)
    cost.observe(num_decoding=0, num_prefill_tokens=100, num_drawn=1, seconds=0.1)
    assert cost.token_s == pytest.approx(0.001)


def test_speed_is_of_drawn_tokens_and_forgets() -> None:
    cost = StepCost()
    assert cost.tokens_per_second == 0.0
    for _ in range(500):
        cost.observe(num_decoding=4, num_prefill_tokens=0, num_drawn=4, seconds=1.0)
    for _ in range(500):
        cost.observe(num_decoding=4, num_prefill_tokens=0, num_drawn=4, seconds=0.01)
    assert cost.tokens_per_second == pytest.approx(400, rel=0.01)


def test_a_hang_is_far_beyond_what_a_step_should_take() -> None:
    cost = StepCost()
    cost.observe(num_decoding=0, num_prefill_tokens=100, num_drawn=0, seconds=1.0)
    assert cost.hang_s(1000) == pytest.approx(50.0) and cost.hang_s(1) == 5.0


def test_on_a_busy_machine_a_step_may_take_as_long_as_others_did() -> None:
    cost = StepCost()
    for seconds in (0.1, 4.0, 0.1, 0.1):
        cost.observe(num_decoding=1, num_prefill_tokens=0, num_drawn=1, seconds=seconds)
    assert cost.hang_s(0) > 15.0
    for _ in range(500):
        cost.observe(num_decoding=1, num_prefill_tokens=0, num_drawn=1, seconds=0.1)
    assert cost.hang_s(0) == 5.0


def test_newcomers_get_half_a_step_where_decoding_alone_takes_longer() -> None:
    cost = StepCost()
    cost.observe(0, 100, 1, 0.1)  # a millisecond a prefill token
    cost.observe(32, 0, 32, 0.5)
    assert cost.max_prefill_tokens(0.1) == 50
