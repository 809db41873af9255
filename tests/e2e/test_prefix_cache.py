"""Prompts that the cache holds in part or whole are answered as if it were empty, on either worker.

The scripted engine fails on a key that is not where the block table says; `test_same_answer.py` has the real model.
"""

from __future__ import annotations

import itertools

import pytest

from shared import scripted_vocab as vocab
from tests.e2e.clients import Client, Connect
from tests.e2e.load import USAGE
from tests.e2e.stack import NewStack

BLOCK_SIZE = 8
NUM_TOKENS = 8
_numbers = itertools.count()


async def ask(client: Client, ids: list[int], salt: str) -> int:
    """How many of its tokens came from the cache."""
    body = {"prompt": ids, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True, "cache_salt": salt, **USAGE}
    answer = await client.ask(body)
    answer.check()
    assert answer.text == bytes(vocab.answer(ids, NUM_TOKENS)).decode()
    assert answer.usage and answer.usage["prompt_tokens"] == len(ids)
    cached: int = answer.usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 <= cached <= len(ids) - 1
    return cached


def prompt(num_ids: int) -> list[int]:
    return [vocab.BOS, *f"{next(_numbers):x} is unlike all others, whose numbers differ".encode()][:num_ids]


@pytest.mark.parametrize("num_ids", [1, 7, 8, 9, 15, 16, 17, 31, 32, 33])
async def test_prefix_cache_correctness_around_whole_blocks(client: Client, num_ids: int) -> None:
    ids = prompt(num_ids)
    assert await ask(client, ids, "cold") == 0
    found = [await ask(client, ids, "warm") for _ in range(3)]
    assert found[0] == 0 and found[1:] == [(num_ids - 1) // BLOCK_SIZE * BLOCK_SIZE] * 2


async def test_prefix_cache_correctness_on_the_other_worker(new_stack: NewStack, connect: Connect) -> None:
    async with new_stack(workers=2) as stack:
        client = connect(stack.url)
        prompts = [prompt(num_ids) for num_ids in (16, 31, 32, 33)]
        for ids in prompts:
            for _ in range(2):
                await ask(client, ids, "one")
        [served] = {s.worker for s in stack.state.sequences() if s.worker} - {""}
        victim = stack.by_incarnation(served)
        stack.kill(victim)
        await stack.report(victim)
        for ids in prompts:
            found = [await ask(client, ids, "one") for _ in range(2)]
            assert found == [0, (len(ids) - 1) // BLOCK_SIZE * BLOCK_SIZE]
        await stack.restart(victim)
