"""Answers over HTTP, whole and streamed, by plain aiohttp and by the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import openai
import pytest

from services.gateway import generation
from shared.records import RequestRecord
from tests.gateway.conftest import MODEL, Served
from tests.helpers import wait_until

TEXT = b"The quick brown fox."


def fixed(text: bytes) -> Callable[[RequestRecord, int], list[int]]:
    return lambda request, choice: list(text)


def by_choice(request: RequestRecord, choice: int) -> list[int]:
    return list(f"choice {choice} of {bytes(request.prompt_ids[1:]).decode()}".encode())


async def events_of(response: aiohttp.ClientResponse) -> list[tuple[str, str]]:
    """(id, data) of each event; comments are left out."""
    events, id = [], ""
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        if line.startswith("id: "):
            id = line[4:]
        elif line.startswith("data: "):
            events.append((id, line[6:]))
            id = ""
        else:
            assert line == "" or line.startswith(":"), line
    return events


async def stream(served: Served, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    async with served.session.post(served.url + path, json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["X-Accel-Buffering"] == "no"
        events = await events_of(response)
    assert events[-1][1] == "[DONE]"
    assert sum(data == "[DONE]" for _, data in events) == 1
    return [(id, json.loads(data)) for id, data in events[:-1]]


async def test_the_priority_stands_in_the_queue(served: Served, answering: Callable[..., None]) -> None:
    answering(fixed(TEXT))
    body = {"prompt": ["a", "b"], "max_tokens": 2, "n": 2, "priority": -3}
    status, answer, response = await served.post("/v1/completions", body)
    assert status == 200, answer
    record = await served.worker.records.sequence(response.headers["X-Request-Id"] + ".1")
    assert record is not None and record.priority == -3


async def test_a_whole_chat_answer(served: Served, answering: Callable[..., None]) -> None:
    answering(fixed(TEXT))
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
    status, answer, response = await served.post("/v1/chat/completions", body)
    assert status == 200, answer
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL
    assert answer["system_fingerprint"].startswith("fp_")
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT.decode()}
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 3  # BOS and two bytes
    assert answer["usage"]["completion_tokens"] == len(TEXT)
    assert response.headers["Server"] == "headrace"
    assert answer["id"] == "chatcmpl-" + response.headers["X-Request-Id"]


async def test_a_streamed_chat_answer(served: Served, answering: Callable[..., None]) -> None:
    answering(fixed(TEXT))
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 20,
        "stream_options": {"include_usage": True},
    }
    events = await stream(served, "/v1/chat/completions", body)
    *chunks, usage = [chunk for _, chunk in events]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == TEXT.decode()
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["length"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(TEXT)
    assert all(c["usage"] is None for c in chunks)


async def test_event_ids_say_what_the_client_has(served: Served, answering: Callable[..., None]) -> None:
    answering(fixed(b"abc"))
    async with served.session.post(
        served.url + "/v1/completions", json={"prompt": "x", "max_tokens": 3, "stream": True}
    ) as response:
        rid = response.headers["X-Request-Id"]
        events = await events_of(response)
    assert events[-1] == (f"{rid}:end", "[DONE]")
    positions = [id.removeprefix(f"{rid}:") for id, _ in events[:-1]]
    assert positions[-1] == "3e"
    assert [int(p.rstrip("e")) for p in positions] == sorted(int(p.rstrip("e")) for p in positions)
    record = await served.worker.records.sequence(f"{rid}.0")
    assert record is not None and record.state == "done"


async def test_several_choices_of_several_prompts(served: Served, answering: Callable[..., None]) -> None:
    answering(by_choice)
    body = {"prompt": ["one", "two"], "n": 2, "max_tokens": 64}
    status, answer, _ = await served.post("/v1/completions", body)
    assert status == 200, answer
    expected = ["choice 0 of one", "choice 1 of one", "choice 0 of two", "choice 1 of two"]
    assert [c["text"] for c in answer["choices"]] == expected
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 8
    assert answer["usage"]["completion_tokens"] == 4 * len("choice 0 of one")
    texts = dict.fromkeys(range(4), "")
    ends = []
    for _, chunk in await stream(served, "/v1/completions", body):
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        ends += [choice["index"]] * (choice["finish_reason"] is not None)
    assert list(texts.values()) == expected
    assert sorted(ends) == [0, 1, 2, 3]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_stop_string_ends_text_count_and_work(
    served: Served, answering: Callable[..., None], streamed: bool
) -> None:
    answering(fixed(TEXT + b"!" * 40))
    body = {"prompt": "x", "max_tokens": 60, "stop": ["brown"]}
    if streamed:
        chunks = [c for _, c in await stream(served, "/v1/completions", body)]
        text = "".join(c["choices"][0]["text"] for c in chunks)
        finish = chunks[-1]["choices"][0]["finish_reason"]
        rid = chunks[0]["id"].removeprefix("cmpl-")
    else:
        _, answer, _ = await served.post("/v1/completions", body)
        text, finish = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
        rid = answer["id"].removeprefix("cmpl-")
        assert answer["usage"]["completion_tokens"] == len("The quick brown")
    assert (text, finish) == ("The quick ", "stop")

    async def is_done() -> bool:
        record = await served.worker.records.sequence(f"{rid}.0")
        return record is not None and record.state == "done" and b"stop" in record.outcome

    await wait_until(is_done, 2)


async def test_scoring_nothing_but_the_prompt_admits_nothing(served: Served) -> None:
    status, answer, _ = await served.post("/v1/completions", {"prompt": "score this", "echo": True, "max_tokens": 0})
    assert status == 200
    assert answer["choices"][0]["text"] == "score this"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert await served.worker.queued() == []


@pytest.mark.parametrize("code", ["context_length_exceeded", "invalid_request"])
async def test_what_fails_before_the_first_token_is_an_ordinary_error(code: str, served: Served) -> None:
    async def refuse() -> None:
        [sid] = await wait_until(served.worker.queued)
        await served.worker.fail(sid, code, "too long for every worker")

    refusing = asyncio.ensure_future(refuse())
    status, answer, _ = await served.post("/v1/completions", {"prompt": "x", "stream": True})
    await refusing
    assert status == 400
    assert answer["error"]["message"] == "too long for every worker"
    assert answer["error"]["code"] == code


async def test_what_fails_later_is_one_error_event_and_no_done(served: Served) -> None:
    async def begin_and_fail() -> None:
        [sid] = await wait_until(served.worker.queued)
        await served.worker.place(sid)
        await served.worker.commit(sid, [ord("a")])
        await began.wait()
        await served.worker.fail(sid, "poison_request", "3 workers died while running this request")

    began = asyncio.Event()
    failing = asyncio.ensure_future(begin_and_fail())
    async with served.session.post(
        served.url + "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 9}
    ) as response:
        assert response.status == 200
        began.set()
        events = await events_of(response)
    await failing
    assert "[DONE]" not in [data for _, data in events]
    assert json.loads(events[-1][1])["error"]["code"] == "poison_request"
    assert json.loads(events[0][1])["choices"][0]["text"] == "a"


async def test_a_silent_stream_shows_that_it_lives(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "TICK_S", 0.05)
    body = {"prompt": "x", "stream": True, "max_tokens": 3}
    async with served.session.post(served.url + "/v1/completions", json=body) as response:
        assert await response.content.readline() == b": keep-alive\n"
        [sid] = await served.worker.queued()
        await served.worker.place(sid)
        await served.worker.commit(sid, list(b"abc"), "length")
        assert "[DONE]" in await response.text()


async def test_tokens_that_nobody_sees_do_not_stand_for_something_sent(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "TICK_S", 0.1)
    body = {"prompt": "x", "stream": True, "max_tokens": 400, "stop": ["a" * 256]}

    async def go_on(sid: str) -> None:
        await served.worker.place(sid)
        for _ in range(200):
            await served.worker.commit(sid, list(b"a"))
            await asyncio.sleep(0.02)

    async with served.session.post(served.url + "/v1/completions", json=body) as response:
        [sid] = await wait_until(served.worker.queued)
        going_on = asyncio.ensure_future(go_on(sid))
        try:
            for _ in range(3):
                assert await asyncio.wait_for(response.content.readuntil(b"\n\n"), 2) == b": keep-alive\n\n"
        finally:
            going_on.cancel()


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_response_that_moved_elsewhere_ends_with_an_error_that_says_so(served: Served, streamed: bool) -> None:
    async def move() -> None:
        [sid] = await wait_until(served.worker.queued)
        await served.worker.place(sid)
        await served.worker.commit(sid, [97])
        if streamed:
            await began.wait()
        await served.worker.scripts.attach(sid.rpartition(".")[0], "g-elsewhere")

    began = asyncio.Event()
    moving = asyncio.ensure_future(move())
    body = {"prompt": "x", "stream": streamed, "max_tokens": 3}
    async with served.session.post(served.url + "/v1/completions", json=body) as response:
        began.set()
        text = await response.text()
    await moving
    assert response.status == (200 if streamed else 409)
    assert streamed or response.headers["X-Should-Retry"] == "false"
    assert "[DONE]" not in text
    assert json.loads(text.rpartition("data: ")[2])["error"]["code"] == "stream_moved"
    assert served.service.inflight.requests == []


@pytest.fixture
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_the_official_client(served: Served, answering: Callable[..., None], client: openai.AsyncOpenAI) -> None:
    answering(fixed(TEXT))
    models = await client.models.list()
    assert [m.id for m in models.data] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    chat = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=20, n=2
    )
    assert [c.message.content for c in chat.choices] == [TEXT.decode()] * 2
    pieces = []
    async for chunk in await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=20, stream=True
    ):
        pieces += [c.delta.content or "" for c in chunk.choices]
    assert "".join(pieces) == TEXT.decode()
    completion = await client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=5)
    assert completion.choices[0].text == "The q"
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="another", prompt="x")
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model=MODEL, prompt="x", temperature=9)
    assert refused.value.param == "temperature"
