"""The client that comes back, against small servers that break off, refuse, and say where it was."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from services.tools import client as client_module
from services.tools.client import AnswerError, StreamClient

Handler = Callable[[web.Request, web.StreamResponse], Awaitable[None]]
PATH = "/v1/chat/completions"


class Gateway:
    """Answers each request by the next of `plans`; `asked` has method, path, place and key of each."""

    def __init__(self) -> None:
        self.plans: list[Handler | int] = []
        self.asked: list[tuple[str, str, str, bool]] = []
        self.keys: set[str] = set()
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        place, key = request.headers.get("Last-Event-ID", ""), request.headers.get("Idempotency-Key", "")
        self.asked.append((request.method, request.path, place, bool(key)))
        self.keys |= {key} - {""}
        plan = self.plans.pop(0)
        if isinstance(plan, int):
            return web.json_response({"error": {"message": f"a {plan}", "code": f"code_{plan}"}}, status=plan)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await plan(request, response)
        return response

    async def start(self, stack: contextlib.AsyncExitStack) -> Gateway:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return self


def events(*numbers: int, end: bool = False, ids: bool = True, error: str = "") -> Handler:
    """Sends these, and breaks the connection off unless it is the end."""

    async def send(request: web.Request, response: web.StreamResponse) -> None:
        for number in numbers:
            id = f"id: r:{number}\n" if ids else ""
            await response.write(f"{id}data: {json.dumps({'n': number})}\n\n: a comment\n\n".encode())
        if error:
            await response.write(b"data: " + json.dumps({"error": {"message": error, "code": "stream_moved"}}).encode())
            await response.write(b"\n\n")
        if end:
            await response.write(b"id: r:end\ndata: [DONE]\n\n")
        else:
            assert request.transport is not None
            request.transport.close()

    return send


@pytest.fixture
async def gateways() -> AsyncIterator[list[Gateway]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await Gateway().start(stack) for _ in range(2)]


async def read(*urls: str) -> list[int]:
    async with StreamClient(urls) as client:
        return [value["n"] async for value in client.stream(PATH, {"messages": []})]


async def test_it_goes_on_after_the_last_event_at_the_next_gateway(gateways: list[Gateway]) -> None:
    one, two = gateways
    one.plans = [events(1, 2), events(4, end=True)]
    two.plans = [events(3)]
    assert await read(one.url, two.url) == [1, 2, 3, 4]
    assert one.asked == [("POST", PATH, "", True), ("GET", "/v1/streams/r", "r:3", False)]
    assert two.asked == [("GET", "/v1/streams/r", "r:2", False)]


async def test_through_one_address_it_comes_back_until_it_may(gateways: list[Gateway]) -> None:
    one, _ = gateways
    one.plans = [events(1), 503, 502, events(2, end=True)]
    assert await read(one.url) == [1, 2]


async def test_a_call_that_broke_off_before_any_event_is_repeated_under_its_key(gateways: list[Gateway]) -> None:
    one, two = gateways
    one.plans, two.plans = [events()], [events(1, end=True)]
    assert await read(one.url, two.url) == [1]
    assert one.keys == two.keys and len(one.keys) == 1


async def test_a_gateway_that_is_away_or_busy_is_passed_over(gateways: list[Gateway]) -> None:
    one, two = gateways
    one.plans, two.plans = [503], [events(1, end=True)]
    assert await read("http://127.0.0.1:1", one.url, two.url) == [1]


async def test_where_all_are_busy_it_says_what_they_say(gateways: list[Gateway]) -> None:
    one, two = gateways
    one.plans, two.plans = [503], [503]
    with pytest.raises(AnswerError, match="a 503"):
        await read(one.url, two.url)


@pytest.mark.parametrize("status", [404, 409, 410, 429, 500])
async def test_what_it_is_refused_when_it_comes_back_is_final(gateways: list[Gateway], status: int) -> None:
    one, two = gateways
    one.plans, two.plans = [events(1)], [status]
    with pytest.raises(AnswerError, match=f"a {status}") as refused:
        await read(one.url, two.url)
    assert refused.value.code == f"code_{status}"


async def test_a_stream_that_another_connection_has_taken_is_not_taken_back(gateways: list[Gateway]) -> None:
    one, two = gateways
    one.plans = [events(1, error="taken")]
    with pytest.raises(AnswerError, match="taken"):
        await read(one.url, two.url)
    assert two.asked == []


async def test_without_ids_nothing_can_be_come_back_to(gateways: list[Gateway]) -> None:
    one, two = gateways
    one.plans = [events(1, ids=False)]
    with pytest.raises(AnswerError, match="lost in the middle"):
        await read(one.url, two.url)
    assert two.asked == []


async def test_its_patience_ends(gateways: list[Gateway], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PATIENCE_S", 0.2)
    one, _ = gateways
    one.plans = [events(1), *[503] * 99]
    with pytest.raises(AnswerError, match="a 503"):
        await read(one.url)


async def test_who_leaves_early_cancels_the_request(gateways: list[Gateway]) -> None:
    one, _ = gateways
    one.plans = [events(1, 2, end=True), 200]
    async with StreamClient([one.url]) as client, contextlib.aclosing(client.stream(PATH, {})) as stream:
        async for value in stream:
            assert value == {"n": 1}
            break
    assert one.asked[1:] == [("DELETE", "/v1/streams/r", "", False)]


async def test_who_is_interrupted_cancels_the_request(gateways: list[Gateway]) -> None:
    async def stay(request: web.Request, response: web.StreamResponse) -> None:
        await response.write(b'id: r:1\ndata: {"n": 1}\n\n')
        await asyncio.Event().wait()

    async def read_until_interrupted() -> None:
        async with StreamClient([one.url]) as client, contextlib.aclosing(client.stream(PATH, {})) as stream:
            async for _ in stream:
                began.set()

    one, _ = gateways
    one.plans, began = [stay, 200], asyncio.Event()
    reading = asyncio.ensure_future(read_until_interrupted())
    await began.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert one.asked[1:] == [("DELETE", "/v1/streams/r", "", False)]


async def test_a_page_is_asked_of_whoever_answers(gateways: list[Gateway]) -> None:
    one, _ = gateways
    one.plans = [503]
    async with StreamClient(["http://127.0.0.1:1", one.url]) as client:
        with pytest.raises(AnswerError, match="a 503"):
            await client.get("/v1/models")
    async with StreamClient(["http://127.0.0.1:1"]) as client:
        with pytest.raises(AnswerError, match="nothing answers at"):
            await client.get("/v1/models")
