"""Redis can write no more, for want of memory or of disk: new work is told to come back, and nothing else is lost."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.e2e.clients import Answer, Client, Connect, check_same, longest_pause_s, num_choices
from tests.e2e.load import SLOW, USAGE, mixed, plain, words
from tests.e2e.own_redis import OwnRedis
from tests.e2e.stack import NewStack, Stack
from tests.figures import note
from tests.helpers import wait_until


def check_refused(answer: Answer) -> None:
    assert answer.status == 503, answer
    assert answer.error is not None and answer.error["code"] == "storage_full"
    assert int(answer.headers["Retry-After"]) >= 1


async def under_load(stack: Stack, client: Client) -> asyncio.Future[list[Answer]]:
    """All are accepted, and most are being answered."""
    bodies = [*mixed("load"), plain("long", 150, **USAGE)]
    num_sequences = sum(map(num_choices, bodies))
    answering = client.begin_all(bodies)
    await wait_until(lambda: len(stack.state.sequences()) >= num_sequences)
    await wait_until(lambda: sum(s.num_tokens > 3 for s in stack.state.running()) > 10)
    return answering


async def check_recovered(client: Client, text: str) -> None:
    async def accepted() -> bool:
        answer = await client.ask(plain(text, 10))
        return answer.status == 200 and answer.text == words(text, 10)

    await wait_until(accepted, 20)


async def test_what_runs_goes_on_while_its_memory_is_full(
    new_stack: NewStack, connect: Connect, undisturbed: list[Answer], tmp_path: Path
) -> None:
    """Tokens, ends and leases are still written; only admission is refused."""
    with OwnRedis(tmp_path / "redis") as server:
        async with new_stack(redis_url=server.url, workers=2, env=SLOW) as stack:
            client = connect(stack.url)
            answering = await under_load(stack, client)
            lives = set(stack.state.members())
            server.limit_memory(1)  # below what it holds, whatever is freed meanwhile
            for i in range(3):
                check_refused(await client.ask(plain(f"refused {i}")))
            *answers, long = await answering
            check_same(answers, undisturbed)
            long.check()
            assert long.text == words("long", 150)
            note(pause_s=longest_pause_s([*answers, long]))
            check_refused(await client.ask(plain("refused, also at rest")))
            server.limit_memory(0)
            await check_recovered(client, "there is room again")
            assert set(stack.state.members()) == lives, "somebody had to start again"


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_full_disk_stops_everybody_until_there_is_room(
    streaming: bool, new_stack: NewStack, connect: Connect, undisturbed: list[Answer], tmp_path: Path
) -> None:
    """Redis refuses every write then, so that running work waits; no process ends of it and no token is lost."""
    with OwnRedis(tmp_path / "redis") as server:
        async with new_stack(redis_url=server.url, workers=2, env=SLOW) as stack:
            client = connect(stack.url)
            answering = await under_load(stack, client)
            server.fill_disk()
            await wait_until(lambda: not server.can_write())
            check_refused(await client.ask(plain("refused", stream=streaming)))
            freed_at = time.perf_counter()
            server.free_disk()
            *answers, long = await answering
            note(goes_on_when_there_is_room_s=longest_pause_s([*answers, long], freed_at))
            check_same(answers, undisturbed)
            long.check()
            assert long.text == words("long", 150)
            await check_recovered(client, "there is room again")
            assert all(p.popen.poll() is None for p in stack.lives), "somebody ended of it"
