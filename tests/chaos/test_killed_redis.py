"""Redis is killed in mid-stream and comes back with its append-only file: what was accepted ends as it would have."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.clients import Answer, Connect, check_same, longest_pause_s
from tests.e2e.load import SLOW, USAGE, mixed, plain, words
from tests.e2e.own_redis import OwnRedis
from tests.e2e.stack import NewStack, Stack
from tests.figures import note
from tests.helpers import wait_until


@pytest.mark.parametrize("away_s", [0.0, 2.0])
async def test_everybody_waits_and_goes_on(
    away_s: float, new_stack: NewStack, connect: Connect, undisturbed: list[Answer], tmp_path: Path
) -> None:
    with OwnRedis(tmp_path / "redis") as server:
        async with new_stack(redis_url=server.url, workers=2, gateways=2, env=SLOW) as stack:
            answering = connect(stack.url_of(0)).begin_all(mixed("load"))
            long = connect(stack.url_of(1)).begin_all([plain(f"long {i}", 120, **USAGE) for i in range(4)])
            await wait_until(lambda: sum(s.num_tokens > 3 for s in stack.state.running()) > 15)
            server.kill()
            late = connect(stack.url_of(1)).begin(plain("sent while it is away"))
            await asyncio.sleep(away_s)
            server.start()
            answers = await answering
            check_same(answers, undisturbed)
            for i, answer in enumerate(await long):
                answer.check()
                assert answer.text == words(f"long {i}", 120)
            pause = longest_pause_s([*answers, *await long])
            note(**{f"away_{away_s:g}_s_pause_s": pause})
            answer = await late
            answer.check()
            assert answer.text == words("sent while it is away", 48)
            check_logs_agree(stack)


def check_logs_agree(stack: Stack) -> None:
    """The durable logs have no gap and no more than was counted."""
    for sequence in stack.state.sequences():
        assert len(stack.state.log(sequence.sid)) == sequence.num_tokens


async def test_a_redis_that_comes_back_empty_ends_what_it_has_forgotten(
    new_stack: NewStack, connect: Connect, tmp_path: Path
) -> None:
    """Nothing can be done for what was accepted, but clients are told, and the stack goes on by itself."""
    with OwnRedis(tmp_path / "redis") as server:
        async with new_stack(redis_url=server.url, env=SLOW) as stack:
            client = connect(stack.url)
            lost = client.begin_all([plain(f"lost {i}", 500) for i in range(3)])
            await wait_until(lambda: sum(s.num_tokens > 3 for s in stack.state.running()) == 3)
            server.kill()
            for path in (tmp_path / "redis").glob("appendonlydir/*"):
                path.unlink()
            server.start()
            began = time.perf_counter()
            answers = await lost
            note(told_s=time.perf_counter() - began)
            for answer in answers:
                assert answer.error is not None and answer.error["code"] == "request_lost", answer
            await wait_until(lambda: len(stack.state.members()) == 4 and stack.state.all_leased(), 20)
            answer = await client.ask(plain("afterwards", 20))
            answer.check()
            assert answer.text == words("afterwards", 20)


async def test_every_service_stops_also_while_redis_is_away(new_stack: NewStack, tmp_path: Path) -> None:
    with OwnRedis(tmp_path / "redis") as server:
        stack = new_stack(redis_url=server.url, env=SLOW)
        await stack.__aenter__()
        try:
            server.kill()
            for process in stack.processes():
                stack.kill(process, signal.SIGTERM)
            await wait_until(lambda: all(p.popen.poll() is not None for p in stack.processes()))
            assert {p.name: p.popen.returncode for p in stack.processes()} == dict.fromkeys(
                ("store-0", "worker-0", "scheduler-0", "gateway-0"), 0
            )
            stack.check_logs()
        finally:
            stack.kill_all()


async def test_a_service_waits_for_a_redis_that_is_late_and_can_be_stopped_meanwhile(
    new_stack: NewStack, connect: Connect, tmp_path: Path
) -> None:
    server = OwnRedis(tmp_path / "redis")
    stack = new_stack(redis_url=server.url, env=SLOW)
    starting = asyncio.ensure_future(stack.__aenter__())
    try:
        await wait_until(lambda: all("Redis" in p.text() for p in stack.lives) and len(stack.lives) == 4)
        for process in stack.processes("gateway"):
            stack.kill(process, signal.SIGTERM)
            await wait_until(lambda process=process: process.popen.poll() is not None, timeout=3)
            assert process.popen.returncode == 0, process.text()
            await stack.restart(process, wait=False)
        with server:
            await starting
            answer = await connect(stack.url).ask(plain("late", 5))
            answer.check()
            stack.check_logs()
            stack.kill_all()
    finally:
        stack.kill_all()
