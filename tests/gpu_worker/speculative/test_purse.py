from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gpu_worker.speculative.purse import MOST_STEPS, SHARE, Purse

SECONDS = st.floats(0.001, 0.1)


@given(st.lists(st.tuples(SECONDS, SECONDS, st.floats(-0.05, 0.05)), min_size=1, max_size=300), st.booleans())
def test_no_more_is_lost_than_a_share_of_the_time_and_what_may_be_owed(
    steps: list[tuple[float, float, float]], is_expected_to_pay: bool
) -> None:
    """Whenever it may be spent, it is."""
    purse, lost_s, wall_s, most_s = Purse(), 0.0, 0.0, 0.0
    for step_s, price_s, gain_s in steps:
        spent_s = price_s if (purse.may_draft if is_expected_to_pay else purse.may_try) else 0.0
        purse.pay(spent_s)
        saved_s = gain_s if spent_s else 0.0
        purse.step(step_s + spent_s, saved_s)
        lost_s, wall_s = lost_s + spent_s - saved_s, wall_s + step_s + spent_s
        most_s = max(most_s, step_s + spent_s)
        owed_s = (MOST_STEPS if is_expected_to_pay else 0) * most_s + 0.15  # the last price, with what it lost
        assert lost_s <= SHARE * wall_s + owed_s


def test_what_pays_goes_on_and_what_is_owed_is_paid_back_first() -> None:
    purse = Purse()
    purse.step(0.01)
    purse.pay(0.3)
    assert purse.may_draft and not purse.may_try
    purse.step(0.01, saved_s=0.31)
    assert purse.may_try and purse.balance_s == 0.0
    purse.pay(1.0)
    assert not purse.may_draft
    purse.step(0.01, saved_s=0.5)
    assert purse.may_draft and purse.balance_s == pytest.approx(-0.4999)
