from __future__ import annotations

from typing import Any

import pytest

from services.gpu_worker.failures import EngineDied, EngineHung
from services.gpu_worker.watchdog import HUNG_LOOKS, Watchdog


class Loop:
    """What a watchdog sees of an engine loop."""

    def __init__(self) -> None:
        self.hung: tuple[Any, ...] = ()
        self.num_steps = 0
        self.hang_s = 5.0
        self.failure: EngineDied | None = None


def test_a_step_is_hung_after_several_looks_and_says_whose_it_is() -> None:
    loop = Loop()
    watchdog = Watchdog(loop)  # type: ignore[arg-type]
    watchdog.check()
    assert not watchdog.suspects
    loop.hung = (("r.0", 2),)
    for _ in range(HUNG_LOOKS - 1):
        watchdog.check()
        assert watchdog.suspects
    with pytest.raises(EngineHung) as failed:
        watchdog.check()
    assert failed.value.blamed == {("r.0", 2)}


def test_a_process_that_was_stopped_is_not_hung_if_its_step_ends() -> None:
    loop = Loop()
    watchdog = Watchdog(loop)  # type: ignore[arg-type]
    loop.hung = (("r.0", 2),)
    for _ in range(3 * HUNG_LOOKS):
        watchdog.check()
        loop.num_steps += 1  # another step by the next look
    loop.hung = ()
    watchdog.check()
    assert not watchdog.suspects


def test_a_step_that_stood_still_with_the_whole_process_has_its_time_once_more() -> None:
    loop, now = Loop(), [100.0]
    watchdog = Watchdog(loop, lambda: now[0])  # type: ignore[arg-type]
    watchdog.check()
    now[0] += 60.0  # stopped, in the middle of a step
    loop.hung = (("r.0", 2),)
    while now[0] < 160.0 + loop.hang_s - 0.2:
        watchdog.check()
        assert not watchdog.suspects
        now[0] += 0.1
    with pytest.raises(EngineHung):
        for _ in range(6):
            watchdog.check()
            now[0] += 0.1
    assert now[0] < 160.0 + loop.hang_s + 0.5


def test_looks_that_are_as_far_apart_as_those_of_an_idle_worker_are_no_pause() -> None:
    loop, now = Loop(), [100.0]
    watchdog = Watchdog(loop, lambda: now[0])  # type: ignore[arg-type]
    watchdog.check()
    loop.hung = (("r.0", 2),)
    for _ in range(HUNG_LOOKS - 1):
        now[0] += 2.2
        watchdog.check()
        assert watchdog.suspects
    with pytest.raises(EngineHung):
        watchdog.check()


def test_a_thread_that_has_died_is_noticed() -> None:
    loop = Loop()
    watchdog = Watchdog(loop)  # type: ignore[arg-type]
    watchdog.check_thread()
    loop.failure = EngineDied("it has died")
    for look in (watchdog.check_thread, watchdog.check):
        with pytest.raises(EngineDied):
            look()
