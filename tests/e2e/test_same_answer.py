"""One request, one answer, of the real model through the whole stack: alone, in company, after a cache hit, on either
worker, and when its worker is killed. Tokens and log-probabilities are compared to the last bit that JSON shows."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from shared.model_source import ModelSourceError, default_cache_dir, resolve
from shared.settings import DEFAULT_MODEL
from tests.e2e.clients import Answer, Client, Connect
from tests.e2e.load import USAGE, Json
from tests.e2e.stack import Stack
from tests.figures import note
from tests.helpers import wait_until

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

NUM_TOKENS = 12
TIMEOUT_S = 90.0
ALONE = {"cache_salt": "alone"}
STORY = "The lighthouse keeper counted the ships. One was red, one was green, and one had no lights at all. " * 5


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(stacks_redis: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    try:
        path = resolve(DEFAULT_MODEL, default_cache_dir()).path
    except ModelSourceError as e:
        pytest.skip(str(e))
    env = {
        "threads": 1,
        "kv_cache_bytes": 64 << 20,
        "max_model_len": 1024,
        "max_num_batched_tokens": 128,
        "retention_s": 600,
    }
    folder = tmp_path_factory.mktemp("model")
    async with Stack(stacks_redis, folder, model=str(path), workers=2, env=env) as stack:
        yield stack


def watched() -> list[Json]:
    common: dict[str, Any] = {"max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True, **USAGE}
    question = [{"role": "user", "content": "Name three rivers and one mountain."}]
    return [
        common | {"messages": question, "temperature": 0, "logprobs": True, "top_logprobs": 5},
        common | {"messages": question, "temperature": 1, "seed": 17, "n": 2, "logprobs": True, "top_logprobs": 2},
        common | {"prompt": STORY, "temperature": 0.8, "seed": 99, "top_p": 0.9, "top_k": 50, "logprobs": 3},
        common | {"prompt": STORY + "So he", "temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        common | {"prompt": "1, 2, 3, 4,", "temperature": 1.2, "seed": 4, "min_p": 0.05, "logit_bias": {"33": 2.5}},
    ]


def neighbours(number: int) -> list[Json]:
    return [
        {"prompt": f"Neighbour {i} talks about {'rain and ' * (i * 3)}snow", "max_tokens": 4 + i, "stream": True,
         "temperature": i % 2, "seed": i}
        for i in range(number)
    ]  # fmt: skip


def check_same(answers: list[Answer], alone: list[Answer]) -> None:
    for answer, same in zip(answers, alone, strict=True):
        answer.check()
        assert answer.essence() == same.essence()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(stack: Stack) -> list[Answer]:
    """Each by itself, the first time that its prompt is seen."""
    client = Client(stack.url, TIMEOUT_S)
    answers = [await client.ask(body | ALONE) for body in watched()]
    await client.close()
    for answer in answers:
        answer.check()
        assert all(choice.text for choice in answer.choices.values())
    assert answers[1].choices[0].text != answers[1].choices[1].text
    return answers


def workers_of(stack: Stack, answers: list[Answer]) -> set[str]:
    return {s.worker for a in answers if (s := stack.state.sequence(f"{a.rid}.0")) is not None}


@pytest.mark.parametrize("number", [2, 15])
async def test_in_company(number: int, stack: Stack, alone: list[Answer], connect: Connect) -> None:
    client = connect(stack.url, TIMEOUT_S)
    others = client.begin_all(neighbours(number))
    check_same(await client.ask_all(watched()), alone)
    for answer in await others:
        answer.check()


async def test_after_a_cache_hit(stack: Stack, alone: list[Answer], connect: Connect) -> None:
    client = connect(stack.url, TIMEOUT_S)
    for number in (0, 2, 3):  # their prompts are longer than a block
        for _ in range(2):
            answer = await client.ask(watched()[number] | {"cache_salt": "hit"})
            check_same([answer], [alone[number]])
        assert answer.usage and answer.usage["prompt_tokens_details"]["cached_tokens"] >= 16


@pytest.mark.parametrize("num_ids", [16, 31, 32, 33])
async def test_prefix_cache_correctness_around_whole_blocks(num_ids: int, stack: Stack, connect: Connect) -> None:
    client = connect(stack.url, TIMEOUT_S)
    _, tokens = await client.post("/tokenize", json={"prompt": STORY})
    body: Json = {"prompt": tokens["tokens"][num_ids : 2 * num_ids], "max_tokens": 8, "temperature": 0, "logprobs": 2}
    answers = [await client.ask(body | {"cache_salt": salt}) for salt in ("cold", "warm", "warm", "warm")]
    check_same(answers[1:], [answers[0]] * 3)
    cached = [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers if answer.usage]
    assert cached == [0, 0, (num_ids - 1) // 8 * 8, (num_ids - 1) // 8 * 8]


async def test_batch_independence_of_a_seeded_answer(stack: Stack, connect: Connect) -> None:
    """Beside one, and beside ten, who give no seed."""
    client = connect(stack.url, TIMEOUT_S)
    body: Json = {"prompt": "P", "seed": 42, "temperature": 0.8, "max_tokens": 16, "ignore_eos": True, "logprobs": 1}
    others: list[Json] = [{"prompt": f"Q{i}", "temperature": 0.8, "max_tokens": 16, "stream": True} for i in range(10)]
    alone, both = await client.ask(body), await client.ask(body | {"n": 2})
    for num_others in (1, 1, 1, 1, 10):
        answers = await client.ask_all([body, *others[:num_others]])
        check_same(answers[:1], [alone])
    check_same([await client.ask(body | {"n": 2})], [both])
    assert both.choices[0].tokens == alone.choices[0].tokens != both.choices[1].tokens


async def test_on_the_other_worker(stack: Stack, alone: list[Answer], connect: Connect) -> None:
    """Which is the one that has less to do: the first one answers somebody else, whose prompt it holds in its cache."""
    client = connect(stack.url, TIMEOUT_S)
    blocker: Json = {"prompt": STORY + "Then", "max_tokens": 800, "ignore_eos": True, "stream": True} | ALONE
    busy = client.begin(blocker)
    await wait_until(stack.state.running)
    (first,) = {s.worker for s in stack.state.running()}
    answers = [await client.ask(body | {"cache_salt": "other"}) for body in watched()]
    busy.cancel()
    check_same(answers, alone)
    assert first not in workers_of(stack, answers)
    assert len(workers_of(stack, alone) | workers_of(stack, answers)) == 2


async def test_when_the_worker_is_killed(stack: Stack, alone: list[Answer], connect: Connect) -> None:
    client = connect(stack.url, TIMEOUT_S)
    answering = client.begin_all([body | {"cache_salt": "killed"} for body in watched()])
    await wait_until(lambda: any(2 <= s.num_tokens < NUM_TOKENS for s in stack.state.running()), 60, every=0.005)
    running = stack.state.running()
    places = [s.worker for s in running]
    victim = stack.by_incarnation(max(places, key=places.count))
    killed_at = stack.kill(victim)
    answers = await answering
    check_same(answers, alone)
    note(default_model_pause_s=max(a.longest_pause_s(killed_at) for a in answers))
    started = time.perf_counter()
    await stack.restart(victim)
    note(default_model_restart_s=time.perf_counter() - started)
