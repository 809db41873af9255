"""The arithmetic of a card's memory, with made-up numbers."""

from __future__ import annotations

import pytest

from services.gpu_worker.gpu_memory import GIB, Budget
from services.gpu_worker.model.config import ConfigError

BLOCK = 1 << 20


def blocks(budget: Budget, taken: float = 15.0, step: float = 2.0, most_useful: int = 1 << 30) -> int:
    return budget.num_blocks(taken=int(taken * GIB), step=int(step * GIB), block_bytes=BLOCK, most_useful=most_useful)


def test_the_pool_is_what_is_left_of_the_share() -> None:
    budget = Budget(total=80 * GIB, free=79 * GIB, share=0.9)
    assert blocks(budget) == (int(80 * GIB * 0.9) - 17 * GIB) // BLOCK and budget.shortened == ""
    assert blocks(budget, most_useful=100) == 100


def test_what_others_have_makes_the_pool_smaller_and_is_told() -> None:
    budget = Budget(total=80 * GIB, free=40 * GIB, share=0.9)
    assert blocks(budget) == int(20.5 * GIB) // BLOCK
    assert budget.shortened == (
        "gpu_memory_utilization: 0.9 of the card's 80.0 GiB is 72.0 GiB, and others have left 40.0 GiB, "
        "of which 2.5 GiB stay free: the KV pool is smaller"
    )


def test_a_whole_card_is_not_taken_to_the_last_byte() -> None:
    assert Budget(total=80 * GIB, free=79 * GIB, share=1.0).usable == int(76.5 * GIB)
    assert Budget(total=8 * GIB, free=8 * GIB, share=1.0).usable == int(7.5 * GIB)


def test_too_little_is_an_error_with_the_numbers() -> None:
    budget = Budget(total=24 * GIB, free=23 * GIB, share=0.5)
    with pytest.raises(ConfigError) as caught:
        blocks(budget, taken=11.0, step=1.5)
    assert str(caught.value).startswith(
        "gpu_memory_utilization: 0.5 of the card's 24.0 GiB is 12.0 GiB; weights take 11.0 GiB and a step up to 1.5 GiB"
    )
    assert blocks(budget, taken=10.0, step=1.5) == GIB // 2 // BLOCK


def test_weights_that_do_not_fit_are_refused_before_they_are_read() -> None:
    Budget(total=24 * GIB, free=23 * GIB, share=0.9).check_weights(21 * GIB)
    with pytest.raises(
        ConfigError, match=r"others have left 5\.0 GiB, of which 0\.8 GiB stay free; the weights alone take 16\.0 GiB"
    ):
        Budget(total=24 * GIB, free=5 * GIB, share=0.9).check_weights(16 * GIB)
