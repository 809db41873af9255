from __future__ import annotations

import random

import pytest

from services.gpu_worker.speculative.acceptance import NUM_KINDS, NUM_LEVELS, Acceptance, level_of
from services.gpu_worker.speculative.proposer import KIND


def test_levels_are_in_order_and_bounded() -> None:
    levels = [level_of(strength) for strength in range(KIND)]
    assert levels[:9] == list(range(9)) and levels == sorted(levels) and max(levels) == NUM_LEVELS - 1


def test_strengths_of_each_kind_are_learnt_apart() -> None:
    acceptance = Acceptance()
    for kind in range(NUM_KINDS):
        before = [acceptance.probability(other * KIND + 3) for other in range(NUM_KINDS)]
        for _ in range(20):
            acceptance.observe(kind * KIND + 3, kind % 2 == 0)
        now = [acceptance.probability(other * KIND + 3) for other in range(NUM_KINDS)]
        assert [a == b for a, b in zip(before, now, strict=True)] == [other != kind for other in range(NUM_KINDS)]


def test_longer_matches_are_trusted_more_before_anything_is_known() -> None:
    chances = [Acceptance().probability(strength) for strength in range(40)]
    assert chances == sorted(chances) and chances[0] == 0.0 and 0.9 < chances[-1] < 1.0


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.95])
def test_it_learns_what_it_sees_at_each_strength(chance: float) -> None:
    acceptance, rng = Acceptance(share_kept=0.99), random.Random(3)
    for _ in range(500):
        acceptance.observe(4, rng.random() < chance)
        acceptance.observe(9, rng.random() < 0.3)
    assert acceptance.probability(4) == pytest.approx(chance, abs=0.1)
    assert acceptance.probability(9) == pytest.approx(acceptance.probability(15), abs=0.01)  # of one level
    assert 0.2 < acceptance.probability(9) < 0.45
    assert acceptance.probability(2) == Acceptance().probability(2)


def test_a_sequence_begins_with_what_others_have_shown_and_goes_its_own_way() -> None:
    worker = Acceptance(share_kept=0.99)
    for _ in range(100):
        Acceptance(worker).observe(3, True)
    own = Acceptance(worker)
    assert own.probability(3) > 0.9
    for _ in range(40):
        own.observe(3, False)
    assert own.probability(3) < 0.15


def test_a_draft_survives_with_all_before_it() -> None:
    acceptance = Acceptance()
    chances = [acceptance.probability(s) for s in (2, 3, 4)]
    assert acceptance.survival((2, 3, 4)) == pytest.approx(
        [chances[0], chances[0] * chances[1], chances[0] * chances[1] * chances[2]]
    )
    assert acceptance.survival(()) == []
    assert acceptance.survival((4, 4, 4)) == pytest.approx([chances[2] ** n for n in (1, 2, 3)])
