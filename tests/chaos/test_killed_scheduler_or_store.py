"""A scheduler or a store dies or is stopped: tokens keep coming in blocks that are granted, and another goes on."""

from __future__ import annotations

import asyncio
import time

import pytest

from shared.protocol import MemberKind
from tests.e2e.clients import Answer, Client, Connect, check_same, longest_pause_s
from tests.e2e.load import NUM_TOKENS, SLOW, USAGE, mixed, plain, words
from tests.e2e.stack import NewStack, Stack
from tests.e2e.state import Sequence
from tests.figures import note
from tests.helpers import wait_until

LONG = 250  # tokens: more than are granted ahead
LEASES: dict[MemberKind, str] = {"scheduler": "run", "store": "pool"}


async def all_decoding(stack: Stack, client: Client) -> tuple[asyncio.Future[list[Answer]], list[Sequence]]:
    """The load, sent, and its sequences once all that are streamed have tokens and nothing waits."""
    answering = client.begin_all(mixed("load"))

    def decoding() -> bool:
        running = stack.state.running()
        return len(running) > 10 and not stack.state.num_queued() and all(s.num_tokens > 0 for s in running)

    await wait_until(decoding)
    return answering, stack.state.running()


def all_went_on(stack: Stack, running: list[Sequence], num_tokens: int) -> bool:
    """Has each of them so many tokens more than then, or ended?"""
    now = [stack.state.sequence(s.sid) for s in running]
    return all(
        n and (n.state == "done" or n.num_tokens >= s.num_tokens + num_tokens)
        for s, n in zip(running, now, strict=True)
    )


def places_of(sequences: list[Sequence]) -> list[tuple[str, int]]:
    return [(s.sid, s.epoch) for s in sequences]


def places(stack: Stack, sequences: list[Sequence]) -> list[tuple[str, int]]:
    """Where they are now; another epoch would mean that their tokens were computed again."""
    return places_of([now for s in sequences if (now := stack.state.sequence(s.sid))])


@pytest.mark.parametrize("kind", ["scheduler", "store"])
async def test_killed_and_restarted(
    kind: MemberKind, new_stack: NewStack, connect: Connect, undisturbed: list[Answer]
) -> None:
    """Streams that run go on without it; what comes meanwhile waits, and is served by the next one."""
    async with new_stack(workers=2, env=SLOW) as stack:
        client = connect(stack.url)
        answering, running = await all_decoding(stack, client)
        victim = stack.process(kind)
        killed_at = stack.kill(victim)
        late = client.begin(plain("who comes late", **USAGE))
        await wait_until(lambda: all_went_on(stack, running, 10))
        assert not late.done()
        await stack.report(victim)
        await stack.restart(victim)
        answers = await answering
        pause = longest_pause_s(answers, killed_at)
        note(restarted_pause_s=pause)
        check_same(answers, undisturbed)
        served = await late
        served.check()
        assert served.text == words("who comes late", NUM_TOKENS)
        assert places(stack, running) == places_of(running), "something was run twice"


@pytest.mark.parametrize("kind", ["scheduler", "store"])
async def test_another_one_takes_over(
    kind: MemberKind, new_stack: NewStack, connect: Connect, undisturbed: list[Answer]
) -> None:
    """Killed without a word, under streams that are longer than their grants: they wait for its successor, and all
    finish on the workers that they are on."""
    async with new_stack(workers=2, schedulers=2, stores=2, env=SLOW) as stack:
        client = connect(stack.url)
        long = client.begin_all([plain(f"long {i}", LONG, **USAGE) for i in range(4)])
        answering, running = await all_decoding(stack, client)
        owner = stack.state.owner(LEASES[kind], running[0].worker)
        killed_at = stack.kill(stack.by_incarnation(owner))
        worker, lease = running[0].worker, LEASES[kind]
        await wait_until(lambda: stack.state.owner(lease, worker) not in ("", owner), 20)
        detected_s = time.perf_counter() - killed_at
        answers = await answering
        check_same(answers, undisturbed)
        note(detected_s=detected_s, pause_s=longest_pause_s([*answers, *await long], killed_at))
        for i, answer in enumerate(await long):
            answer.check()
            assert answer.text == words(f"long {i}", LONG)
        assert places(stack, running) == places_of(running), "something was run twice"
        await wait_until(stack.state.all_leased)


@pytest.mark.parametrize("kind", ["scheduler", "store"])
async def test_stopped_until_another_has_taken_over(
    kind: MemberKind, new_stack: NewStack, connect: Connect, undisturbed: list[Answer]
) -> None:
    """What it still believes when it goes on does no harm: nothing is lost, and nothing is run twice."""
    async with new_stack(workers=2, schedulers=2, stores=2, env=SLOW) as stack:
        client = connect(stack.url)
        long = client.begin_all([plain(f"long {i}", LONG, **USAGE) for i in range(4)])
        answering, running = await all_decoding(stack, client)
        worker = running[0].worker
        stopped = stack.by_incarnation(stack.state.owner(LEASES[kind], worker))
        stopped_at = time.perf_counter()
        async with stack.paused(stopped):
            meanwhile = client.begin_all([plain(f"meanwhile {i}") for i in range(8)])
            await wait_until(lambda: stack.state.owner(LEASES[kind], worker) not in ("", stopped.incarnation), 20)
            detected_s = time.perf_counter() - stopped_at
            check_same(await answering, undisturbed)
        again = await client.ask_all(mixed("load"))
        check_same(again, undisturbed)
        note(detected_s=detected_s, pause_s=longest_pause_s([*await long, *await meanwhile], stopped_at))
        for name, num_tokens, answers in (("long", LONG, await long), ("meanwhile", NUM_TOKENS, await meanwhile)):
            for i, answer in enumerate(answers):
                answer.check()
                assert answer.text == words(f"{name} {i}", num_tokens)
        assert places(stack, running) == places_of(running), "something was run twice"
        await wait_until(lambda: len(stack.state.alive(kind)) == 2)
        assert stopped.incarnation not in stack.state.members(), "it must come back as somebody else"
