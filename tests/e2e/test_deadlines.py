"""A request that cannot keep its deadline ends as one error, wherever it is, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.clients import Answer, Connect
from tests.e2e.load import plain, words
from tests.e2e.stack import Stack
from tests.helpers import wait_until

LATE_S = 1.5  # of an end, at most: schedulers look every 0.1 to 0.3 s


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(stacks_redis: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """500 tokens of prompt take a second; one sequence runs, and one more waits at the worker."""
    env = {"scripted_step_ms": 10, "scripted_token_ms": 2, "max_num_seqs": 1, "max_model_len": 3000}
    async with Stack(stacks_redis, tmp_path_factory.mktemp("deadlines"), env=env) as stack:
        yield stack


def check_late(answer: Answer, code: str, *, started_at: float, after_s: float) -> None:
    took_s = time.perf_counter() - started_at
    assert answer.error and answer.error["code"] == code, answer.error
    assert answer.status == (504 if not answer.choices else 200) and not answer.done
    assert after_s <= took_s < after_s + LATE_S, took_s


async def test_what_waits_too_long_never_runs(stack: Stack, connect: Connect) -> None:
    client = connect(stack.url)
    busy = [client.begin(plain(f"busy {i}", 400)) for i in range(2)]
    await wait_until(lambda: len(stack.state.running()) == 2)
    started_at = time.perf_counter()
    late = await client.ask(plain("late", timeout={"queue": 0.5}))
    check_late(late, "queue_timeout", started_at=started_at, after_s=0.5)
    for number, task in enumerate(busy):
        answer = await task
        answer.check()
        assert answer.text == words(f"busy {number}", 400)


async def test_a_stream_ends_at_its_deadline_with_one_error(stack: Stack, connect: Connect) -> None:
    client = connect(stack.url)
    started_at = time.perf_counter()
    late = await client.ask(plain("too long", 2000), headers={"X-Request-Timeout": "1"})
    check_late(late, "timeout", started_at=started_at, after_s=1)
    assert late.choices[0].text and words("too long", 2000).startswith(late.choices[0].text)


async def test_a_prompt_that_cannot_be_computed_in_time_is_not_begun(stack: Stack, connect: Connect) -> None:
    client = connect(stack.url)
    (await client.ask(plain("measured " + "x" * 300, 3))).check()
    in_time = await client.ask(plain("y" * 400, 3, timeout={"first_token": 5}))
    in_time.check()
    started_at = time.perf_counter()
    late = await client.ask(plain("z" * 1000, 3, timeout={"first_token": 1}))
    check_late(late, "deadline_exceeded", started_at=started_at, after_s=0)
    assert time.perf_counter() - started_at < 0.9, "told before the time is over"


async def test_a_deadline_holds_also_when_nobody_reads(stack: Stack, connect: Connect) -> None:
    """The client and its gateway's timers are gone; the scheduler has the deadline from the record."""
    client = connect(stack.url)
    known = {s.sid for s in stack.state.sequences()}
    body = plain("abandoned", 2500, timeout=2)
    asking = asyncio.ensure_future(client.ask(body, headers={"X-Headrace-Resume": "60"}))
    [seq] = await wait_until(lambda: [s for s in stack.state.running() if s.sid not in known and s.num_tokens])
    asking.cancel()

    def outcome() -> str:
        found = stack.state.sequence(seq.sid)
        return found.outcome.code if found and found.outcome else ""

    await wait_until(lambda: outcome() == "timeout", 2 + LATE_S)
