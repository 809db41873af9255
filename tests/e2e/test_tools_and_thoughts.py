"""Calls of tools and thoughts in chats, as the official client has them: whole and streamed alike, on any worker."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.e2e.clients import Client
from tests.e2e.load import USAGE, Json
from tests.e2e.stack import Stack

CALL = '{"name": "get_weather", "arguments": {"city": "Rome", "note": "a \\"quoted\\" 🙂"}}'
HERMES = f"<script>Let me see.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"
THINKS = "<script><think>\nHm, 1 < 2.\n</think>\n\nYes."


class GetWeather(BaseModel):
    """Says how the weather is."""

    city: Literal["Rome", "Oslo"]
    days: int


class Step(BaseModel):
    name: Literal["add", "mul"]
    value: int


class Plan(BaseModel):
    steps: list[Step]
    done: bool


TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Says.", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
        "additionalProperties": False}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(stacks_redis: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Its model writes calls and thoughts, by its settings."""
    env = {"tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"}
    async with Stack(stacks_redis, tmp_path_factory.mktemp("tools"), env=env) as stack:
        yield stack


@pytest.fixture
async def ai(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=stack.url + "/v1", api_key="unused", max_retries=0, timeout=20) as client:
        yield client


def asked(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "", "messages": messages, "temperature": 0, "max_tokens": 400} | fields


async def both(ai: AsyncOpenAI, body: dict[str, Any]) -> Any:
    """The whole answer, which the stream helper must put together alike."""
    whole = (await ai.chat.completions.create(**body)).choices[0]
    async with ai.chat.completions.stream(**body) as stream:
        async for _ in stream:
            pass
        streamed = stream.current_completion_snapshot.choices[0]
    assert streamed.finish_reason == whole.finish_reason
    assert (streamed.message.content or None) == (whole.message.content or None)
    calls = [[(c.function.name, c.function.arguments) for c in m.tool_calls or []]
             for m in (whole.message, streamed.message)]  # fmt: skip
    assert calls[0] == calls[1]
    for name in ("reasoning_content", "reasoning"):
        assert getattr(streamed.message, name, None) == getattr(whole.message, name, None)
    return whole


async def test_calls_of_the_models_own_choice(ai: AsyncOpenAI) -> None:
    choice = await both(ai, asked(HERMES, tools=TOOLS))
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see.\n"
    assert [c.function.name for c in choice.message.tool_calls] == ["get_weather"] * 2
    assert json.loads(choice.message.tool_calls[0].function.arguments) == json.loads(CALL)["arguments"]
    assert len({c.id for c in choice.message.tool_calls}) == 2
    one = await both(ai, asked(HERMES, tools=TOOLS, parallel_tool_calls=False))
    assert len(one.message.tool_calls) == 1
    none = await both(ai, asked(HERMES, tools=TOOLS, tool_choice="none"))
    assert none.finish_reason == "stop" and "<tool_call>" in none.message.content and not none.message.tool_calls
    plain = await both(ai, asked("<script>No call.\n", tools=TOOLS))
    assert (plain.message.content, plain.finish_reason) == ("No call.\n", "stop")


async def test_calls_that_must_be(ai: AsyncOpenAI) -> None:
    few = {"thinking_token_budget": 3}  # the scripted engine begins with what looks most like its script
    required = await both(ai, asked("words", tools=TOOLS, tool_choice="required", extra_body=few))
    assert required.finish_reason in ("tool_calls", "length") and required.message.tool_calls
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = await both(ai, asked("<script>R", tools=TOOLS, tool_choice=named, extra_body=few, max_tokens=1500))
    [call] = choice.message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo") and choice.message.content is None
    with pytest.raises(openai.BadRequestError) as caught:
        await ai.chat.completions.create(**asked("x", tool_choice="required"))
    assert caught.value.param == "tool_choice"


async def test_a_round_of_calls_and_results(ai: AsyncOpenAI) -> None:
    first = await ai.chat.completions.create(**asked(HERMES, tools=TOOLS))
    message = first.choices[0].message
    assert message.tool_calls
    results = [{"role": "tool", "tool_call_id": c.id, "content": "sunny"} for c in message.tool_calls]
    turns = [{"role": "user", "content": "How is it?"}, message.model_dump(exclude_none=True), *results]
    body = asked("", tools=TOOLS) | {"messages": [*turns, {"role": "user", "content": "<script>It is sunny."}]}
    assert (await both(ai, body)).message.content == "It is sunny."


