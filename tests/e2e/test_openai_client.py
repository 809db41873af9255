"""The official client against a whole stack: what it sends is understood, and what it is sent it understands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from shared import scripted_vocab as vocab
from tests.e2e.load import prompt_ids, words
from tests.e2e.stack import NewStack, Stack

STOP = "zq"  # an answer that does not contain it goes on


@pytest.fixture
async def ai(shared_stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=shared_stack.url + "/v1", api_key="unused", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
def model(shared_stack: Stack) -> str:
    return shared_stack.served_name


async def test_models(ai: AsyncOpenAI, model: str) -> None:
    listed = [m async for m in ai.models.list()]
    assert [m.id for m in listed] == [model]
    assert (await ai.models.retrieve(model)).owned_by == "headrace"
    with pytest.raises(openai.NotFoundError) as caught:
        await ai.models.retrieve("another")
    assert caught.value.code == "model_not_found"


# --- chat --------------------------------------------------------------------------------------------------------


async def test_a_chat(ai: AsyncOpenAI, model: str) -> None:
    answer = await ai.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Say it."}], temperature=0, max_completion_tokens=20
    )
    assert answer.choices[0].message.content == words("Say it.", 20)
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].finish_reason == "length"
    assert answer.model == model and answer.id.startswith("chatcmpl-") and answer.system_fingerprint
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (8, 20, 28)


async def test_a_chat_in_parts_and_roles(ai: AsyncOpenAI, model: str) -> None:
    answer = await ai.chat.completions.create(
        model=model, temperature=0, max_tokens=10,
        messages=[
            {"role": "developer", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": "Three"},
            {"role": "user", "content": "Four"},
        ],
    )  # fmt: skip
    tokens = await ai.post("/../tokenize", cast_to=object, body={"prompt": "Be short.\nOne\ntwo\nThree\nFour"})
    assert isinstance(tokens, dict) and answer.usage
    assert answer.usage.prompt_tokens in (tokens["count"], tokens["count"] - 1)  # parts are joined by the template
    assert len(answer.choices[0].message.content or "") == 10


async def test_a_streamed_chat(ai: AsyncOpenAI, model: str) -> None:
    stream = await ai.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Stream it."}], temperature=0, max_tokens=30, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == words("Stream it.", 30)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert len({c.id for c in chunks}) == 1 and {c.object for c in chunks} == {"chat.completion.chunk"}
    usage = chunks[-1].usage
    assert usage and usage.completion_tokens == 30 and not chunks[-1].choices
    assert all(c.usage is None for c in chunks[:-1])


async def test_the_stream_helper_assembles_what_the_whole_answer_says(ai: AsyncOpenAI, model: str) -> None:
    text = words("Assemble.", 25, seed=11)
    options: dict[str, Any] = {
        "model": model, "messages": [{"role": "user", "content": "Assemble."}], "temperature": 1, "seed": 11, "n": 2,
        "max_tokens": 25, "logprobs": True, "top_logprobs": 2, "stop": text[20:23],
    }  # fmt: skip
    async with ai.chat.completions.stream(**options) as stream:
        async for _ in stream:
            pass
        assembled = stream.current_completion_snapshot  # the helper refuses to parse what was cut at max_tokens
    whole = await ai.chat.completions.create(**options)
    assert whole.choices[0].message.content == text[: text.index(text[20:23])]
    for a, b in zip(assembled.choices, whole.choices, strict=True):
        assert (a.message.content, a.finish_reason) == (b.message.content, b.finish_reason)
        assert a.logprobs and b.logprobs and a.logprobs.content == b.logprobs.content


async def test_log_probabilities_of_a_chat(ai: AsyncOpenAI, model: str) -> None:
    answer = await ai.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "How sure?"}], temperature=0, max_tokens=5, logprobs=True,
        top_logprobs=3,
    )  # fmt: skip
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.content
    assert "".join(t.token for t in logprobs.content) == answer.choices[0].message.content
    assert bytes(b for t in logprobs.content for b in t.bytes or []).decode() == answer.choices[0].message.content
    assert all(len(t.top_logprobs) == 3 and t.top_logprobs[0].token == t.token for t in logprobs.content)
    assert all(t.logprob == -0.5 for t in logprobs.content)


# --- completions -------------------------------------------------------------------------------------------------


async def test_choices_are_seeded_one_by_one(ai: AsyncOpenAI, model: str) -> None:
    answer = await ai.completions.create(model=model, prompt="Three.", temperature=1, seed=5, max_tokens=16, n=3)
    assert [c.text for c in answer.choices] == [words("Three.", 16, 5, i) for i in range(3)]
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert answer.usage and answer.usage.prompt_tokens == 7 and answer.usage.completion_tokens == 48
    unseeded = [await ai.completions.create(model=model, prompt="Three.", temperature=1) for _ in range(2)]
    assert unseeded[0].choices[0].text != unseeded[1].choices[0].text


@pytest.mark.parametrize("included", [False, True])
async def test_stop_strings(included: bool, ai: AsyncOpenAI, model: str) -> None:
    full = words("Stop it.", 40)
    stop = full[17:20]
    end = full.index(stop)
    answer = await ai.completions.create(
        model=model, prompt="Stop it.", temperature=0, max_tokens=40, stop=[STOP, stop],
        extra_body={"include_stop_str_in_output": included},
    )  # fmt: skip
    assert answer.choices[0].text == full[: end + (3 if included else 0)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage and answer.usage.completion_tokens == end + 3
    stop_id = ord(full[10])
    by_id = await ai.completions.create(
        model=model, prompt="Stop it.", temperature=0, max_tokens=40,
        extra_body={"stop_token_ids": [stop_id], "min_tokens": 4},
    )  # fmt: skip
    assert by_id.choices[0].text == full[: full.index(chr(stop_id), 4)]
    assert by_id.choices[0].finish_reason == "stop"


async def test_echo_and_log_probabilities_of_completions(ai: AsyncOpenAI, model: str) -> None:
    echoed = await ai.completions.create(model=model, prompt="Echo! ", temperature=0, max_tokens=4, echo=True)
    assert echoed.choices[0].text == "Echo! " + words("Echo! ", 4)
    only = await ai.completions.create(model=model, prompt="Echo! ", max_tokens=0, echo=True)
    assert only.choices[0].text == "Echo! " and only.choices[0].finish_reason == "length"
    answer = await ai.completions.create(model=model, prompt="Sure?", temperature=0, max_tokens=4, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.tokens == list(words("Sure?", 4)) and logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.text_offset == [0, 1, 2, 3] and all(len(top) == 2 for top in logprobs.top_logprobs or [])


async def test_prompts_of_all_kinds(ai: AsyncOpenAI, model: str) -> None:
    ids = prompt_ids("by ids")
    texts = await ai.completions.create(model=model, prompt=["one", "two"], temperature=0, max_tokens=8, n=1)
    assert [c.text for c in texts.choices] == [words("one", 8), words("two", 8)]
    one = await ai.completions.create(model=model, prompt=ids, temperature=0, max_tokens=8)
    assert one.choices[0].text == words("by ids", 8)
    many = await ai.completions.create(
        model=model, prompt=[ids, prompt_ids("more")], temperature=1, seed=2, max_tokens=8, n=2
    )
    expected = [words(p, 8, 2, i) for p in ("by ids", "more") for i in range(2)]
    assert [c.text for c in many.choices] == expected
    assert many.usage and many.usage.prompt_tokens == len(ids) + 5


async def test_every_knob_is_taken(ai: AsyncOpenAI, model: str) -> None:
    """The scripted engine draws by its own rule, whatever these are; the real model's tests look at what they do."""
    answer = await ai.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Knobs"}], temperature=0.7, top_p=0.8, seed=-3,
        frequency_penalty=1.5, presence_penalty=-1, logit_bias={"65": 5, "66": -100}, max_tokens=12, user="somebody",
        response_format={"type": "text"},
        extra_body={
            "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "min_tokens": 3, "ignore_eos": True,
            "skip_special_tokens": False, "stop_token_ids": [1],
        },
    )  # fmt: skip
    assert answer.choices[0].message.content == words("Knobs", 12, seed=(1 << 64) - 3)


