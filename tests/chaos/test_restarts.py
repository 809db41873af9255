"""Everything is killed at once and started again, with clients that do not come back.

With clients that do, and for ordered restarts: `tests/e2e/test_restarted_all.py`, `test_rolling_restart.py`.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.chaos import checker
from tests.chaos.cuts import NOBODY_CANCELS_ORPHANS
from tests.chaos.play import Play, Run
from tests.e2e.load import mixed, plain
from tests.helpers import wait_until


async def power_is_cut(run: Run) -> None:
    """Redis too. What was accepted has lost its clients, and does not run for nobody; nothing stale is trusted."""
    assert run.server
    load = await run.decoding()
    long = run.client().begin_all([plain(f"long {i}", 3500) for i in range(3)])
    await wait_until(lambda: len(run.stack.state.running()) > 12)
    for process in run.stack.processes():
        run.stack.kill(process)
    run.server.kill()
    for answer in [*await load.answering, *await long]:
        assert answer.broken or answer.done, answer
    await asyncio.to_thread(run.server.start)
    started = time.perf_counter()
    for process in run.stack.processes():
        await run.stack.restart(process, wait=False)
    await run.stack.ready()
    run.figures["serves_again_s"] = time.perf_counter() - started
    checker.judge_all(await run.client().ask_all(mixed("load")), run.undisturbed)
    with checker.invariant("I1"):
        await wait_until(lambda: not run.stack.state.running() and not run.stack.state.num_queued(), 30)
    run.figures["orphans_end_s"] = time.perf_counter() - started


@pytest.mark.slow  # test_restarted_all.py does it faster
async def test_everything_at_once(play: Play) -> None:
    await play.play(power_is_cut, own_redis=True, workers=2)


@pytest.mark.slow
@pytest.mark.timeout(90)
async def test_everything_at_once_where_nobody_cancels_orphans(play: Play) -> None:
    await play.objects(power_is_cut, "I1", NOBODY_CANCELS_ORPHANS, own_redis=True, workers=2)
