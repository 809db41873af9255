"""The banner: its line to copy works as it stands, and readiness is asked of the gateway."""

from __future__ import annotations

import asyncio
import json
import shlex

import pytest

from services.banner import banner, is_ready, url_of
from tests.helpers import free_port


def test_the_line_to_copy_is_a_request_the_shell_understands() -> None:
    text = banner("o'neil/model", "cpu", "0.0.0.0", [8000, 8001], needs_key=True)
    line = next(line for line in text.splitlines() if "curl" in line)
    words = shlex.split(line)
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1])["model"] == "o'neil/model"
    assert "Authorization: Bearer $HEADRACE_API_KEY" in words
    assert "serves o'neil/model on cpu" in text and "http://127.0.0.1:8001" in text


def test_addresses_that_are_listened_on_become_ones_to_call() -> None:
    assert url_of("::", 1) == url_of("::1", 1) == "http://[::1]:1"
    assert url_of("0.0.0.0", 1) == "http://127.0.0.1:1" and url_of("a.example", 1) == "http://a.example:1"


@pytest.mark.parametrize(
    ("reply", "ready"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", True),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n200", False),
        (b"nonsense", False),
        (b"", False),
    ],
)
async def test_ready_is_what_the_gateway_says(reply: bytes, ready: bool) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readline()).startswith(b"GET /health/ready ")
        writer.write(reply)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        assert await is_ready("127.0.0.1", server.sockets[0].getsockname()[1]) is ready


async def test_nothing_listening_is_not_ready() -> None:
    assert await is_ready("127.0.0.1", free_port()) is False