async def test_a_script_ends_where_it_says(ai: AsyncOpenAI, model: str) -> None:
    """Special tokens can be written as text; EOS ends an answer and is not shown."""
    answer = await ai.completions.create(model=model, prompt="Say: <script>grüße 🙂", temperature=0, max_tokens=50)
    assert answer.choices[0].text == "grüße 🙂" and answer.choices[0].finish_reason == "stop"
    goes_on = await ai.completions.create(
        model=model, prompt="Say: <script>hi", temperature=0, max_tokens=4, extra_body={"ignore_eos": True}
    )
    assert goes_on.choices[0].text == "hi" and goes_on.usage and goes_on.usage.completion_tokens == 4
    cut = await ai.completions.create(model=model, prompt="Say: <script>🙂", temperature=0, max_tokens=2)
    assert cut.choices[0].text == "\ufffd", "half a character is shown as such, once"


async def test_the_cache_is_counted(ai: AsyncOpenAI, model: str) -> None:
    prompt = "tallied " * 20
    first = await ai.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=2)
    await asyncio.sleep(0)  # the seal is reported with the end
    second = await ai.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=2)
    assert first.usage and second.usage and first.usage.prompt_tokens_details and second.usage.prompt_tokens_details
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == 160
    salted = await ai.completions.create(
        model=model, prompt=prompt, temperature=0, max_tokens=2, extra_body={"cache_salt": "own"}
    )
    assert salted.usage and salted.usage.prompt_tokens_details and not salted.usage.prompt_tokens_details.cached_tokens