async def test_parsed_answers_and_calls_of_pydantic_models(ai: AsyncOpenAI) -> None:
    script = '<script>{"steps": [{"name": "add", "value": 7}], "done": true}'
    parsed = await ai.chat.completions.parse(**asked(script, response_format=Plan))
    assert parsed.choices[0].message.parsed == Plan(steps=[Step(name="add", value=7)], done=True)
    tool = openai.pydantic_function_tool(GetWeather)
    call = '<tool_call>\n{"name": "GetWeather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
    called = await ai.chat.completions.parse(**asked(f"<script>{call}", tools=[tool]))
    assert called.choices[0].message.tool_calls
    assert called.choices[0].message.tool_calls[0].function.parsed_arguments == GetWeather(city="Oslo", days=3)
    async with ai.chat.completions.stream(**asked(script, response_format=Plan)) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert "content.delta" in kinds and final.choices[0].message.parsed == parsed.choices[0].message.parsed


async def test_thoughts_are_told_apart(ai: AsyncOpenAI) -> None:
    choice = await both(ai, asked(THINKS))
    assert (choice.message.reasoning_content, choice.message.content) == ("Hm, 1 < 2.", "Yes.")
    hidden = await both(ai, asked(THINKS, extra_body={"include_reasoning": False}))
    assert hidden.message.content == "Yes." and not hasattr(hidden.message, "reasoning_content")
    called = await both(ai, asked(THINKS.replace("Yes.", HERMES.removeprefix("<script>")), tools=TOOLS))
    assert called.finish_reason == "tool_calls" and called.message.reasoning_content == "Hm, 1 < 2."


async def test_a_budget_of_thoughts_and_a_schema_behind_them(ai: AsyncOpenAI) -> None:
    endless = "<script><think>" + "and so on " * 60
    short = await both(ai, asked(endless, max_tokens=80, extra_body={"thinking_token_budget": 10}))
    assert short.message.reasoning_content == "and so on" and short.message.content
    schema: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["red", "green"]}}}
    choice = await both(ai, asked(endless, response_format=schema, extra_body={"thinking_token_budget": 10}))
    assert choice.finish_reason == "stop" and json.loads(choice.message.content) in ("red", "green")


async def test_a_stream_of_calls_is_taken_up_at_any_event(stack: Stack, connect: Any) -> None:
    client: Client = connect(stack.url)
    body = asked(THINKS.replace("Yes.", HERMES.removeprefix("<script>")), tools=TOOLS, stream=True, **USAGE)
    async with client.session.post(stack.url + "/v1/chat/completions", json=body) as response:
        rid, whole = response.headers["X-Request-Id"], events_of(await response.text())
    for id, _ in whole[:-1:7]:
        path = f"{stack.url}/v1/streams/{rid}"
        async with client.session.get(path, headers={"Last-Event-ID": id}) as response:
            rest = events_of(await response.text())
        known = [data for i, (_, data) in enumerate(whole) if i <= [e for e, _ in whole].index(id)]
        assert assembled([*known, *(data for _, data in rest)]) == assembled([data for _, data in whole])


def events_of(text: str) -> list[tuple[str, str]]:
    lines = text.splitlines()
    return [(line[4:], lines[i + 1].removeprefix("data: ")) for i, line in enumerate(lines) if line.startswith("id: ")]


def assembled(events: list[str]) -> Json:
    """All deltas put together; of calls by their number."""
    found: Json = {"calls": {}, "content": "", "reasoning": "", "finish": []}
    for event in events:
        for choice in json.loads(event)["choices"] if event != "[DONE]" else []:
            delta = choice["delta"]
            found["content"] += delta.get("content", "")
            found["reasoning"] += delta.get("reasoning", "")
            found["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            for call in delta.get("tool_calls", ()):
                old = found["calls"].setdefault(call["index"], [call.get("id"), call["function"].get("name"), ""])
                old[2] += call["function"]["arguments"]
    return found
