"""Everything dies at once, as in a power cut, and starts again: who comes back goes on, and nothing runs for nobody."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import pytest

from tests.e2e.balanced import BalancedClient, listening
from tests.e2e.clients import Answer, Connect, check_same
from tests.e2e.load import SLOW, USAGE, mixed, plain, words
from tests.e2e.own_redis import OwnRedis
from tests.e2e.stack import NewStack, Stack
from tests.figures import note
from tests.helpers import wait_until

NEVER_ENDING = 3000  # tokens, a minute
GRACE_S = 10.0  # that a client of a dead gateway has to come back


async def power_cut(stack: Stack, server: OwnRedis) -> None:
    for process in stack.processes():
        stack.kill(process)
    server.kill()
    server.start()
    for process in stack.processes():
        await stack.restart(process, wait=False)
    await wait_until(lambda: len(stack.state.members()) == 7 and stack.state.all_leased(), 40)
    await wait_until(lambda: len(listening(stack)) == 2, 20)


@pytest.mark.timeout(120)
async def test_who_comes_back_goes_on_and_nothing_runs_for_nobody(
    new_stack: NewStack, connect: Connect, undisturbed: list[Answer], tmp_path: Path
) -> None:
    with OwnRedis(tmp_path / "redis") as server:
        async with new_stack(redis_url=server.url, gateways=2, workers=2, schedulers=2, env=SLOW) as stack:
            clients = connect(stack.url, timeout_s=60)
            faithful = BalancedClient(clients, functools.partial(listening, stack))
            gone = clients.begin_all([plain(f"gone {i}", NEVER_ENDING) for i in range(3)])
            answering = clients.keep(faithful.ask_all(mixed("load")))
            await wait_until(lambda: sum(s.num_tokens > 3 for s in stack.state.running()) > 12)
            abandoned = {a.sid for a in stack.state.running()}
            cut_at = time.perf_counter()
            await power_cut(stack, server)
            note(serves_again_s=time.perf_counter() - cut_at)
            assert all(answer.broken for answer in await gone)
            check_same(await answering, undisturbed)
            abandoned &= {s.sid for s in stack.state.running()}
            assert len(abandoned) == 3
            await wait_until(lambda: not stack.state.running(), GRACE_S + 15)
            note(orphans_ended_s=time.perf_counter() - cut_at)
            for sid in abandoned:
                sequence = stack.state.sequence(sid)
                assert sequence and sequence.outcome and sequence.outcome.code == "gateway_gone", sequence
            again = await faithful.ask(plain("load plain", 20, **USAGE))
            again.check()
            assert again.text == words("load plain", 20)
            assert faithful.num_resumed > 0
