from __future__ import annotations

from services.gpu_worker.step_limit import GOOD_STEPS, NO_LIMIT, StepLimit


def test_half_of_what_did_not_fit_and_never_more_than_before() -> None:
    limit = StepLimit()
    limit.ran_out(512)
    assert limit.num_tokens == 256
    limit.ran_out(600)
    assert limit.num_tokens == 256
    for _ in range(20):
        limit.ran_out(limit.num_tokens)
    assert limit.num_tokens == 1


def test_it_grows_again_after_a_while_without_trouble() -> None:
    limit = StepLimit()
    limit.ran_out(512)
    for _ in range(GOOD_STEPS - 1):
        limit.went_well()
    limit.ran_out(100)
    assert limit.num_tokens == 50
    for _ in range(GOOD_STEPS):
        limit.went_well()
    assert limit.num_tokens == 100
    for _ in range(30 * GOOD_STEPS):
        limit.went_well()
    assert limit.num_tokens == NO_LIMIT
