"""What steps with drafts are said to have saved."""

from __future__ import annotations

import pytest

from services.gpu_worker.batch import Chunk, SampledToken
from services.gpu_worker.speculative.counts import HELD_UP, Savings
from services.gpu_worker.speculative.draft import chain
from services.gpu_worker.speculative.row_cost import RowCost
from services.gpu_worker.speculative.speculator import Speculator
from shared.speculative_config import SpeculativeConfig
from tests.gpu_worker.speculative.test_speculator import make_sequence

STEP_S = 0.01
TOKEN = SampledToken(0)


@pytest.mark.parametrize(("num_sequences", "num_rows"), [(1, 5), (4, 9)])
def test_a_step_that_was_held_up_costs_no_more_than_its_rows_would_one_by_one(
    num_sequences: int, num_rows: int
) -> None:
    """A machine that stood still for a minute is no loss by guesses."""
    savings = Savings(RowCost())
    savings.plain(num_sequences, STEP_S)
    drawn = [(TOKEN,)] * num_sequences
    assert savings.of(num_rows, drawn, 1.5 * STEP_S) == pytest.approx(-0.5 * STEP_S)
    assert savings.of(num_rows, drawn, 60.0) == pytest.approx((1 - HELD_UP * num_rows / num_sequences) * STEP_S)


def test_guessing_goes_on_after_a_step_that_was_held_up() -> None:
    speculator = Speculator(SpeculativeConfig(method="suffix", num_speculative_tokens=16), RowCost())
    text = [7, 8, 9, 10, 11, 12] * 4
    seq = make_sequence(text)
    plain = Chunk(seq, len(text) - 1, 1, True)
    for _ in range(64):
        speculator.observe([plain], [(TOKEN,)], STEP_S)
    guessed = Chunk(seq, len(text) - 1, 1, True, chain((7, 8)))
    speculator.observe([guessed], [(TOKEN,)], 60.0)
    assert speculator.purse.may_draft
    assert speculator.saved_s > -1.0
