"""Queue entries that are delivered twice are done once."""

from __future__ import annotations

import asyncio

import pytest

from shared.scripts import SCHEDULER_GROUP
from tests.chaos import checker
from tests.chaos.play import Play, Run
from tests.e2e.load import mixed


async def entries_come_twice(run: Run) -> None:
    """Each queue entry is written again as it is, and claimed by a stranger who never works on it."""
    state = run.stack.state
    requests = state.key("requests")
    answering = run.client().begin_all(mixed("load") * 2)
    copied: set[bytes] = set()
    while not answering.done():
        for entry_id, fields in state.redis.xrange(requests):
            if entry_id not in copied and fields.get(b"sid"):
                copied.add(state.redis.xadd(requests, fields))
                copied.add(entry_id)
        state.redis.xautoclaim(requests, SCHEDULER_GROUP, "stranger", 0, "0-0")
        await asyncio.sleep(0.005)
    checker.judge_all(await answering, run.undisturbed * 2)
    run.figures["copies"] = len(copied) / 2
    assert copied
    state.redis.xgroup_delconsumer(requests, SCHEDULER_GROUP, "stranger")
    for entry_id in copied:  # what nobody could place, since its sequence was placed by its original
        state.redis.xack(requests, SCHEDULER_GROUP, entry_id)
        state.redis.xdel(requests, entry_id)


@pytest.mark.slow
async def test_queue_entries_come_twice(play: Play) -> None:
    await play.play(entries_come_twice, workers=2, schedulers=2, env={"scripted_step_ms": 10, "max_num_seqs": 8})
