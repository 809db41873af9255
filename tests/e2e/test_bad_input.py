"""Requests that are wrong, or poison: each gets its own error, and its neighbours' answers are the same to the byte."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from yarl import URL

from services import modules
from shared import scripted_vocab as vocab
from shared.settings import current_environ, variable
from tests.e2e.clients import Answer, Client, Connect, check_same, longest_pause_s
from tests.e2e.load import USAGE, mixed, plain, words
from tests.e2e.stack import NewStack, Stack
from tests.figures import note
from tests.helpers import url_as, wait_until

NUMBERS: list[Any] = ["1", True, [], {}, [1], float(1 << 70)]
WRONG: dict[str, list[Any]] = {
    "temperature": [*NUMBERS, -0.1, 2.1], "top_p": [*NUMBERS[:5], 0, 1.1], "min_p": [*NUMBERS[:5], -0.1, 1.1],
    "top_k": [*NUMBERS, -2, 1.5], "seed": [*NUMBERS, 1 << 63, -(1 << 63) - 1, 0.5], "n": [*NUMBERS, 0, -1, 17, 1 << 40],
    "max_tokens": [*NUMBERS, -1, 1.5], "min_tokens": [*NUMBERS, -1, 1 << 23], "logprobs": [*NUMBERS, -1, 21],
    "frequency_penalty": [*NUMBERS, -2.1, 2.1], "presence_penalty": [*NUMBERS, -2.1, 2.1],
    "repetition_penalty": [*NUMBERS, 0, -1, 101], "best_of": [17, 129, 0, "x"],
    "stop": [1, [1], [""], "", ["x"] * 17, "x" * 257, {"a": 1}, [["x"]]],
    "stop_token_ids": ["x", [-1], [vocab.VOCAB_SIZE], [1.5], ["1"], [1] * 65, [1 << 40]],
    "logit_bias": [[], "x", {"x": 1}, {"-1": 1}, {"01": 1}, {str(vocab.VOCAB_SIZE): 1}, {"1": 101}, {"1": "x"},
                   {"1": None}, {"١": 1}, {str(i): 0 for i in range(301)}],
    "ignore_eos": ["yes", 1], "echo": ["yes", 1], "stream": ["yes", 1], "skip_special_tokens": ["no", 0],
    "stream_options": [{"include_usage": True}, "x", []], "user": [1, ["x"], "x" * 1025], "cache_salt": ["", 1],
    "prompt": [None, 1, {}, [], [[]], [1, "a"], ["a", 1], [[1], "a"], [-1], [vocab.VOCAB_SIZE], [1.5], [True], [None],
               "x" * 5000, [1] * 5000, "x" * 3_000_000, [["a"]], ["x"] * 17],
    "model": [1, []], "response_format": [{"type": "xml"}, "x", {}],
    "structured_outputs": [{}, {"regex": "("}, {"json": {"not": {}}}, {"grammar": "start: nowhere"}],
    "allowed_token_ids": [[], [vocab.VOCAB_SIZE], ["x"]], "bad_words": [["x"] * 65, [""], [" "]],
    "suffix": ["x", 1], "priority": ["x", 1.5, 1 << 40],
}  # fmt: skip
WRONG_CHAT: dict[str, list[Any]] = {
    "messages": [None, [], "x", [1], [{}], [{"role": "user"}], [{"role": "nobody", "content": "x"}],
                 [{"role": "user", "content": 1}], [{"role": "user", "content": [{"type": "image_url"}]}],
                 [{"role": "user", "content": "x"}] * 4097, [{"role": "user", "content": [[]]}]],
    "top_logprobs": [2, -1, "x", 21], "max_completion_tokens": [0, -1, "x"], "tools": [[{"type": "function"}]],
    "tool_choice": ["required", "x", {"type": "function"}], "chat_template_kwargs": [{"x": 1}, []],
    "reasoning_effort": ["high", 1], "thinking_token_budget": [5, -1],
    "chat_template": ["{{ 1 }}"], "n": [0, 17],
}  # fmt: skip
RAW = {
    "empty": b"", "no object": b"[]", "text": b'"x"', "truncated": b'{"prompt": "x"', "two": b"{}{}",
    "NaN": b'{"prompt": "x", "temperature": NaN}', "Infinity": b'{"prompt": "x", "temperature": Infinity}',
    "1e999": b'{"prompt": "x", "temperature": 1e999}', "twice": b'{"prompt": "x", "prompt": "y"}',
    "deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep objects": b'{"a":' * 10_000,
    "long integer": b'{"prompt": "x", "seed": ' + b"9" * 100_000 + b"}", "UTF-8": b'{"prompt": "\xff\xfe"}',
    "surrogate": b'{"prompt": "\\ud800"}', "UTF-16": '{"prompt": "x"}'.encode("utf-16"), "nul": b'{"prompt": "x"}\0',
}  # fmt: skip


@contextlib.asynccontextmanager
async def neighbours(client: Client, undisturbed: list[Answer]) -> AsyncIterator[None]:
    """Others are answered all the while, and their answers are what they always are."""
    done = asyncio.Event()

    async def keep_asking() -> None:
        while not done.is_set():
            check_same(await client.ask_all(mixed("load")), undisturbed)

    asking = asyncio.create_task(keep_asking())
    try:
        yield
    finally:
        done.set()
        await asking


def check_error(status: int, body: Any, param: str | None = None) -> None:
    """One of ours: OpenAI's shape, nothing of our insides in it, and the field's name."""
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
    error = body["error"]
    assert isinstance(error["message"], str) and error["message"] and len(error["message"]) < 500
    assert not re.search(r"Traceback|pydantic|aiohttp|0x[0-9a-f]{6}|/work|\.py|Exception|object at", error["message"])
    if param is not None:
        assert status == 400, body
        assert (error["param"] or "").split(".")[0].split("[")[0] == param, body


async def check_refused(client: Client, path: str, base: dict[str, Any], table: dict[str, list[Any]]) -> None:
    async def one(field: str, value: Any) -> None:
        data = io.BytesIO(json.dumps(base | {field: value}).encode())
        status, body = await client.post(path, data=data)
        assert status in (400, 404), (field, str(value)[:100], status, str(body)[:300])
        check_error(status, body, field)

    cases = [(field, value) for field, values in table.items() for value in values]
    for start in range(0, len(cases), 8):
        await asyncio.gather(*(one(*case) for case in cases[start : start + 8]))


async def test_every_field_is_checked(client: Client, undisturbed: list[Answer]) -> None:
    async with neighbours(client, undisturbed):
        await check_refused(client, "/v1/completions", {"prompt": "x", "max_tokens": 4}, WRONG)
        base = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        await check_refused(client, "/v1/chat/completions", base, WRONG_CHAT)


async def test_what_is_no_json_of_ours(client: Client, undisturbed: list[Answer]) -> None:
    async with neighbours(client, undisturbed):
        for name, data in RAW.items():
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                status, body = await client.post(path, data=io.BytesIO(data))
                assert status == 400, (name, path, status, body)
                check_error(status, body)
        status, body = await client.post("/v1/completions", data=io.BytesIO(b" " * (9 << 20)))
        assert status == 413
        check_error(status, body)
        status, body = await client.post("/v1/completions", data=b"x", headers={"Content-Encoding": "br"})
        assert status == 415
        check_error(status, body)


async def test_other_paths_and_methods(client: Client) -> None:
    for path in ("/v2", "/v1/embeddings", "//v1/models", "/v1/completions/", "/v1/../metrics", "/%00", "/metrics/x"):
        async with client.session.get(URL(client.url + path, encoded=True)) as response:
            assert response.status in (404, 405), path
            status, body = response.status, await response.json()
        check_error(status, body)
    for method, path in (("GET", "/v1/completions"), ("POST", "/v1/models"), ("DELETE", "/"), ("PUT", "/tokenize")):
        async with client.session.request(method, client.url + path) as response:
            assert response.status == 405 and response.headers["Allow"]
            check_error(405, await response.json())


async def test_the_largest_that_is_allowed_is_served(client: Client) -> None:
    biggest = {
        "n": 16, "temperature": 2, "seed": -(1 << 63), "logprobs": 20,
        "stop": [chr(0x4E00 + i) * 256 for i in range(16)],
        "logit_bias": {str(i % vocab.VOCAB_SIZE): 100 if i % 2 else -100 for i in range(vocab.VOCAB_SIZE)},
        "stop_token_ids": list(range(64)), "top_k": (1 << 31) - 1, "repetition_penalty": 100, "user": "u" * 1024,
        "cache_salt": "s" * 256, "min_tokens": 20,
    }  # fmt: skip
    answer = await client.ask(plain("x" * 1900, 30, **biggest, **USAGE))
    answer.check()
    for i in range(16):
        drawn = words("x" * 1900, 30, 1 << 63, i)
        assert drawn.startswith(answer.choices[i].text) and len(answer.choices[i].text) >= 20


async def test_a_poison_request_costs_at_most_three_workers_and_ends_as_one_error(
    new_stack: NewStack, connect: Connect, undisturbed: list[Answer]
) -> None:
    env = {"scripted_step_ms": 10, "scripted_token_ms": 0.2}
    async with new_stack(workers=2, env=env) as stack:
        stack.allowed += ["workers died while running this request", "poison"]
        client = connect(stack.url)
        async with stack.supervised():
            answering = client.begin_all(mixed("load"))
            await wait_until(lambda: len(stack.state.running()) > 10)
            asked_at = time.perf_counter()
            poison = await client.ask({"prompt": [65, vocab.CRASH, 2], "temperature": 0, "stream": True})
            told_s = time.perf_counter() - asked_at
            assert poison.error is not None and poison.error["code"] == "poison_request", poison
            assert not poison.done and poison.position <= 2
            check_same(await answering, undisturbed)
            note(told_s=told_s, deaths=num_deaths(stack), neighbours_pause_s=longest_pause_s(await answering, asked_at))
            assert num_deaths(stack) == 3 and stack.state.redis.xlen(stack.state.key("dead")) == 1
            assert f"{poison.rid}.0  3 workers died while running this request; can be retried" in await dead(
                stack, "list"
            )
            neighbour = client.begin(plain("beside a retry", 200))
            retried = await dead(stack, "retry", poison.rid)
            assert "poison_request: 4 workers died" in retried, retried
            check_whole(await neighbour, "beside a retry", 200)
        assert num_deaths(stack) == 4, "one that was given up kills one worker, not three"
        assert stack.state.redis.xlen(stack.state.key("dead")) == 2


def num_deaths(stack: Stack) -> int:
    return sum(p.kind == "worker" for p in stack.lives) - 2


def check_whole(answer: Answer, text: str, num_tokens: int) -> None:
    answer.check()
    assert answer.text == words(text, num_tokens)


async def dead(stack: Stack, *args: str) -> str:
    """What `headrace dead` prints."""
    own = {"redis_url": url_as(stack.redis_url, "admin"), "served_model_name": stack.served_name}
    environ = modules.environ(current_environ() | {variable(k): v for k, v in own.items()})
    process = await asyncio.create_subprocess_exec(
        *modules.command("services.cli", "dead", *args), env=environ, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_a_step_that_fails_is_the_error_of_one(
    shared_stack: Stack, client: Client, undisturbed: list[Answer]
) -> None:
    """And is kept for people."""
    stack, failed = shared_stack, set()
    async with neighbours(client, undisturbed):
        for k in (0, 1, 5):
            for stream in (True, False):
                body = plain("", 20, stream=stream) | {"prompt": [65, vocab.RAISE, k]}
                answer = await client.ask(body)
                error = answer.error
                assert error is not None and error["code"] == "engine_error" and error["type"] == "server_error", answer
                assert answer.status == (200 if stream and k else 500) and not answer.done
                check_error(500, {"error": error})
                failed.add(f"{answer.rid}.0")

    def kept() -> set[str]:
        return {f[b"sid"].decode() for _, f in stack.state.redis.xrange(stack.state.key("dead"))}

    await wait_until(lambda: kept() >= failed)
    listed = await dead(stack, "list")
    assert f"{min(failed)}  the engine failed on this request alone; can be retried" in listed


async def test_tokens_that_a_client_may_not_say_are_no_orders(client: Client) -> None:
    """A marker after a SCRIPT is a text to be said."""
    answer = await client.ask(plain("", 9) | {"prompt": [vocab.SCRIPT, 65, vocab.CRASH, 66], "ignore_eos": True})
    answer.check()
    assert answer.text == "AB"


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_request_on_which_the_engine_hangs_ends_as_one_error_too(
    new_stack: NewStack, connect: Connect, undisturbed: list[Answer]
) -> None:
    """A hang is known only after a time in which no step takes that long, so its mates wait; they lose nothing."""
    env = {"scripted_step_ms": 10, "scripted_token_ms": 0.2}
    async with new_stack(workers=2, env=env) as stack:
        stack.allowed += ["workers died while running this request", "the engine's step does not end"]
        client = connect(stack.url, timeout_s=120)
        async with stack.supervised():
            answering = client.begin_all(mixed("load"))
            await wait_until(lambda: len(stack.state.running()) > 10)
            hanging = await client.ask({"prompt": [65, vocab.HANG, 2], "temperature": 0, "stream": True})
            assert hanging.error is not None and hanging.error["code"] == "poison_request", hanging
            check_same(await answering, undisturbed)
        assert sum(p.kind == "worker" for p in stack.lives) - 2 == 3
