"""A gateway is cut off from Redis, or dies where nobody looks after its orphans."""

from __future__ import annotations

import asyncio
import functools
import time

import pytest

from tests.chaos import checker
from tests.chaos.cuts import NOBODY_CANCELS_ORPHANS, NOBODY_READS_THE_LOG
from tests.chaos.link import DOWN, UP, Mode
from tests.chaos.play import Play, Run
from tests.e2e.load import plain
from tests.helpers import wait_until

NUM_SEQUENCES = 22  # of the load, and of the request that showed that the gateway answers
AWAY = ("Redis is away", "is repeated")


async def gateway_is_cut_off(run: Run, mode: Mode, directions: tuple[str, ...], length_s: float) -> None:
    """Its clients see a pause; what they have missed they are given from the log, each token once."""
    load = await run.decoding()
    await wait_until(lambda: len(run.stack.state.sequences()) >= NUM_SEQUENCES)  # all are admitted
    cut_at = time.perf_counter()
    async with run.stack.link(run.stack.process("gateway")).broken(mode, directions):
        await asyncio.sleep(length_s)
    await load.judged(cut_at)


@pytest.mark.parametrize(
    ("mode", "directions", "length_s"),
    [
        (Mode.SWALLOW, (UP, DOWN), 2.0),
        pytest.param(Mode.SWALLOW, (UP, DOWN), 8.0, marks=pytest.mark.slow),  # longer than its lease
        pytest.param(Mode.SWALLOW, (UP,), 2.0, marks=pytest.mark.slow),
        pytest.param(Mode.SWALLOW, (DOWN,), 2.0, marks=pytest.mark.slow),
        pytest.param(Mode.HOLD, (UP, DOWN), 8.0, marks=pytest.mark.slow),
    ],
)
async def test_cut_off(mode: Mode, directions: tuple[str, ...], length_s: float, play: Play) -> None:
    scenario = functools.partial(gateway_is_cut_off, mode=mode, directions=directions, length_s=length_s)
    await play.play(scenario, with_links=True, allowed=AWAY)


@pytest.mark.slow
async def test_cut_off_where_nobody_reads_the_log(play: Play) -> None:
    scenario = functools.partial(gateway_is_cut_off, mode=Mode.SWALLOW, directions=(UP, DOWN), length_s=8.0)
    await play.objects(scenario, "I2|I3|I4", NOBODY_READS_THE_LOG, with_links=True)


async def gateway_is_killed(run: Run) -> None:
    client = run.client()
    lost = client.begin_all([plain(f"long {i}", 1500) for i in range(4)])
    await wait_until(lambda: sum(s.num_tokens > 0 for s in run.stack.state.running()) == 4)
    gateway = run.stack.process("gateway")
    killed_at = run.stack.kill(gateway)
    assert all(a.broken and not a.done for a in await lost)
    await run.stack.report(gateway)
    with checker.invariant("I1"):
        await wait_until(lambda: not run.stack.state.running(), 20)
    run.figures["orphans_end_s"] = time.perf_counter() - killed_at
    await run.stack.restart(gateway)


@pytest.mark.slow
async def test_killed(play: Play) -> None:
    await play.play(gateway_is_killed)


@pytest.mark.slow
async def test_killed_where_nobody_cancels_orphans(play: Play) -> None:
    await play.objects(gateway_is_killed, "I1", NOBODY_CANCELS_ORPHANS)
