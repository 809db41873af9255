"""`headrace chat`: a conversation in the terminal with any OpenAI-style server; answers appear as they are made.

Keeps the history and sends all of it each time. Ctrl-C ends an answer, which then stays in the history as far as it
got; at the prompt it leaves. An answer goes on when a gateway dies (`client.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.tools.client import AnswerError, StreamClient
from shared.logs import escape
from shared.options import add_options, given
from shared.settings import ClientSettings, SettingsError, current_environ, load

HELP = "Type a message. /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C ends an answer.\n"


@dataclass
class Conversation:
    """What is sent with every message."""

    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def add(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})


class _Ended(Exception):
    """Ctrl-C while an answer came."""


async def first_model(client: StreamClient) -> str:
    models = (await client.get("/v1/models"))["data"]
    if not models:
        raise AnswerError("the server serves no model")
    return str(models[0]["id"])


async def answer(client: StreamClient, body: dict[str, Any], show: Callable[[str], None]) -> None:
    """Shows each piece of the answer's text as it comes. _Ended on Ctrl-C: a handler of the loop's own also wakes a
    loop that is just about to wait."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await _show_events(client, body, show)
    except asyncio.CancelledError:
        raise _Ended from None
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _show_events(client: StreamClient, body: dict[str, Any], show: Callable[[str], None]) -> None:
    async with contextlib.aclosing(client.stream("/v1/chat/completions", body)) as events:
        async for event in events:
            for choice in event.get("choices", ()):
                if text := choice["delta"].get("content"):
                    show(text)


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


def converse(runner: asyncio.Runner, client: StreamClient, options: argparse.Namespace) -> None:
    """Reads messages until the end of input; the loop runs only while an answer comes, so Ctrl-C is plain."""
    model = options.model or runner.run(first_model(client))
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


def _answer(runner: asyncio.Runner, client: StreamClient, body: dict[str, Any], conversation: Conversation) -> None:
    pieces: list[str] = []

    def show(text: str) -> None:
        pieces.append(text)
        show_text(text)

    try:
        runner.run(answer(client, body, show))
    except _Ended:
        sys.stdout.write(" [ended]")
    except AnswerError as e:
        sys.stdout.write(f"[{escape(str(e))}]")
    sys.stdout.write("\n")
    if pieces:
        conversation.add("assistant", "".join(pieces))
    else:
        conversation.messages.pop()  # a message without an answer would be sent again with the next


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        settings = load(ClientSettings, current_environ() | given(options, [ClientSettings]))
        client = StreamClient(settings.url.split(","), settings.api_key)
        with asyncio.Runner() as runner:
            runner.run(client.__aenter__())
            try:
                converse(runner, client, options)
            finally:
                runner.run(client.__aexit__())
    except (SettingsError, AnswerError) as e:
        sys.stderr.write(f"headrace chat: {e}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
