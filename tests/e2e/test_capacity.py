"""What does not fit is refused at once with the real number; what fits, but not together, takes turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.clients import Answer, Client, Connect
from tests.e2e.load import USAGE, plain, words
from tests.e2e.stack import NewStack, Stack
from tests.figures import note
from tests.helpers import wait_until

NUM_BLOCKS = 8
POOL_TOKENS = NUM_BLOCKS * 16


SHAPE = {"scripted_num_blocks": NUM_BLOCKS, "block_size": 16}
TINY: dict[str, object] = {**SHAPE, "max_model_len": 4096, "scripted_step_ms": 2}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tiny(stacks_redis: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with Stack(stacks_redis, tmp_path_factory.mktemp("tiny"), env=TINY) as stack:
        yield stack


async def test_admission_and_limits_a_prompt_that_can_never_fit_is_told_the_capacity(
    tiny: Stack, connect: Connect
) -> None:
    client = connect(tiny.url)
    known, started = tiny.state.keys("r:*"), time.perf_counter()
    for num_chars in (POOL_TOKENS - 1, POOL_TOKENS, 3000):
        asked_at = time.perf_counter()
        refused = await client.ask(plain("x" * num_chars))
        note(refused_s=time.perf_counter() - asked_at)
        assert refused.status == 400 and refused.error, refused
        assert refused.error["code"] == "context_length_exceeded" and refused.error["param"] == "prompt"
        assert f"{POOL_TOKENS} tokens" in refused.error["message"], refused.error
    assert time.perf_counter() - started < 2
    assert tiny.state.keys("r:*") == known, "nothing is queued that cannot run"
    longest = await client.ask(plain("x" * (POOL_TOKENS - 2), 50, **USAGE))
    longest.check()
    assert longest.text == words("x" * (POOL_TOKENS - 2), 1) and longest.choices[0].finish_reason == "length"


async def test_admission_and_limits_a_prompt_that_nothing_is_drawn_after_may_fill_the_pool(
    tiny: Stack, connect: Connect
) -> None:
    client = connect(tiny.url)
    scored = {"max_tokens": 0, "echo": True, "logprobs": 0}
    answer = await client.ask({"prompt": [65] * POOL_TOKENS, **scored})
    answer.check()
    assert answer.choices[0].finish_reason == "length" and len(answer.text) == POOL_TOKENS
    refused = await client.ask({"prompt": [65] * (POOL_TOKENS + 1), **scored})
    assert refused.status == 400 and refused.error and refused.error["code"] == "context_length_exceeded"


async def test_admission_and_limits_an_answer_ends_where_the_pool_does(tiny: Stack, connect: Connect) -> None:
    answer = await connect(tiny.url).ask(plain("x" * 60, 500, **USAGE))
    answer.check()
    num_tokens = POOL_TOKENS - 61
    assert answer.text == words("x" * 60, num_tokens) and answer.choices[0].finish_reason == "length"
    assert answer.usage and answer.usage["completion_tokens"] == num_tokens


async def check_turns(stack: Stack, client: Client) -> None:
    """Each grows to 7 of 8 blocks: some are preempted in mid-stream, and go on where they were."""
    bodies = [plain(f"takes turns {i}", 90, n=1 + i % 2, temperature=1, seed=i, **USAGE) for i in range(6)]
    for i, answer in enumerate(await client.ask_all(bodies)):
        answer.check()
        for c, choice in answer.choices.items():
            assert choice.text == words(f"takes turns {i}", 90, i, c)
    assert all(s.strikes == 0 for s in stack.state.sequences())


async def test_admission_and_limits_answers_that_do_not_fit_together_take_turns(tiny: Stack, connect: Connect) -> None:
    await check_turns(tiny, connect(tiny.url))
    assert any(s.epoch > 1 for s in tiny.state.sequences()), "nobody was preempted"


async def test_answers_take_turns_on_two_workers(new_stack: NewStack, connect: Connect) -> None:
    async with new_stack(env=TINY, workers=2) as stack:
        await check_turns(stack, connect(stack.url))


async def test_a_full_queue_says_when_to_come_back(new_stack: NewStack, connect: Connect) -> None:
    env = {"max_queued_requests": 4, "max_num_seqs": 1, "scripted_step_ms": 10}
    async with new_stack(env=env) as stack:
        client = connect(stack.url)
        answers = await client.ask_all([plain(f"queued {i}", 20) for i in range(12)])
        refused = [a for a in answers if a.status != 200]
        assert 1 <= len(refused) <= 8
        for answer in refused:
            check_full(answer)
        for i, answer in enumerate(answers):
            if answer.status == 200:
                answer.check()
                assert answer.text == words(f"queued {i}", 20)
        many = await client.ask(plain("five at once", n=5))
        check_full(many)


async def test_a_queue_full_of_tokens_too(new_stack: NewStack, connect: Connect) -> None:
    env = {"max_queued_tokens": 300, "max_num_seqs": 1, "scripted_step_ms": 20}
    async with new_stack(env=env) as stack:
        client = connect(stack.url)
        running = [client.begin(plain(f"runs {i}", 60)) for i in range(2)]
        await wait_until(lambda: len(stack.state.running()) == 2)
        waiting = client.begin(plain("w" * 250, 3))
        await wait_until(lambda: stack.state.num_queued() == 1)
        check_full(await client.ask(plain("x" * 60, 3)))
        short = client.begin(plain("x" * 20, 3))
        for answer in await asyncio.gather(*running, waiting, short):
            answer.check()


def check_full(answer: Answer) -> None:
    assert answer.status == 429 and answer.error is not None, answer
    assert answer.error["code"] == "queue_full" and answer.error["type"] == "rate_limit_error"
    assert 1 <= int(answer.headers["Retry-After"]) <= 60


async def test_with_no_worker_a_request_is_refused_and_with_one_it_is_served(
    new_stack: NewStack, connect: Connect
) -> None:
    async with new_stack() as stack:
        client = connect(stack.url)
        worker = stack.process("worker")
        stack.kill(worker)
        await stack.report(worker)

        async def refused() -> bool:
            return (await client.get("/health/ready"))[0] == 503

        await wait_until(refused)
        answer = await client.ask(plain("nobody there"))
        assert answer.status == 503 and answer.error and answer.error["code"] == "no_worker"
        assert int(answer.headers["Retry-After"]) >= 1
        wrong = await client.ask(plain("wrong anyway", temperature=9))
        assert wrong.status == 400, "what is wrong with it is said also when nobody could serve it"
        await stack.restart(worker)

        async def served() -> bool:
            return (await client.ask(plain("somebody there"))).status == 200

        await wait_until(served)


async def test_admission_and_limits_what_never_fits_holds_nobody_up(tiny: Stack, connect: Connect) -> None:
    """200 tokens are more than the pool has, 120 and 64 more than it has room for: one is refused, one is cut."""
    client = connect(tiny.url)
    never, cut, fits = await client.ask_all([plain("n" * 199, 8), plain("c" * 119, 64, **USAGE), plain("f" * 9, 8)])
    assert never.status == 400 and never.error and f"{POOL_TOKENS} tokens" in never.error["message"]
    for answer in (cut, fits):
        answer.check()
        assert answer.choices[0].finish_reason == "length"
    assert cut.usage and cut.usage["completion_tokens"] == POOL_TOKENS - 120
    assert fits.text == words("f" * 9, 8)
