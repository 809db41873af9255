"""Faults at random, from a seed, under constant load: whatever dies or stops, every answer is the one it always is.

A gateway's own clients may see their connection break; what they have by then is the beginning of that answer.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import time
from collections import Counter

import pytest

from shared.protocol import MemberKind
from tests.e2e.clients import Answer, Connect
from tests.e2e.load import SLOW, mixed
from tests.e2e.stack import NewStack, Stack

log = logging.getLogger(__name__)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

DURATION_S = 45.0
KINDS: list[MemberKind] = ["worker", "worker", "scheduler", "store", "gateway"]
PAUSES_S = (0.3, 1.2, 7.0)  # shorter than any lease, longer than a busy one's, longer than all
FAULTS = {
    signal.SIGKILL: "killed",
    signal.SIGTERM: "told to stop",
    signal.SIGSTOP: "paused",
}


async def one_fault(rng: random.Random, stack: Stack) -> str:
    kind = rng.choice(KINDS)
    process = stack.process(kind, rng.randrange(2))
    if process.popen.poll() is not None:
        return "none: it is dead already"
    fault = rng.choice(list(FAULTS))
    if fault is not signal.SIGSTOP:
        stack.kill(process, fault)
    else:
        async with stack.paused(process):
            await asyncio.sleep(rng.choice(PAUSES_S))
    return f"{process.name} {FAULTS[fault]}"


async def faults_until(end: float, rng: random.Random, stack: Stack) -> list[str]:
    done = []
    while time.monotonic() < end:
        await asyncio.sleep(rng.uniform(0.2, 2.0))
        done.append(await one_fault(rng, stack))
    return done


async def ask_until(
    end: float, stack: Stack, gateway: int, connect: Connect, undisturbed: list[Answer]
) -> Counter[str]:
    """How many requests went well, broke with their gateway, or were refused since nobody was there."""
    seen: Counter[str] = Counter()
    while time.monotonic() < end:
        started_with = stack.process("gateway", gateway)
        if not started_with.port:
            await asyncio.sleep(0.05)  # it does not listen yet
            continue
        client = connect(stack.url_of(gateway), timeout_s=60)
        for answer, same in zip(await client.ask_all(mixed("load")), undisturbed, strict=True):
            seen[verdict(answer, same, gateway_ended=started_with.expected_to_end)] += 1
        await client.close()
        await asyncio.sleep(0.05)
    return seen


def verdict(answer: Answer, same: Answer, gateway_ended: bool) -> str:
    if answer.status in (0, 503) or (gateway_ended and (answer.broken or not answer.done)):
        for index, choice in answer.choices.items():
            assert same.choices[index].text.startswith(choice.text), (choice.text, same.choices[index].text)
        return "refused" if answer.status in (0, 503) else "broken"
    answer.check()
    assert answer.essence() == same.essence()
    return "whole"


@pytest.mark.parametrize("seed", [1, 2])
async def test_every_answer_is_the_one_it_always_is(
    seed: int, new_stack: NewStack, connect: Connect, undisturbed: list[Answer]
) -> None:
    env = SLOW | {"max_strikes": 10, "drain_timeout_s": 5}  # many die here, and none by a request's fault
    async with new_stack(gateways=2, schedulers=2, stores=2, workers=2, env=env) as stack:
        stack.allowed.append("Redis is away")
        async with stack.supervised():
            end = time.monotonic() + DURATION_S
            faults, *seen = await asyncio.gather(
                faults_until(end, random.Random(seed), stack),
                *(ask_until(end, stack, gateway, connect, undisturbed) for gateway in (0, 0, 1, 1)),
            )
        log.info("seed %d: %d faults, answers %s", seed, len(faults), dict(sum(seen, Counter())))
        assert sum(seen, Counter())["whole"] > 100
