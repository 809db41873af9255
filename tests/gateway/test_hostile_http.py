"""HTTP that no honest client sends: one reading of every request, bounded in size, time and work, and others go on."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp.http_parser
import pytest

from services.gateway import body, http_server
from services.gateway.http_server import UnsafeParser, check_parser
from tests.gateway.conftest import Served
from tests.gateway.raw_client import RawClient
from tests.helpers import bounded_work, wait_until

Serve = Callable[..., Awaitable[Served]]
GET = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
HEAD = b"POST /tokenize HTTP/1.1\r\nHost: x\r\n"


async def answers(served: Served, data: bytes, timeout_s: float = 5.0) -> list[tuple[int, bytes]]:
    """(status, body) of everything that is answered until the server closes or says no more."""
    client = await RawClient.connect(served)
    client.writer.write(data)
    found: list[tuple[int, bytes]] = []
    with contextlib.suppress(asyncio.IncompleteReadError, TimeoutError, ConnectionError):
        async with asyncio.timeout(timeout_s):
            while True:
                head = (await client.reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                [length] = [line[16:] for line in head.split("\r\n") if line.startswith("content-length: ")] or ["0"]
                found.append((int(head.split()[1]), await client.reader.readexactly(int(length))))
                if "connection: close" in head:
                    break
    client.close()
    return found


# --- one reading of every request --------------------------------------------------------------------------------

AMBIGUOUS: dict[str, bytes] = {
    "length and chunks": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "two lengths in one": b"Content-Length: 5, 6\r\n\r\nhello",
    "signed length": b"Content-Length: +5\r\n\r\nhello",
    "negative length": b"Content-Length: -1\r\n\r\nhello",
    "hexadecimal length": b"Content-Length: 0x5\r\n\r\nhello",
    "long length": b"Content-Length: 99999999999999999999999\r\n\r\nhello",
    "words as length": b"Content-Length: five\r\n\r\nhello",
    "no length": b"Content-Length: \r\n\r\nhello",
    "other coding": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunks not last": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunks twice": b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "chunks in two headers": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "space before colon": b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "space before name": b" Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "folded": b"X-A: 1\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bare line feed": b"X-A: 1\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bare return": b"X-A: 1\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "nul": b"X-A: \x00\r\nContent-Length: 5\r\n\r\nhello",
    "no colon": b"Transfer-Encoding chunked\r\n\r\n0\r\n\r\n",
    "no name": b": chunked\r\n\r\n0\r\n\r\n",
    "name of another script": b"Tr\xc3\xa4nsfer: chunked\r\n\r\n0\r\n\r\n",
    "two hosts": b"Host: y\r\nContent-Length: 0\r\n\r\n",
    "chunk size signed": b"Transfer-Encoding: chunked\r\n\r\n+5\r\nhello\r\n0\r\n\r\n",
    "chunk size with 0x": b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
    "chunk size negative": b"Transfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n",
    "chunk size huge": b"Transfer-Encoding: chunked\r\n\r\n" + b"F" * 17 + b"\r\nhello\r\n0\r\n\r\n",
    "chunk size missing": b"Transfer-Encoding: chunked\r\n\r\n\r\nhello\r\n0\r\n\r\n",
    "chunk too long": b"Transfer-Encoding: chunked\r\n\r\n3\r\nhello\r\n0\r\n\r\n",
    "chunk ends with line feed": b"Transfer-Encoding: chunked\r\n\r\n5\nhello\n0\n\n",
}


@pytest.mark.parametrize("rest", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
async def test_what_two_readers_could_read_in_two_ways_is_refused_and_ends_the_connection(
    served: Served, rest: bytes
) -> None:
    found = await answers(served, HEAD + rest + SMUGGLED)
    assert [status for status, _ in found] in ([400], [400, 400]), found
    assert b'"object"' not in b"".join(text for _, text in found), "the second request was answered"
    for _, text in found:
        assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "line",
    [b"GET /health/live", b"GET /health/live HTTP/0.9", b"GET /health/live HTTP/9.1",
     b"GET\t/health/live\tHTTP/1.1", b"PRI * HTTP/2.0", b"G\x00T / HTTP/1.1", b"GET /\x00 HTTP/1.1",
     b"GET / HTTP/1.1 x", b"/ HTTP/1.1", b"GET", b"get / HTTP/1.1"],
)  # fmt: skip
async def test_a_first_line_that_is_none_is_refused(served: Served, line: bytes) -> None:
    found = await answers(served, line + b"\r\nHost: x\r\n\r\n" + SMUGGLED)
    assert found and found[0][0] in (400, 405) and b'"object"' not in found[-1][1], found


def test_the_parser_written_in_c_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    check_parser()
    monkeypatch.setattr(aiohttp.http_parser, "HttpRequestParser", aiohttp.http_parser.HttpRequestParserPy)
    with pytest.raises(UnsafeParser, match="AIOHTTP_NO_EXTENSIONS"):
        check_parser()


# --- paths -------------------------------------------------------------------------------------------------------

ODD_PATHS = [
    "//v1/models", "/v1//models", "/v1/../v1/models", "/./v1/models", "/health/live/../../v1/models",
    "/health/live/..%2f..%2fv1/models", "/v1/%6dodels", "/%76%31/models", "/v1%2fmodels", "/v1/models/", "/v1/models?",
    "/v1/models#", "/v1/models;x=1", "/v1/models%00", "/v1/models%0d%0a", "/health/live%2f..%2fmetrics", "/metrics/",
    "/%2e%2e/metrics", "/health/live?/../../metrics", "http://x/v1/models", "http://x/health/live/../../metrics",
    "http://x:y/v1/models", "http://user@x/metrics", "//x/metrics", "/\\metrics", "/openapi.json", "*", "x:80", "",
]  # fmt: skip
ODD_HOSTS = ["x", "evil.example", "x, y", "[::1", "", "x/health/live", "x\\health"]


async def test_no_way_to_write_a_path_or_a_host_leads_around_the_key(serve_with: Serve) -> None:
    served = await serve_with(api_keys=("k",))
    for path, host, method in itertools.product(ODD_PATHS, ODD_HOSTS, ("GET", "POST")):
        head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        for status, text in await answers(served, head.encode()):
            assert status in (400, 401) or (status in (200, 405) and "/health/live" in path), (path, status, text)
            assert b"headrace_" not in text and b'"object"' not in text, text


# --- bounds ------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def others_go_on(served: Served, longest_s: float = 1.0) -> AsyncIterator[None]:
    """All the while another client is answered at once."""
    over = asyncio.Event()
    longest = 0.0

    async def ask() -> None:
        nonlocal longest
        while not over.is_set():
            started = time.perf_counter()
            async with served.session.get(served.url + "/health/live") as response:
                assert response.status == 200
            longest = max(longest, time.perf_counter() - started)
            await asyncio.sleep(0.005)

    asking = asyncio.create_task(ask())
    try:
        yield
    finally:
        over.set()
        await asking
    assert longest < longest_s


async def drip(client: RawClient, data: bytes, every_s: float) -> None:
    """A byte at a time, until the server has enough of it."""
    with contextlib.suppress(ConnectionError):
        for i in range(len(data)):
            client.writer.write(data[i : i + 1])
            await client.writer.drain()
            await asyncio.sleep(every_s)


async def test_a_head_that_comes_in_drops_is_given_up_all_the_same(
    serve_with: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.2)
    served = await serve_with()
    client = await RawClient.connect(served)
    dripping = asyncio.create_task(drip(client, HEAD + b"X-A: " + b"a" * 10_000, 0.02))
    async with others_go_on(served), asyncio.timeout(5):
        assert await client.reader.read() == b""
    dripping.cancel()
    client.close()


async def test_a_body_that_comes_in_drops_is_given_up_all_the_same(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.2)
    client = await RawClient.connect(served)
    client.writer.write(HEAD + b"Content-Length: 100000\r\n\r\n")
    dripping = asyncio.create_task(drip(client, b"x" * 1000, 0.02))
    async with others_go_on(served), asyncio.timeout(5):
        assert (await client.reader.readline()).startswith(b"HTTP/1.1 408")
    dripping.cancel()
    client.close()


async def test_a_million_chunks_of_one_byte(serve_with: Serve) -> None:
    served = await serve_with(max_body_bytes=1 << 20)
    text = b'{"prompt": "' + b"x" * 2000 + b'"}'
    client = await RawClient.connect(served)
    client.writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    async with others_go_on(served), asyncio.timeout(40):
        with contextlib.suppress(ConnectionError):
            client.writer.write(b"".join(b"1\r\n%c\r\n" % c for c in text))
            for _ in range(100):
                client.writer.write(b"1\r\n \r\n" * 11_000)
                await client.writer.drain()
        assert (await client.reader.readline()).startswith(b"HTTP/1.1 413")
    client.close()


async def test_an_endless_body_is_cut_short_where_it_is_too_large(serve_with: Serve) -> None:
    served = await serve_with(max_body_bytes=1 << 20)
    client = await RawClient.connect(served)
    client.writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    async with others_go_on(served), asyncio.timeout(10):  # how much comes through until then is the machine's
        with contextlib.suppress(ConnectionError):
            while True:
                client.writer.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
                await client.writer.drain()
    client.close()


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", gzip.compress(b" " * 50_000_000)),
        ("GZIP", gzip.compress(b"{}")),
        ("deflate", zlib.compress(b" " * 50_000_000)),
        ("br", b"x"),
        ("zstd", b"x"),
        ("identity, gzip", b"x"),
        ("gzip, gzip, gzip", b"x"),
        ("x", b"{}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_compressed_is_refused_without_unpacking(served: Served, encoding: str, data: bytes) -> None:
    async with others_go_on(served):
        with bounded_work(0.5):
            async with served.session.post(
                served.url + "/tokenize", data=data, headers={"Content-Encoding": encoding}
            ) as response:
                assert response.status == 415


async def test_a_transfer_coding_besides_chunks_is_refused(served: Served) -> None:
    found = await answers(served, HEAD + b"Transfer-Encoding: gzip, chunked\r\nConnection: close\r\n\r\n0\r\n\r\n")
    assert [status for status, _ in found] == [415]


async def test_requests_one_behind_the_other_are_answered_in_order(served: Served) -> None:
    texts = [b'{"prompt": "%d"}' % i for i in range(200)]
    data = b"".join(HEAD + b"Content-Length: %d\r\n\r\n" % len(t) + t for t in texts)
    async with others_go_on(served):
        found = await answers(served, data, timeout_s=1.5)
    counted = [len(json.loads(text)["tokens"]) for status, text in found if status == 200]
    assert len(counted) == 200
    assert counted == [1 + len(str(i)) for i in range(200)]


async def test_the_bodies_that_are_held_at_once_are_bounded_together(serve_with: Serve) -> None:
    served = await serve_with(max_body_bytes=1 << 20)
    budget = served.service.bodies
    assert budget.max_bytes == body.MAX_BODIES * (1 << 20)
    clients = []
    for _ in range(body.MAX_BODIES):
        client = await RawClient.connect(served)
        client.writer.write(HEAD + b"Content-Length: 1048576\r\n\r\n" + b"x" * ((1 << 20) - 1))
        clients.append(client)
    await wait_until(lambda: budget.num_bytes == body.MAX_BODIES * ((1 << 20) - 1), 10)
    data = b'{"prompt": "' + b"x" * 5000 + b'"}'
    async with served.session.post(served.url + "/tokenize", data=data) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["code"] == "too_many_bodies"
    for client in clients:
        client.close()
    await wait_until(lambda: budget.num_bytes == 0, 10)
    async with served.session.post(served.url + "/tokenize", data=data) as response:
        assert response.status == 200
    assert budget.num_bytes == 0
