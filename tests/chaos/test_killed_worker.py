"""A worker dies in mid-stream, and no client notices more than a pause: the same tokens, each once."""

from __future__ import annotations

import asyncio
import functools
import signal
import time

from tests.e2e.clients import Answer, Client, Connect, check_same, longest_pause_s
from tests.e2e.load import NUM_TOKENS, SLOW, USAGE, chat, mixed, plain, words
from tests.e2e.process import Process
from tests.e2e.stack import NewStack, Stack
from tests.e2e.state import Sequence
from tests.figures import note
from tests.helpers import wait_until


def worker_of(stack: Stack, answers: list[Sequence]) -> Process:
    """The one that runs most of them."""
    places = [s.worker for s in answers]
    return stack.by_incarnation(max(places, key=places.count))


async def seconds_until_moved(stack: Stack, lost: list[Sequence], since: float) -> float:
    """Until one of the lost sequences has another place."""

    def moved() -> bool:
        now = [stack.state.sequence(s.sid) for s in lost]
        return any(n is not None and n.epoch > s.epoch for n, s in zip(now, lost, strict=True))

    await wait_until(moved, every=0.005)
    return time.perf_counter() - since


async def is_unready(client: Client) -> bool:
    status, _ = await client.get("/health/ready")
    return status == 503


async def kill_at(position: int, stack: Stack, client: Client, undisturbed: list[Answer]) -> None:
    """Kills the worker of a stream when its client has that many tokens, under a load of 16 other requests."""
    name = f"watched to {position}"
    reached = asyncio.Event()

    def watch(answer: Answer) -> None:
        if answer.position >= position:
            reached.set()

    others = client.begin_all(mixed("load"))
    await wait_until(lambda: len(stack.state.running()) > 10)
    watched = client.begin(plain(name, **USAGE), watch)
    if position:
        await asyncio.wait_for(reached.wait(), 30)
    running = stack.state.running()
    victim = worker_of(stack, [s for s in running if s.num_tokens >= position] or running)
    killed_at = stack.kill(victim)
    await asyncio.to_thread(victim.popen.wait, 10)
    lost = [s for s in stack.state.running() if s.worker == victim.incarnation]  # not who has ended just before
    detected_s = await seconds_until_moved(stack, lost, killed_at) if lost else 0.0
    answers = [await watched, *await others]
    pause_s = longest_pause_s(answers, killed_at)
    note(**({"detected_s": detected_s} if lost else {}), pause_s=pause_s)
    assert answers[0].text == words(name, NUM_TOKENS)
    check_same(answers[1:], undisturbed)
    await stack.restart(victim)
    await wait_until(stack.state.all_leased)


async def test_streams_go_on_with_the_same_tokens(
    new_stack: NewStack, connect: Connect, undisturbed: list[Answer]
) -> None:
    async with new_stack(workers=2, env=SLOW) as stack:
        client = connect(stack.url)
        for position in (0, 1, 7, NUM_TOKENS - 1):
            await kill_at(position, stack, client, undisturbed)


async def test_a_worker_that_was_stopped_for_longer_than_its_lease_is_not_believed(
    new_stack: NewStack, connect: Connect, undisturbed: list[Answer]
) -> None:
    async with new_stack(workers=2, env=SLOW) as stack:
        client = connect(stack.url)
        answering = client.begin_all(mixed("load"))
        await wait_until(lambda: sum(s.num_tokens > 3 for s in stack.state.running()) > 10)
        running = stack.state.running()
        victim = worker_of(stack, running)
        lost = [s for s in running if s.worker == victim.incarnation]
        async with stack.paused(victim):
            await wait_until(
                lambda: not stack.state.redis.exists(stack.state.key(f"lease:worker:{victim.incarnation}"))
            )
            await seconds_until_moved(stack, lost, 0.0)
        check_same(await answering, undisturbed)
        await wait_until(lambda: len(stack.state.alive("worker")) == 2)
        assert victim.incarnation not in stack.state.members(), "it must come back as somebody else"
        assert "is over" in victim.text()
        check_same(await client.ask_all(mixed("load")), undisturbed)


async def test_with_no_worker_left_streams_wait_for_the_next_one(
    new_stack: NewStack, connect: Connect, undisturbed: list[Answer]
) -> None:
    async with new_stack(env=SLOW) as stack:
        client = connect(stack.url)
        (await client.ask(chat("starts the process of the template, so that no chat comes late"))).check()
        load = mixed("load")
        num_requests = len(load) + len(stack.state.keys("r:*"))
        answering = client.begin_all(load)
        await wait_until(lambda: len(stack.state.running()) > 10 and len(stack.state.keys("r:*")) == num_requests)
        worker = stack.process("worker")
        stack.kill(worker)
        await stack.report(worker)
        await wait_until(functools.partial(is_unready, client))
        refused = await client.ask(plain("who answers?"))
        assert refused.status == 503 and refused.error and refused.error["code"] == "no_worker", refused
        assert int(refused.headers["Retry-After"]) >= 1
        await stack.restart(worker)
        check_same(await answering, undisturbed)


async def test_a_worker_that_is_told_to_stop_hands_its_sequences_over(
    new_stack: NewStack, connect: Connect, undisturbed: list[Answer]
) -> None:
    async with new_stack(workers=2, env=SLOW) as stack:
        client = connect(stack.url)
        answering = client.begin_all(mixed("load"))
        await wait_until(lambda: sum(s.num_tokens > 3 for s in stack.state.running()) > 10)
        leaving = stack.process("worker", 1)
        at = stack.kill(leaving, signal.SIGTERM)
        assert await asyncio.to_thread(leaving.popen.wait, 10) == 0
        answers = await answering
        check_same(answers, undisturbed)
        pause = longest_pause_s(answers, at)
        note(pause_s=pause)
        assert all(s.strikes == 0 for s in stack.state.sequences())
        await stack.restart(leaving)
