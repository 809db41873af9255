"""Libraries that people already have, against a whole stack: whole and streamed answers, calls, and answers by schema.

They are the extra `clients`; what is not installed is skipped. Their warnings are their own.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, SecretStr

from tests.e2e.load import prompt_ids, words
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

CALL = '<script><tool_call>\n{"name": "GetWeather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
PLAN = '<script>{"name": "add", "value": 7}'
PROGRAM_TIMEOUT_S = 120


class GetWeather(BaseModel):
    """Says how the weather is."""

    city: str
    days: int


class Step(BaseModel):
    """A step of a plan."""

    name: str
    value: int


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(stacks_redis: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    env = {"tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"}
    async with Stack(stacks_redis, tmp_path_factory.mktemp("clients"), env=env) as stack:
        yield stack
        gc.collect()  # what they leave open is warned of here, where their warnings are ignored, not at the end of all


@pytest.fixture
def url(stack: Stack) -> str:
    return stack.url + "/v1"


def installed(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed; it is in the extra `clients`")


# --- the official client: what other tests of it do not use --------------------------------------------------------


def test_openai_without_asyncio(stack: Stack, url: str) -> None:
    with OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        options: dict[str, Any] = {"model": stack.served_name, "temperature": 0, "max_tokens": 200}
        ask: list[Any] = [{"role": "user", "content": PLAN}]
        parsed = client.chat.completions.parse(messages=ask, response_format=Step, **options)
        assert parsed.choices[0].message.parsed == Step(name="add", value=7)
        with client.chat.completions.stream(messages=ask, response_format=Step, **options) as stream:
            kinds = {event.type for event in stream}
            assert stream.get_final_completion().choices[0].message.parsed == Step(name="add", value=7)
        assert {"chunk", "content.delta", "content.done"} <= kinds
        raw = client.chat.completions.with_raw_response.create(messages=ask, **options)
        assert raw.headers["x-request-id"] and raw.parse().choices[0].message.content == PLAN.removeprefix("<script>")


def test_openai_a_loop_of_calls(stack: Stack, url: str) -> None:
    """As programs write it: what the model calls is run, and told it, until it answers."""
    tool = pydantic_function_tool(GetWeather)
    with OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": CALL}]
        for _ in range(2):
            with client.chat.completions.stream(
                model=stack.served_name, messages=messages, tools=[tool], temperature=0, max_tokens=200
            ) as stream:
                kinds = [event.type for event in stream]
                message = stream.get_final_completion().choices[0].message
            messages.append(message.to_dict())
            for call in message.tool_calls or ():
                assert "tool_calls.function.arguments.delta" in kinds
                assert call.function.parsed_arguments == GetWeather(city="Oslo", days=3)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "<script>It is sunny."})
                messages[0]["content"] = "How is it?"  # the scripted engine begins with the first script
    assert message.content == "It is sunny." and [m["role"] for m in messages] == ["user", "assistant", "tool"] + [
        "assistant"
    ]


# --- litellm --------------------------------------------------------------------------------------------------------


@pytest.fixture
async def litellm(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch a list of prices
    module = installed("litellm")
    yield module
    await module.close_litellm_async_clients()


def litellm_options(stack: Stack, provider: str = "hosted_vllm") -> dict[str, Any]:
    options = {"model": f"{provider}/{stack.served_name}", "api_base": stack.url + "/v1", "api_key": "unused"}
    return options | {"temperature": 0, "max_tokens": 200, "num_retries": 0}


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(litellm: Any, stack: Stack, provider: str) -> None:
    options = litellm_options(stack, provider) | {"max_tokens": 20}
    messages = [{"role": "user", "content": "Say it."}]
    whole = litellm.completion(messages=messages, **options)
    assert whole.choices[0].message.content == words("Say it.", 20) and whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(prompt_ids("Say it.")), 20)
    stream = litellm.completion(messages=messages, stream=True, stream_options={"include_usage": True}, **options)
    chunks = list(stream)
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == words("Say it.", 20)
    assert chunks[-1].usage.completion_tokens == 20
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=messages, **options | {"temperature": 1.5, "top_p": 7})


async def test_litellm_with_asyncio(litellm: Any, stack: Stack) -> None:
    asks = [litellm.acompletion(messages=[{"role": "user", "content": f"n {i}"}], **litellm_options(stack)
                                | {"max_tokens": 9}) for i in range(4)]  # fmt: skip
    answers = await asyncio.gather(*asks)
    assert [a.choices[0].message.content for a in answers] == [words(f"n {i}", 9) for i in range(4)]
    plain = await litellm.atext_completion(prompt="plain", **litellm_options(stack, "text-completion-openai"))
    assert plain.choices[0].text == words("plain", 200)


def test_litellm_calls_thoughts_and_schemas(litellm: Any, stack: Stack) -> None:
    options = litellm_options(stack)
    tool = pydantic_function_tool(GetWeather)
    called = litellm.completion(messages=[{"role": "user", "content": CALL}], tools=[tool], **options).choices[0]
    assert called.finish_reason == "tool_calls" and called.message.tool_calls[0].function.name == "GetWeather"
    by_schema = litellm.completion(messages=[{"role": "user", "content": PLAN}], response_format=Step, **options)
    assert Step.model_validate_json(by_schema.choices[0].message.content) == Step(name="add", value=7)
    thinks = [{"role": "user", "content": "<script><think>Hm.</think>Yes."}]
    thought = litellm.completion(messages=thinks, **options).choices[0].message
    assert (thought.reasoning_content, thought.content) == ("Hm.", "Yes.")


# --- langchain-openai ---------------------------------------------------------------------------------------------


def chat_model(stack: Stack, **options: Any) -> Any:
    module = installed("langchain_openai")
    fields = {"max_tokens": 200, "temperature": 0, "max_retries": 0} | options
    return module.ChatOpenAI(
        base_url=stack.url + "/v1", api_key=SecretStr("unused"), model=stack.served_name, stream_usage=True, **fields
    )


async def test_langchain(stack: Stack) -> None:
    model = chat_model(stack, max_tokens=20)
    whole = model.invoke("Say it.")
    assert whole.content == words("Say it.", 20) and whole.response_metadata["finish_reason"] == "length"
    assert whole.usage_metadata["output_tokens"] == 20
    chunks = list(model.stream("Say it."))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) == 20
    assert (await model.ainvoke([("system", "Be"), ("human", "short")])).content == words("Be\nshort", 20)
    assert [a.content for a in await model.abatch(["a", "b"])] == [words("a", 20), words("b", 20)]
    older = installed("langchain_openai").OpenAI(
        base_url=stack.url + "/v1", api_key=SecretStr("unused"), model=stack.served_name, temperature=0, max_tokens=7
    )
    assert older.invoke("plain") == words("plain", 7)


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_calls_and_schemas(stack: Stack, method: str) -> None:
    model = chat_model(stack)
    if method == "function_calling":
        called = model.bind_tools([GetWeather]).invoke(CALL)
        assert [(c["name"], c["args"]) for c in called.tool_calls] == [("GetWeather", {"city": "Oslo", "days": 3})]
        streamed = None
        for chunk in model.bind_tools([GetWeather]).stream(CALL):
            streamed = chunk if streamed is None else streamed + chunk
        assert streamed is not None
        assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [
            (c["name"], c["args"]) for c in called.tool_calls
        ]
        return
    assert model.with_structured_output(Step, method=method).invoke(PLAN) == Step(name="add", value=7)


# --- llm ----------------------------------------------------------------------------------------------------------


def test_llm_the_program(stack: Stack, url: str, tmp_path: Path) -> None:
    installed("llm")
    models = f"- model_id: ours\n  model_name: {stack.served_name}\n  api_base: {url}\n  api_key_name: none\n"
    schemas = f"- model_id: able\n  model_name: {stack.served_name}\n  api_base: {url}\n  supports_schema: true\n"
    (tmp_path / "extra-openai-models.yaml").write_text(models + schemas)

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "llm", *words, "-o", "temperature", "0", "--key", "unused"]
        environ = os.environ | {"LLM_USER_PATH": str(tmp_path)}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = run("-m", "ours", "Say it.", "-o", "max_tokens", "20")
    assert said == run("-m", "ours", "Say it.", "-o", "max_tokens", "20", "--no-stream") == words("Say it.", 20) + "\n"
    assert run("-m", "ours", "-s", "Be", "short", "-o", "max_tokens", "9").strip() == words("Be\nshort", 9).strip()
    schema = Step.model_json_schema()
    answer = run("-m", "able", PLAN, "--schema", json.dumps(schema))
    assert Step.model_validate_json(answer) == Step(name="add", value=7)


def test_llm_in_python(stack: Stack, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = installed("llm")
    models = f"- model_id: able\n  model_name: {stack.served_name}\n  api_base: {url}\n  supports_tools: true\n"
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))

    def GetWeather(city: str, days: int) -> str:
        """Says how the weather is."""
        return f"sunny in {city} for {days} days"

    for stream in (True, False):
        response = llm.get_model("able").prompt(CALL, tools=[GetWeather], temperature=0, key="unused", stream=stream)
        assert [(c.name, c.arguments) for c in response.tool_calls()] == [("GetWeather", {"city": "Oslo", "days": 3})]
        assert response.execute_tool_calls()[0].output == "sunny in Oslo for 3 days"