# --- errors ------------------------------------------------------------------------------------------------------


async def test_errors_are_the_exceptions_that_people_catch(ai: AsyncOpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await ai.completions.create(model=model, prompt="x", temperature=3)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        await ai.completions.create(model="another", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        await ai.completions.create(model=model, prompt="x" * 5000)
    assert long.value.code == "context_length_exceeded" and "2048" in long.value.message
    with pytest.raises(openai.BadRequestError) as id_error:
        await ai.completions.create(model=model, prompt=[[1, 2], [vocab.VOCAB_SIZE]])
    assert id_error.value.param == "prompt[1][0]"


async def test_an_engine_that_fails_on_a_request_is_its_error_alone(ai: AsyncOpenAI, model: str) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        await ai.completions.create(model=model, prompt="x<raise>", temperature=0, max_tokens=8)
    assert caught.value.code == "engine_error"
    with pytest.raises(openai.APIError) as streamed:
        stream = await ai.completions.create(model=model, prompt=[82, vocab.RAISE, 3], temperature=0, stream=True)
        shown = [chunk.choices[0].text async for chunk in stream]
        assert len("".join(shown)) <= 3
    assert streamed.value.code == "engine_error"


def test_the_synchronous_client(shared_stack: Stack) -> None:
    with OpenAI(base_url=shared_stack.url + "/v1", api_key="unused", max_retries=0, timeout=20) as client:
        answer = client.completions.create(model=shared_stack.served_name, prompt="Sync", temperature=0, max_tokens=9)
        assert answer.choices[0].text == words("Sync", 9)
        stream = client.completions.create(
            model=shared_stack.served_name, prompt="Sync", temperature=0, max_tokens=9, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == words("Sync", 9)


async def test_keys(new_stack: NewStack) -> None:
    async with new_stack(env={"api_keys": "first-key,second-key"}, api_key="first-key") as stack:
        for key in ("first-key", "second-key"):
            async with AsyncOpenAI(base_url=stack.url + "/v1", api_key=key, max_retries=0) as client:
                answer = await client.completions.create(model="", prompt="shared " * 10, temperature=0, max_tokens=4)
                assert answer.usage and answer.usage.prompt_tokens_details
                assert answer.usage.prompt_tokens_details.cached_tokens == 0, "another key's blocks"
        async with AsyncOpenAI(base_url=stack.url + "/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                await client.models.list()
        assert caught.value.code == "invalid_api_key"
        assert not any("first-key" in process.text() for process in stack.lives)
