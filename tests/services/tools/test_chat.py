"""The terminal chat against a small server that speaks server-sent events."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

from services.tools import chat
from services.tools.chat import Conversation

Reply = Callable[[dict[str, Any], web.StreamResponse], Any]


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


class Server:
    """Answers chats with what `reply` writes; runs in a thread, since the chat has the main one."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.hung_up = threading.Event()
        self.reply: Reply = self.hello
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        self._ready.wait(10)

    async def hello(self, body: dict[str, Any], out: web.StreamResponse) -> None:
        await out.write(b": a comment\n\nid: 1\n" + event("Hel") + event("lo") + b"data: [DONE]\n\n")

    async def _serve(self) -> None:
        app = web.Application()
        app.add_routes([web.get("/v1/models", self._models), web.post("/v1/chat/completions", self._chat)])
        app.add_routes([web.get("/v1/streams/{rid}", self._stream)])
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization"))
        return web.json_response({"data": [{"id": "tiny"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        if self.bodies[-1]["messages"][-1]["content"] == "refuse":
            return web.json_response({"error": {"message": "max_tokens is too large"}}, status=400)
        out = web.StreamResponse()
        await out.prepare(request)
        try:
            await self.reply(self.bodies[-1], out)
        except asyncio.CancelledError:
            self.hung_up.set()
            raise
        return out

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse()
        await out.prepare(request)
        place = request.headers["Last-Event-ID"]
        await out.write(f"id: {place}1\n".encode() + event(f" goes on after {place}") + b"data: [DONE]\n\n")
        return out

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def type_lines(*lines: str) -> None:
        waiting = list(lines)

        def read(prompt: str) -> str:
            if not waiting:
                raise EOFError
            return waiting.pop(0)

        monkeypatch.setattr("builtins.input", read)

    return type_lines


def test_answers_are_shown_and_sent_again_with_the_next_message(
    server: Server, typed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    typed("hi", "", "again", "/reset", "new", "/exit", "never sent")
    args = ["--url", server.url, "--api-key", "k", "--system", "Be brief.", "--temperature", "0", "--seed", "7"]
    assert chat.main(args) == 0
    system = {"role": "system", "content": "Be brief."}
    contents = [[message["content"] for message in body["messages"]] for body in server.bodies]
    assert contents == [["Be brief.", "hi"], ["Be brief.", "hi", "Hello", "again"], ["Be brief.", "new"]]
    first = server.bodies[0]
    assert first["model"] == "tiny" and first["messages"][0] == system and first["stream"] is True
    assert (first["temperature"], first["seed"], first["max_tokens"]) == (0, 7, 512)
    assert server.keys == ["Bearer k"]
    assert capsys.readouterr().out.count("Hello\n") == 3


def test_a_refusal_is_shown_and_its_message_is_not_sent_again(
    server: Server, typed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    typed("refuse", "hi")
    assert chat.main(["--url", server.url, "--model", "m"]) == 0
    assert "[max_tokens is too large]" in capsys.readouterr().out
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["hi"]


def test_an_answer_that_breaks_off_is_told_and_kept(
    server: Server, typed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    async def breaks(body: dict[str, Any], out: web.StreamResponse) -> None:
        await out.write(event("par"))
        if len(body["messages"]) > 1:
            await out.write(b'data: {"error": {"message": "the worker died"}}\n\ndata: [DONE]\n\n')

    server.reply = breaks
    typed("one", "two")
    assert chat.main(["--url", server.url, "--model", "m"]) == 0
    shown = capsys.readouterr().out
    assert "par[the connection was lost in the middle of the answer]" in shown and "par[the worker died]" in shown
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": "par"}


def test_an_answer_goes_on_when_the_connection_is_lost(
    server: Server, typed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    async def breaks(body: dict[str, Any], out: web.StreamResponse) -> None:
        await out.write(b"id: rid:1\n" + event("It"))

    server.reply = breaks
    typed("hi")
    assert chat.main(["--url", f"http://127.0.0.1:1,{server.url}", "--model", "m"]) == 0
    assert "It goes on after rid:1\n" in capsys.readouterr().out


def test_ctrl_c_ends_the_answer_at_the_server_too_and_the_chat_goes_on(
    server: Server, typed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    main_thread = threading.get_ident()

    async def endless(body: dict[str, Any], out: web.StreamResponse) -> None:
        if len(server.bodies) > 1:
            return await server.hello(body, out)
        await out.write(event("begun"))
        signal.pthread_kill(main_thread, signal.SIGINT)  # as a terminal does
        await asyncio.Event().wait()

    server.reply = endless
    typed("one", "two")
    assert chat.main(["--url", server.url, "--model", "m"]) == 0
    assert server.hung_up.wait(10)
    assert "[ended]" in capsys.readouterr().out
    assert [message["role"] for message in server.bodies[1]["messages"]][-1] == "user"


def test_words_of_a_model_cannot_control_the_terminal(
    server: Server, typed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    async def evil(body: dict[str, Any], out: web.StreamResponse) -> None:
        await out.write(event("\x1b[2Ja\tb\nc é") + b"data: [DONE]\n\n")

    server.reply = evil
    typed("hi")
    chat.main(["--url", server.url, "--model", "m"])
    assert "\\x1b[2Ja\tb\nc é\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--url", "http://127.0.0.1:1"], "headrace chat: nothing answers at http://127.0.0.1:1; is `headrace serve`"),
        (["--url", "nonsense"], "headrace chat: url: should match pattern"),
    ],
)
def test_no_server_is_one_sentence(args: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.main(args) == 1
    error = capsys.readouterr().err
    assert error.startswith(sentence) and error.count("\n") == 1


def test_a_conversation_begins_with_the_system_message_if_there_is_one() -> None:
    conversation = Conversation()
    conversation.add("user", "x")
    conversation.reset()
    assert conversation.messages == []
