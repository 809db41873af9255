from __future__ import annotations

import pytest

from services.gpu_worker.pacing import Pacer


def test_nothing_to_say_is_never_due() -> None:
    assert Pacer(0.01).due_in(5.0, pending=False, running=False) is None


def test_tokens_go_every_interval_and_a_silent_running_set_every_tenth() -> None:
    pacer = Pacer(0.01)
    assert pacer.due_in(5.0, pending=True, running=True) < 0  # type: ignore[operator]
    pacer.flushed(5.0, 1, everything=True)
    assert pacer.due_in(5.004, pending=True, running=True) == pytest.approx(0.006)
    assert pacer.due_in(5.004, pending=False, running=True) == pytest.approx(0.096)


def test_a_flush_that_left_something_behind_is_followed_at_once() -> None:
    pacer = Pacer(0.01)
    pacer.flushed(5.0, 1, everything=True)
    pacer.flushed(6.0, 1, everything=False)
    assert pacer.due_in(6.0, pending=True, running=True) < 0  # type: ignore[operator]


def test_large_commits_stretch_the_interval_to_a_tenth_of_a_core() -> None:
    pacer = Pacer(0.01)
    pacer.flushed(0.0, 32, everything=True)
    assert pacer.interval_s == 0.01
    pacer.flushed(1.0, 256, everything=True)
    assert pacer.interval_s == pytest.approx(0.043, abs=0.001)
    pacer.flushed(2.0, 1, everything=False)  # an urgent one, of one sequence
    assert pacer.interval_s == pytest.approx(0.043, abs=0.001)
    pacer.flushed(3.0, 1, everything=True)
    assert pacer.interval_s == 0.01


def test_the_interval_has_bounds() -> None:
    pacer = Pacer(0.01)
    pacer.flushed(0.0, 100_000, everything=True)
    assert pacer.interval_s == 0.1
    assert Pacer(0.5).interval_s == 0.5
