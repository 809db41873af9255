"""`headrace chat`: a conversation in the terminal with any OpenAI-style server; answers appear as they are made.

Keeps the history and sends all of it each time. Ctrl-C ends an answer, which then stays in the history as far as it
got; at the prompt it leaves.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from shared.logs import escape
from shared.options import add_options, given
from shared.settings import ClientSettings, SettingsError, current_environ, load

CONNECT_TIMEOUT_S = 10.0
MAX_EVENT_BYTES = 1 << 20
HELP = "Type a message. /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C ends an answer.\n"


class ChatError(Exception):
    """Why there is no answer; one sentence for people."""


@dataclass
class Conversation:
    """What is sent with every message."""

    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def add(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})


async def events(content: aiohttp.StreamReader) -> AsyncIterator[Any]:
    """The JSON values of a stream of server-sent events, up to `[DONE]`; ChatError for one that tells an error."""
    async for line in content:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ChatError(error_text(event, "the answer broke off"))
        yield event
    raise ChatError("the connection was lost in the middle of the answer")


def error_text(body: Any, default: str) -> str:
    """The message of an error body in OpenAI's shape."""
    with contextlib.suppress(KeyError, TypeError):
        return str(body["error"]["message"])
    return default


class Client:
    """Requests to one server. Used from one event loop, between `open` and `close`."""

    def __init__(self, settings: ClientSettings) -> None:
        self._url = settings.url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout, read_bufsize=MAX_EVENT_BYTES)

    async def close(self) -> None:
        if self._session:
            await self._session.close()

    async def first_model(self) -> str:
        async with self._call("GET", "/v1/models") as response:
            models = (await response.json())["data"]
        if not models:
            raise ChatError(f"{self._url} serves no model")
        return str(models[0]["id"])

    async def answer(self, body: dict[str, Any], show: Callable[[str], None]) -> None:
        """Shows each piece of the answer's text as it comes."""
        async with self._call("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
            async for event in events(response.content):
                for choice in event.get("choices", ()):
                    if text := choice["delta"].get("content"):
                        show(text)

    @contextlib.asynccontextmanager
    async def _call(self, method: str, path: str, **kwargs: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session
        try:
            async with self._session.request(method, self._url + path, **kwargs) as response:
                if response.status != 200:
                    body = await response.json() if response.content_type == "application/json" else None
                    raise ChatError(error_text(body, f"the server answered {response.status} {response.reason}"))
                yield response
        except aiohttp.ClientConnectorError as e:
            raise ChatError(f"nothing answers at {self._url}; is `headrace serve` running?") from e
        except (aiohttp.ClientError, TimeoutError, ValueError) as e:
            raise ChatError(f"the server's answer cannot be read: {e or type(e).__name__}") from e


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="headrace chat", description="Chat in the terminal.", epilog=HELP, allow_abbrev=False
    )
    parser.add_argument("--model", help="name of the model (the first that the server has)")
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="longest answer (%(default)s)")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is greedy (the server's default)")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same answer")
    add_options(parser, [ClientSettings])
    return parser.parse_args(argv)


def request_body(options: argparse.Namespace, model: str, conversation: Conversation) -> dict[str, Any]:
    body = {"model": model, "messages": conversation.messages, "max_tokens": options.max_tokens}
    optional = {"temperature": options.temperature, "seed": options.seed}
    return body | {name: value for name, value in optional.items() if value is not None}


def show_text(text: str) -> None:
    """A model's words, which are not trusted to control the terminal."""
    sys.stdout.write("".join(c if c in "\n\t" else escape(c) for c in text))
    sys.stdout.flush()


def converse(runner: asyncio.Runner, client: Client, options: argparse.Namespace) -> None:
    """Reads messages until the end of input; the loop runs only while an answer comes, so Ctrl-C is plain."""
    model = options.model or runner.run(client.first_model())
    conversation = Conversation(options.system)
    conversation.reset()
    sys.stdout.write(f"{escape(model)}. {HELP}")
    while (line := _read_line()) is not None:
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            conversation.reset()
        elif line:
            conversation.add("user", line)
            _answer(runner, client, request_body(options, model, conversation), conversation)


def _read_line() -> str | None:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        sys.stdout.write("\n")
        return None


def _answer(runner: asyncio.Runner, client: Client, body: dict[str, Any], conversation: Conversation) -> None:
    pieces: list[str] = []

    def show(text: str) -> None:
        pieces.append(text)
        show_text(text)

    try:
        runner.run(client.answer(body, show))
    except KeyboardInterrupt:
        sys.stdout.write(" [ended]")
    except ChatError as e:
        sys.stdout.write(f"[{escape(str(e))}]")
    sys.stdout.write("\n")
    if pieces:
        conversation.add("assistant", "".join(pieces))
    else:
        conversation.messages.pop()  # a message without an answer would be sent again with the next


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        client = Client(load(ClientSettings, current_environ() | given(options, [ClientSettings])))
        with asyncio.Runner() as runner:
            runner.run(client.open())
            try:
                converse(runner, client, options)
            finally:
                runner.run(client.close())
    except (SettingsError, ChatError) as e:
        sys.stderr.write(f"headrace chat: {e}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
