"""Every service is told to stop and replaced, one after the other, under load: nothing is lost or different."""

from __future__ import annotations

import asyncio
import functools
import random
import signal
import time

import pytest

from shared.protocol import MemberKind
from tests.e2e.balanced import BalancedClient, listening
from tests.e2e.clients import Answer, Connect, check_same, longest_pause_s
from tests.e2e.load import SLOW, USAGE, mixed, plain, words
from tests.e2e.process import Process
from tests.e2e.stack import NewStack, Stack
from tests.figures import note
from tests.helpers import wait_until

DRAIN_S = 1.0  # shorter than most answers take: streams move to the other gateway, sequences to the other worker
MAX_STOP_S = DRAIN_S + 5.0
LONG = 250  # tokens, 5 s
KINDS: list[MemberKind] = ["gateway", "worker", "scheduler", "store"]  # the first while the long answers are young


async def replace(stack: Stack, process: Process) -> float:
    """Told to stop, ended with status 0, and another in its place; how long the stop took."""
    at = stack.kill(process, signal.SIGTERM)
    status = await asyncio.to_thread(process.popen.wait, MAX_STOP_S + 10)
    took_s = time.perf_counter() - at
    assert status == 0, process.text()
    assert took_s < MAX_STOP_S
    successor = await stack.restart(process)
    if process.kind == "gateway":
        await wait_until(lambda: successor.port, 20)
    await wait_until(stack.state.all_leased, 20)
    return took_s


async def ask_until(ended: asyncio.Event, client: BalancedClient, undisturbed: list[Answer]) -> list[Answer]:
    answers: list[Answer] = []
    while not ended.is_set():
        latest = await client.ask_all(mixed("load"))
        check_same(latest, undisturbed)
        answers += latest
    return answers


async def roll(
    stack: Stack, order: list[tuple[MemberKind, int]], connect: Connect, undisturbed: list[Answer], num_loads: int
) -> None:
    client = BalancedClient(connect(stack.url, timeout_s=60), functools.partial(listening, stack))
    ended = asyncio.Event()
    loads = [asyncio.ensure_future(ask_until(ended, client, undisturbed)) for _ in range(num_loads)]
    long = asyncio.ensure_future(client.ask_all([plain(f"long {i}", LONG, **USAGE) for i in range(4)]))
    try:
        await wait_until(lambda: sum(s.num_tokens > 3 for s in stack.state.running()) > 10)
        began = time.perf_counter()
        for kind, index in order:
            took_s = await replace(stack, stack.process(kind, index))
            note(exit_s=took_s)
        ended.set()
        answers = [answer for answers in await asyncio.gather(*loads) for answer in answers]
        await asyncio.wait([long])  # it may outlast the restarts
    finally:
        ended.set()
        for task in (*loads, long):
            task.cancel()
        results = await asyncio.gather(*loads, long, return_exceptions=True)
    for i, answer in enumerate(results[-1]):  # type: ignore[arg-type]
        answer.check()
        assert answer.text == words(f"long {i}", LONG)
    note(pause_s=longest_pause_s(answers, began))
    assert all(s.strikes == 0 for s in stack.state.sequences()), "a worker that is told to stop kills nobody"
    assert client.num_resumed > 0 or all(kind != "gateway" for kind, _ in order)


async def test_one_of_each_is_replaced(new_stack: NewStack, connect: Connect, undisturbed: list[Answer]) -> None:
    env = SLOW | {"drain_timeout_s": DRAIN_S}
    async with new_stack(gateways=2, schedulers=2, stores=2, workers=2, env=env) as stack:
        await roll(stack, [(kind, 0) for kind in KINDS], connect, undisturbed, num_loads=2)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_all_are_replaced_in_any_order(
    seed: int, new_stack: NewStack, connect: Connect, undisturbed: list[Answer]
) -> None:
    env = SLOW | {"drain_timeout_s": DRAIN_S}
    order = [(kind, index) for kind in KINDS for index in range(2)]
    random.Random(seed).shuffle(order)
    async with new_stack(gateways=2, schedulers=2, stores=2, workers=2, env=env) as stack:
        await roll(stack, order, connect, undisturbed, num_loads=2)
