"""Redis restarts, hangs up, stands still, or forgets its scripts: all wait, and go on where they were.

What one does that comes back empty, or is full: `test_killed_redis.py`, `tests/e2e/test_full_redis.py`.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import redis

from tests.chaos import checker
from tests.chaos.cuts import ADMISSION_IS_NOT_REPEATED, NO_SCRIPT_IS_RELOADED, NOBODY_RECONNECTS
from tests.chaos.play import Play, Run
from tests.e2e.load import plain

AWAY = ("Redis is away",)
OWN: dict[str, Any] = {"own_redis": True, "workers": 2, "gateways": 2}


def command(run: Run, *words: Any) -> Any:
    assert run.server
    with redis.Redis.from_url(run.server.url) as client:
        return client.execute_command(*words)


async def redis_is_killed(run: Run) -> None:
    assert run.server
    load = await run.decoding()
    killed_at = time.perf_counter()
    run.server.kill()
    late = run.client(1).begin(plain("sent while it is away"))
    await asyncio.sleep(0.5)
    await asyncio.to_thread(run.server.start)
    await load.judged(killed_at)
    with checker.invariant("I2"):
        (await late).check()


async def clients_are_dropped(run: Run) -> None:
    """All connections at once, three times, in whatever they are waiting for."""
    load = await run.decoding()
    started = time.perf_counter()
    for _ in range(3):
        command(run, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await asyncio.sleep(0.3)
    await load.judged(started)


async def redis_stands_still(run: Run) -> None:
    """For longer than a busy worker's lease: nobody is to blame, and nothing runs twice."""
    load = await run.decoding()
    started = time.perf_counter()
    command(run, "CLIENT", "PAUSE", 1500)
    await load.judged(started)


async def scripts_are_forgotten(run: Run) -> None:
    load = await run.decoding()
    for _ in range(5):
        command(run, "SCRIPT", "FLUSH")
        await asyncio.sleep(0.2)
    await load.judged()


@pytest.mark.slow
async def test_killed(play: Play) -> None:
    await play.play(redis_is_killed, allowed=AWAY, **OWN)


async def test_killed_where_nobody_reconnects(play: Play) -> None:
    await play.objects(redis_is_killed, "I2", NOBODY_RECONNECTS, **OWN)


@pytest.mark.slow
async def test_killed_where_an_admission_is_not_repeated(play: Play) -> None:
    await play.objects(redis_is_killed, "I2", ADMISSION_IS_NOT_REPEATED, **OWN)


async def test_all_connections_are_dropped(play: Play) -> None:
    await play.play(clients_are_dropped, allowed=AWAY, **OWN)


@pytest.mark.slow
async def test_all_connections_are_dropped_where_nobody_reconnects(play: Play) -> None:
    await play.objects(clients_are_dropped, "I2", NOBODY_RECONNECTS, **OWN)


@pytest.mark.slow
async def test_it_stands_still(play: Play) -> None:
    await play.play(redis_stands_still, allowed=AWAY, **OWN)


@pytest.mark.slow
async def test_scripts_are_forgotten(play: Play) -> None:
    await play.play(scripts_are_forgotten, **OWN)


@pytest.mark.slow
async def test_scripts_are_forgotten_where_none_is_reloaded(play: Play) -> None:
    await play.objects(scripts_are_forgotten, "I2", NO_SCRIPT_IS_RELOADED, **OWN)
