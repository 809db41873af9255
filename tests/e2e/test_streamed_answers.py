"""A streamed answer is the whole one, field by field, for any combination of parameters, through the whole stack."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import hypothesis
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from tests.assembly import Json, assemble
from tests.e2e.stack import Stack

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}é"]}}\n</tool_call>'
TEXTS = [
    "words", "other words", "", "<script>", "<script>naïve 🦊 ok", "<script>a<bos>b<bos><eos>c", "<script>  \n",
    f"<script>{CALL}", f"<script>Well.\n{CALL}\n{CALL}\n", f"<script>{CALL[:40]}", "<script>no <tool_ca",
    "<script><think>\nHm. 🦊\n</think>\n\nYes.", "<script><think>endless " + "thoughts " * 20, "<script><thin",
    f"<script><think>Hm.</think>{CALL}", '<script>{"a": 12, "b": [true, "x"]}', "<script>" + "7" * 60,
]  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array", "maxItems": 3}}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "g"}},
]
NOT_COMPARED = ("id", "created")
NUM_TOGETHER = 5


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(stacks_redis: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    env = {
        "tool_call_parser": "hermes",
        "reasoning_parser": "deepseek_r1",
        "max_model_len": 2048,
        "scripted_step_ms": 0,
    }
    async with Stack(stacks_redis, tmp_path_factory.mktemp("streamed"), env=env) as stack:
        yield stack


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    """Any of these fields, each by itself present or not."""
    return st.fixed_dictionaries({}, optional=fields)


def one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


outputs = one_of(
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    {"structured_outputs": {"choice": ["red", "green 🦊"]}}, {"structured_outputs": {"regex": "[a-c]{2,9}é?"}},
)  # fmt: skip
common = some(
    min_tokens=one_of(0, 1, 5),
    n=one_of(1, 2, 3),
    stop=st.lists(one_of("e", " wo", "🦊", "b<bos>", "<eos>", "\n", "}}", "</think>", "never"), max_size=3),
    include_stop_str_in_output=st.booleans(),
    stop_token_ids=one_of([], [ord("a")], [ord("\n"), ord("}")]),
    ignore_eos=st.booleans(),
    skip_special_tokens=st.booleans(),
    frequency_penalty=one_of(0.5),
    logit_bias=one_of({"97": -100, "98": 5}),
    allowed_token_ids=one_of(list(range(32, 127))),
    bad_words=one_of(["th", "7"]),
    speculative=one_of({"num_speculative_tokens": 2}),
    return_token_ids=st.booleans(),
    return_tokens_as_token_ids=st.booleans(),
)
lengths = one_of(1, 2, 7, 40, 90).map(lambda length: {"max_tokens": length})
drawn = one_of({"temperature": 0}, {"temperature": 1, "seed": 7}, {"temperature": 0.7, "seed": -3, "top_p": 0.9})
usages = some(include_usage=st.booleans(), continuous_usage_stats=st.booleans())
chats = st.tuples(
    one_of(*TEXTS).map(lambda text: {"messages": [{"role": "user", "content": text}]}),
    one_of({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}),
    one_of({}, {"tools": TOOLS}, {"tools": TOOLS, "parallel_tool_calls": False}, {"tools": TOOLS[1:]}),
    one_of({}, {}, {"tool_choice": "none"}, {"tool_choice": "auto"}, {"tool_choice": "required"})
    | one_of({"tool_choice": {"type": "function", "function": {"name": "g"}}}),
    some(include_reasoning=st.booleans(), thinking_token_budget=one_of(0, 6),
         prediction=one_of({"type": "content", "content": "naïve 🦊 no"})),
)  # fmt: skip
completions = st.tuples(
    (one_of(*TEXTS) | one_of(["words", "<script>two 🦊"], [1, 2, 3], [[5, 6], [7]])).map(lambda text: {"prompt": text}),
    one_of({}, {"logprobs": 0}, {"logprobs": 3}), one_of({}, {"echo": True}), one_of({}, {}, {}, {"max_tokens": 0}),
)  # fmt: skip
requests = st.tuples(lengths, common, drawn, one_of({}, {}, {}) | outputs, chats | completions, usages).map(
    lambda parts: ({k: v for part in (*parts[:4], *parts[4]) for k, v in part.items()}, parts[5])
)


async def ask(session: aiohttp.ClientSession, url: str, body: Json) -> tuple[int, str]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with session.post(url + path, data=io.BytesIO(json.dumps(body).encode())) as response:
        return response.status, await response.text()


def check_usages(chunks: list[Json], options: Json, whole: Json) -> None:
    """With each chunk if asked for, growing; in the last, of no choice; or nowhere."""
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]
    if options.get("continuous_usage_stats"):
        news = [c for c in chunks if c["choices"] and "role" not in c["choices"][0].get("delta", {})]
        assert all(chunk["usage"] for chunk in news) and counts == sorted(counts)
    if options.get("include_usage"):
        assert not chunks[-1]["choices"] and counts[-1] == whole["usage"]["completion_tokens"]
        assert all("usage" in chunk and chunk["choices"] for chunk in chunks[:-1])
    elif not options.get("continuous_usage_stats"):
        assert not any("usage" in chunk for chunk in chunks)


def comparable(answer: Json) -> Json:
    """What must be equal: all but what names this answer, and what the cache happened to hold."""
    answer = {key: value for key, value in answer.items() if key not in NOT_COMPARED}
    if answer["usage"]:
        answer["usage"] = answer["usage"] | {"prompt_tokens_details": None}
    for choice in answer["choices"]:
        calls = choice.get("message", {}).get("tool_calls", ())
        assert all(call.pop("id").startswith("call_") for call in calls)
    return answer


async def check(session: aiohttp.ClientSession, url: str, body: Json, options: Json) -> bool:
    """Whether it was answered. One that is refused, or fails on the way, is told the same."""
    (status, text), (other_status, events) = await asyncio.gather(
        ask(session, url, body), ask(session, url, body | {"stream": True, "stream_options": options})
    )
    whole = json.loads(text)
    if other_status != 200:
        assert (status, whole) == (other_status, json.loads(events))
        return False
    lines = [line[6:] for line in events.splitlines() if line.startswith("data: ")]
    if lines[-1] != "[DONE]":
        assert status != 200 and whole == json.loads(lines[-1])
        return False
    assert status == 200 and lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    check_usages(chunks, options, whole)
    streamed = assemble(chunks)
    if not options.get("include_usage"):
        streamed["usage"] = whole["usage"] = None
    assert comparable(streamed) == comparable(whole)
    return True


def check_many(stack: Stack, num_requests: int) -> None:
    """Several at a time, since each waits for its steps."""
    num_asked = num_served = 0

    async def check_all(batch: list[tuple[Json, Json]]) -> int:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
            return sum(await asyncio.gather(*(check(session, stack.url, *request) for request in batch)))

    @hypothesis.settings(max_examples=num_requests // NUM_TOGETHER, suppress_health_check=list(hypothesis.HealthCheck))
    @given(st.lists(requests, min_size=NUM_TOGETHER, max_size=NUM_TOGETHER))
    def property_(batch: list[tuple[Json, Json]]) -> None:
        nonlocal num_asked, num_served
        num_asked += len(batch)
        with asyncio.Runner() as runner:
            num_served += runner.run(check_all(batch))

    property_()
    assert num_asked >= num_requests and num_served > num_asked / 2


def test_some_combinations(stack: Stack) -> None:
    check_many(stack, 60)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_500_combinations(stack: Stack) -> None:
    check_many(stack, 500)
