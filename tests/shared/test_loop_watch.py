"""A loop that is blocked is noticed, and what blocks it is named; an idle one costs nothing."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from shared.loop_watch import LOOK_S, WatchedLoop, lag_s
from shared.metrics import ProcessMetrics


def run(work: Callable[[], Coroutine[Any, Any, None]], stall_s: float = 0.2) -> WatchedLoop:
    loop = WatchedLoop(stall_s)
    try:
        loop.run_until_complete(work())
    finally:
        loop.close()
    return loop


def a_blocking_call(seconds: float) -> None:
    time.sleep(seconds)


def test_what_blocks_the_loop_is_named_once_a_stall(caplog: pytest.LogCaptureFixture) -> None:
    async def block_twice() -> None:
        for _ in range(2):
            a_blocking_call(0.2 + 2.5 * LOOK_S)
            await asyncio.sleep(0)

    with caplog.at_level(logging.WARNING):
        loop = run(block_twice)
    assert loop.num_stalls == 2 and len(caplog.records) == 2
    text = caplog.records[0].getMessage()
    frames = (r"a_blocking_call \(shared/test_loop_watch.py:\d+\)", r"block_twice \(shared/test_loop_watch.py:\d+\)")
    assert re.match(r"the event loop has been blocked for [\d.]+ s by " + " < ".join(frames), text), text


def test_waiting_for_events_is_no_stall(caplog: pytest.LogCaptureFixture) -> None:
    async def wait() -> None:
        await asyncio.sleep(0.2 + 2 * LOOK_S)
        assert lag_s()[0] < 0.2

    assert run(wait).num_stalls == 0 and not caplog.records


def test_the_lag_is_the_longest_turn_since_it_was_asked_for() -> None:
    async def lags() -> None:
        a_blocking_call(0.1)
        await asyncio.sleep(0.01)
        a_blocking_call(0.03)
        await asyncio.sleep(0.01)
        assert 0.1 <= lag_s()[0] < 1
        await asyncio.sleep(0)
        assert lag_s()[0] < 0.1

    assert run(lags).num_stalls == 0


def test_metrics_tell_of_both() -> None:
    registry = CollectorRegistry()

    async def observe() -> None:
        metrics = ProcessMetrics(registry)
        a_blocking_call(0.2 + 2.5 * LOOK_S)
        await asyncio.sleep(0)
        metrics.observe()

    run(observe)
    assert registry.get_sample_value("headrace_event_loop_stalls_total") == 1
    assert (registry.get_sample_value("headrace_event_loop_lag_seconds_sum") or 0) > LOOK_S


def test_metrics_tell_what_python_holds() -> None:
    registry = CollectorRegistry()
    kept: list[object] = []
    seen: list[float] = []

    async def observe() -> None:
        metrics = ProcessMetrics(registry)
        for _ in range(2):
            metrics.observe()
            seen.append(registry.get_sample_value("headrace_python_memory_blocks") or 0)
            kept.extend(object() for _ in range(10_000))

    run(observe)
    assert seen[0] > 0 and seen[1] - seen[0] > 9_000


def test_another_loop_is_not_watched() -> None:
    async def ask() -> tuple[float, int]:
        return lag_s()

    assert asyncio.run(ask()) == (0.0, 0)


IDLE = """
import asyncio, time
from shared.runtime import main
async def idle(stop):
    await asyncio.sleep(0.2)
    before = time.process_time()
    await asyncio.sleep(4)
    print(time.process_time() - before)
    return 0
main(idle)
"""


def test_a_service_that_idles_uses_next_to_nothing_for_it() -> None:
    out = subprocess.run([sys.executable, "-c", IDLE], capture_output=True, text=True, check=True).stdout
    assert float(out) < 0.008, "0.2 % of a core"


BLOCKED = """
import asyncio, logging, time
from shared.runtime import main
logging.basicConfig(level=logging.INFO)
def a_slow_query():
    time.sleep(2)
async def service(stop):
    a_slow_query()
    return 3
raise SystemExit(main(service))
"""


def test_every_service_is_watched() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=False)
    assert done.returncode == 3 and "a_slow_query" in done.stderr, done.stderr
