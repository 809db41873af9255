"""A stack that nobody uses costs nothing, and ends at once when it is told to."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.clients import Connect
from tests.e2e.load import mixed
from tests.e2e.own_redis import OwnRedis
from tests.e2e.stack import NewStack
from tests.helpers import wait_until

log = logging.getLogger(__name__)

MEASURE_S = 20.0
MAX_SHARE = 0.01  # of a core, for all services together
STOP_S = 2.0


@pytest.mark.slow
async def test_an_idle_stack_uses_less_than_a_hundredth_of_a_core(
    new_stack: NewStack, connect: Connect, tmp_path: Path
) -> None:
    with OwnRedis(tmp_path / "redis") as server:
        async with new_stack(redis_url=server.url) as stack:
            await connect(stack.url).ask_all(mixed("idle"))
            await stack.check_at_rest()
            await asyncio.sleep(3)  # the last metrics of the load
            redis = psutil.Process(server.pid)
            before = {p.name: p.cpu_s() for p in stack.processes()} | {"redis": sum(redis.cpu_times()[:2])}
            started = time.perf_counter()
            await asyncio.sleep(MEASURE_S)
            seconds = time.perf_counter() - started
            after = {p.name: p.cpu_s() for p in stack.processes()} | {"redis": sum(redis.cpu_times()[:2])}
            shares = {name: (after[name] - before[name]) / seconds for name in before}
            log.info("idle: %s", ", ".join(f"{name} {100 * share:.2f} %" for name, share in shares.items()))
            assert sum(shares.values()) < MAX_SHARE


async def test_every_service_stops_at_once_when_idle(new_stack: NewStack) -> None:
    """All at the same time, as a container platform does it, each in whatever it was waiting for."""
    async with new_stack(schedulers=2, stores=2) as stack:
        started = time.perf_counter()
        for process in stack.processes():
            stack.kill(process, signal.SIGTERM)
        took: dict[str, float] = {}

        def all_ended() -> bool:
            for process in stack.processes():
                if process.popen.poll() is not None:
                    took.setdefault(process.name, time.perf_counter() - started)
            return len(took) == len(stack.processes())

        await wait_until(all_ended)
        log.info("stopped after %s", ", ".join(f"{name} {s:.2f} s" for name, s in took.items()))
        assert {p.popen.returncode for p in stack.processes()} == {0}
        assert max(took.values()) < STOP_S
        assert stack.state.members() == {}
