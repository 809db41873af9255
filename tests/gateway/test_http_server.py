"""Connections: how many there may be, and what happens to those that take nothing."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Awaitable, Callable

import pytest

from services.gateway import http_server
from services.gateway.http_server import MAX_FILES, RESERVED_FILES, max_connections
from tests.gateway.conftest import Served
from tests.gateway.raw_client import RawClient
from tests.helpers import wait_until

Serve = Callable[..., Awaitable[Served]]


async def test_a_connection_too_many_is_told_so_and_others_go_on(serve_with: Serve) -> None:
    served = await serve_with(max_connections=2)
    held = [await RawClient.connect(served) for _ in range(2)]
    for client in held:
        client.writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in await client.reader.readuntil(b"\r\n")
    refused = await RawClient.connect(served)
    answer = await refused.reader.read()
    assert answer.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1\r\n" in answer and b"too_many_connections" in answer
    assert served.service.guard.num_refused == 1
    held[0].writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
    held[1].close()
    await held[1].writer.wait_closed()

    async def is_served() -> bool:
        client = await RawClient.connect(served)
        client.writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await client.reader.read()
        client.close()
        return b" 200 OK" in answer

    await wait_until(is_served)
    for client in (*held, refused):
        client.close()


@pytest.mark.parametrize(
    ("soft", "hard", "asked", "allowed", "raised"),
    [
        (64, 64, 0, 16, None),
        (1024, 4096, 0, 3584, 4096),
        (1024, resource.RLIM_INFINITY, 0, MAX_FILES * 7 // 8, MAX_FILES),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 100, 100, None),
        (1024, 1024, 5000, 896, None),
        (RESERVED_FILES, RESERVED_FILES, 0, 1, None),
    ],
)
def test_as_many_as_there_are_descriptors_for(
    soft: int, hard: int, asked: int, allowed: int, raised: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits[0]))
    assert max_connections(asked) == allowed
    assert set_to == ([] if raised is None else [raised])


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel has no such option")
async def test_the_rest_of_an_answer_that_nobody_takes_is_cut_too(
    serve_with: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than what makes a writer wait, so that no handler is left that would notice."""
    monkeypatch.setattr(http_server, "SEND_BUFFER_BYTES", 1 << 12)
    served = await serve_with(send_timeout_s=0.5)
    client = await RawClient.connect(served)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
    await wait_until(lambda: served.service.guard.num_cut == 1)
    client.close()


async def test_a_client_that_takes_too_little_is_cut(serve_with: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes something all the time, so that the kernel has no reason to cut it."""
    monkeypatch.setattr(http_server, "SEND_BUFFER_BYTES", 1 << 12)
    served = await serve_with(send_timeout_s=1)
    client = await RawClient.connect(served)
    client.writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 12)
    num_read = 0
    with contextlib.suppress(ConnectionError):
        while piece := await client.reader.read(4096):
            num_read += len(piece)
            await asyncio.sleep(0.15)
    assert served.service.guard.num_cut == 1 and num_read > 20_000
    client.close()
