"""A worker is lost in any way (killed, stopped, cut off), and its sequences go on elsewhere, token for token."""

from __future__ import annotations

import asyncio
import functools
import signal
import time

import pytest

from tests.chaos.cuts import NOBODY_REQUEUES
from tests.chaos.link import DOWN, UP, Mode
from tests.chaos.play import Play, Run
from tests.helpers import wait_until

AWAY = ("Redis is away",)


async def worker_is_killed(run: Run) -> None:
    load = await run.decoding()
    victim = run.victim("worker", load.running)
    killed_at = run.stack.kill(victim)
    await run.detected(load.on(victim), killed_at)
    await load.judged(killed_at)
    await run.stack.restart(victim)
    await wait_until(run.stack.state.all_leased)


async def worker_is_stopped_and_wakes_up(run: Run) -> None:
    """Its late tokens are nobody's: it finds its life over and comes back as somebody else."""
    load = await run.decoding()
    victim = run.victim("worker", load.running)
    async with run.stack.paused(victim):
        await run.detected(load.on(victim), time.perf_counter())
    await load.judged()
    await wait_until(lambda: victim.incarnation not in run.stack.state.members())
    await wait_until(lambda: len(run.stack.state.alive("worker")) == 2)
    assert "is over" in victim.text()


async def worker_is_cut_off(run: Run, mode: Mode, directions: tuple[str, ...]) -> None:
    load = await run.decoding()
    victim = run.victim("worker", load.running)
    link = run.stack.link(victim)
    cut_at = time.perf_counter()
    async with link.broken(mode, directions):
        await run.detected(load.on(victim), cut_at)
        await asyncio.sleep(0.5)  # it may go on computing, for nobody
    await load.judged(cut_at)
    await wait_until(lambda: victim.incarnation not in run.stack.state.members(), 15)
    await wait_until(lambda: len(run.stack.state.alive("worker")) == 2, 15)
    await (await run.decoding(at_least=1)).judged()


@pytest.mark.slow  # test_killed_worker.py kills one faster
async def test_killed(play: Play) -> None:
    await play.play(worker_is_killed, workers=2)


@pytest.mark.slow
async def test_stopped_and_wakes_up(play: Play) -> None:
    await play.play(worker_is_stopped_and_wakes_up, workers=2)


@pytest.mark.parametrize(
    ("mode", "directions"),
    [
        (Mode.SWALLOW, (UP, DOWN)),
        pytest.param(Mode.SWALLOW, (UP,), marks=pytest.mark.slow),
        pytest.param(Mode.SWALLOW, (DOWN,), marks=pytest.mark.slow),
        pytest.param(Mode.HOLD, (UP, DOWN), marks=pytest.mark.slow),
        pytest.param(Mode.HOLD, (UP,), marks=pytest.mark.slow),
        pytest.param(Mode.HOLD, (DOWN,), marks=pytest.mark.slow),
    ],
)
async def test_cut_off(mode: Mode, directions: tuple[str, ...], play: Play) -> None:
    scenario = functools.partial(worker_is_cut_off, mode=mode, directions=directions)
    await play.play(scenario, workers=2, with_links=True, allowed=AWAY)


async def test_killed_where_nobody_requeues(play: Play) -> None:
    await play.objects(worker_is_killed, "I1", NOBODY_REQUEUES, workers=2)


@pytest.mark.slow
async def test_stopped_where_nobody_requeues(play: Play) -> None:
    await play.objects(worker_is_stopped_and_wakes_up, "I1", NOBODY_REQUEUES, workers=2)


@pytest.mark.slow
async def test_cut_off_where_nobody_requeues(play: Play) -> None:
    scenario = functools.partial(worker_is_cut_off, mode=Mode.SWALLOW, directions=(UP, DOWN))
    await play.objects(scenario, "I1", NOBODY_REQUEUES, workers=2, with_links=True)


async def worker_and_its_last_token(run: Run) -> None:
    """Killed fifty times under load, at any moment; a restart follows each."""
    load = await run.decoding()
    for _ in range(50):
        victim = run.victim("worker", run.stack.state.running() or load.running)
        if victim.popen.poll() is None:
            run.stack.kill(victim, signal.SIGKILL)
            await run.stack.report(victim)
            await run.stack.restart(victim)
        if load.answering.done():
            await load.judged()
            load = await run.decoding()
    await load.judged()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_killed_fifty_times(play: Play) -> None:
    env = {"scripted_step_ms": 20, "scripted_token_ms": 1, "max_strikes": 10}
    await play.play(worker_and_its_last_token, workers=2, env=env, timeout_s=120)
