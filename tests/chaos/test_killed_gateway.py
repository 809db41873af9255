"""A gateway dies: its own clients see a broken connection, others notice nothing, and nothing runs on for nobody."""

from __future__ import annotations

import asyncio
import signal
import time

from tests.e2e.clients import Answer, Connect, check_same, longest_pause_s
from tests.e2e.load import NUM_TOKENS, SLOW, USAGE, mixed, plain, words
from tests.e2e.stack import NewStack
from tests.figures import note
from tests.helpers import wait_until

NEVER_ENDING = 2000  # tokens, 40 s


async def test_request_lifecycle_only_its_own_clients_notice_and_their_requests_end(
    new_stack: NewStack, connect: Connect, undisturbed: list[Answer]
) -> None:
    async with new_stack(gateways=2, workers=2, env=SLOW) as stack:
        victim, other = stack.process("gateway", 0), stack.process("gateway", 1)
        long = [plain(f"long {i}", NEVER_ENDING, n=2, temperature=1, seed=i, stream=i > 0) for i in range(4)]
        broken = connect(stack.url_of(0)).begin_all(long)
        await wait_until(lambda: sum(s.num_tokens > 0 for s in stack.state.running()) == 8)
        answering = connect(stack.url_of(1)).begin_all(mixed("load"))
        await wait_until(lambda: len(stack.state.running()) > 16)
        killed_at = stack.kill(victim)
        for answer in await broken:
            assert answer.broken and not answer.done, answer
            assert all(c.finish_reason is None for c in answer.choices.values()), "a false ending"
        answers = await answering
        check_same(answers, undisturbed)
        pause = longest_pause_s(answers, killed_at)
        await stack.report(victim)
        await wait_until(lambda: not stack.state.running(), 25)
        note(others_pause_s=pause, orphans_ended_s=time.perf_counter() - killed_at)
        orphans = [s for s in stack.state.sequences() if s.gateway == victim.incarnation and s.num_tokens > 1]
        assert len(orphans) == 8
        assert {s.outcome.reason for s in orphans if s.outcome} == {"cancelled"}
        assert other.incarnation in stack.state.members()
        await stack.restart(victim)


async def test_one_that_is_told_to_stop_lets_its_streams_finish(new_stack: NewStack, connect: Connect) -> None:
    async with new_stack(gateways=2, env=SLOW | {"drain_timeout_s": 10}) as stack:
        leaving = stack.process("gateway", 0)
        client = connect(stack.url_of(0))
        answering = client.begin_all([plain(f"draining {i}", **USAGE) for i in range(4)])
        await wait_until(lambda: sum(s.num_tokens > 0 for s in stack.state.running()) == 4)
        stack.kill(leaving, signal.SIGTERM)
        for i, answer in enumerate(await answering):
            answer.check()
            assert answer.text == words(f"draining {i}", NUM_TOKENS)
        assert await asyncio.to_thread(leaving.popen.wait, 10) == 0
        assert (await client.ask(plain("too late"))).broken
        await stack.restart(leaving)


async def test_one_that_is_told_to_stop_ends_what_does_not_finish(new_stack: NewStack, connect: Connect) -> None:
    async with new_stack(gateways=1, env=SLOW | {"drain_timeout_s": 0.2}) as stack:
        leaving = stack.process("gateway")
        client = connect(stack.url)
        answering = client.begin(plain("draining", NEVER_ENDING))
        await wait_until(lambda: any(s.num_tokens > 0 for s in stack.state.running()))
        stopped_at = stack.kill(leaving, signal.SIGTERM)
        assert await asyncio.to_thread(leaving.popen.wait, 10) == 0
        note(exit_s=time.perf_counter() - stopped_at)
        [left] = stack.state.running()
        assert left.gateway == ""  # its client may come back to another one, for a while
        await wait_until(lambda: not stack.state.running(), 25)
        answer = await answering
        assert not answer.done and answer.choices[0].finish_reason is None
        await stack.restart(leaving)
