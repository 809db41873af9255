"""One API key floods; another one's requests hardly notice."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from tests.e2e.clients import Answer, Connect, Json
from tests.e2e.load import plain, words
from tests.e2e.stack import NewStack
from tests.figures import note
from tests.helpers import wait_until

FLOOD, QUIET = ({"Authorization": f"Bearer {name}"} for name in ("flood", "quiet"))
NUM_FLOOD = 500
LEAST_S = 0.35  # what a busy machine adds to either is no delay of ours; behind the flood it would be 19 s


async def delays_s(client: aiohttp.ClientSession, url: str, name: str, number: int) -> list[float]:
    """From each request to its first token, one after another, several a second; sorted."""
    found = []
    for i in range(number):
        began = asyncio.get_running_loop().time()
        body: Json = plain(f"{name} {i}", 8)
        async with client.post(url + "/v1/completions", json=body, headers=QUIET) as response:
            assert response.status == 200, await response.text()
            await response.content.readuntil(b"\n\n")
            found.append(asyncio.get_running_loop().time() - began)
            await response.read()
        await asyncio.sleep(0.1)
    return sorted(found)


@pytest.mark.timeout(120)
async def test_a_flood_of_one_key_does_not_delay_another(new_stack: NewStack, connect: Connect) -> None:
    env = {
        "api_keys": "flood,quiet", "max_num_seqs": 8, "scripted_step_ms": 10, "max_model_len": 2048,
        "scripted_num_blocks": 1024, "request_timeout_s": 60,
    }  # fmt: skip
    async with new_stack(env=env, api_key="quiet") as stack, aiohttp.ClientSession() as client:
        quiet = await delays_s(client, stack.url, "alone", 15)
        flooding = connect(stack.url, 100)
        for i in range(NUM_FLOOD):
            flooding.begin(plain(f"flood {i} " + "x" * 100, 1900), headers=FLOOD)
        await wait_until(lambda: stack.state.num_queued() >= NUM_FLOOD - 20, 30)
        beside = await delays_s(client, stack.url, "beside", 20)
        note(first_token_alone_s=quiet[-1], first_token_beside_a_flood_s=beside[-1])
        assert beside[-1] <= 3 * max(quiet[-1], LEAST_S), (quiet, beside)
        running = len(stack.state.running())
        assert running >= 7, f"only {running} of 8 places are used"
        await flooding.close()
        answer: Answer = await connect(stack.url).ask(plain("after it", 8), headers=QUIET)
        answer.check()
        assert answer.text == words("after it", 8)
