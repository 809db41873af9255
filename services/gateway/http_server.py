"""aiohttp's server with our limits and our way to say that a request could not even be read.

Nothing here knows what is served: `Runner` is `web.AppRunner` for any application.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
from dataclasses import dataclass
from typing import Any

import aiohttp.http_parser
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from services.gateway.errors import ApiError, BadRequest, error_body
from services.gateway.sse import dump

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75.0  # also how long a client may take to send the head of its request
LINGER_S = 2.0  # how long the rest of a refused body is read, so that the client gets to see the refusal
SEND_BUFFER_BYTES = 128 * 1024  # what the kernel holds for a client that does not read; left alone it takes megabytes
MAX_HEADER_BYTES = 8190
MAX_HEADERS = 100
RESERVED_FILES = 48  # descriptors that are no client's
MAX_FILES = 1 << 16
BACKLOG = 1024
# So many connections asyncio accepts before one of them can be refused; and where no descriptor is left, it fails, logs
# and tries again as many times in a row.
ACCEPTS_AT_ONCE = 8
SERVER_NAME = "headrace"
_TOO_MANY_BODY = dump(error_body(ApiError(503, "too many connections are open", code="too_many_connections")))
TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nServer: headrace\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(_TOO_MANY_BODY), _TOO_MANY_BODY)
)


class UnsafeParser(Exception):
    """aiohttp would read requests in Python; one sentence for the operator."""


def check_parser() -> None:
    """UnsafeParser unless requests are read by llhttp: the parser in Python has let requests be smuggled."""
    if aiohttp.http_parser.HttpRequestParser is aiohttp.http_parser.HttpRequestParserPy:
        raise UnsafeParser("aiohttp has no HTTP parser in C here: unset AIOHTTP_NO_EXTENSIONS, or install its wheel")


@dataclass(slots=True)
class Guard:
    """What all connections of a server share: their bounds, and how often these were met."""

    send_timeout_s: float
    max_connections: int
    num_cut: int = 0
    num_refused: int = 0


def max_connections(asked: int) -> int:
    """As many as the process' file descriptors allow, whose limit is raised as far as that is permitted; the rest is
    for Redis and files. Without it a flood of connections would take the descriptor by which Redis is found again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = MAX_FILES if soft == resource.RLIM_INFINITY else soft
    allowed = max(1, files - max(RESERVED_FILES, files // 8))
    return min(asked or allowed, allowed)


def widen_backlogs(runner: web.AppRunner) -> None:
    """Lets more connections wait in the kernel than asyncio accepts at once."""
    for site in runner.sites:
        server = getattr(site, "_server", None)
        for listening in server.sockets if server is not None else ():
            with socket.socket(fileno=os.dup(listening.fileno())) as same:
                same.listen(BACKLOG)


class _Refused(asyncio.Protocol):
    """One connection too many: an answer that needs nothing of the request, and the end."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(TOO_MANY)
        transport.close()


class _Connection(RequestHandler):
    """Cut when the client does not take what is buffered for it: after send_timeout_s with a full buffer, and by the
    kernel when it has taken nothing at all for so long, which is also true of the rest of an answer."""

    __slots__ = ("_cut_timer", "_guard")

    def __init__(self, manager: web.Server, *, guard: Guard, **options: Any) -> None:
        super().__init__(manager, **options)
        self._guard = guard
        self._cut_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._guard.send_timeout_s * 1000))
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._disarm()
        if isinstance(exc, TimeoutError):  # by the kernel
            self._guard.num_cut += 1
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cut_timer = self._loop.call_later(self._guard.send_timeout_s, self._cut)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._disarm()

    def _disarm(self) -> None:
        if self._cut_timer is not None:
            self._cut_timer.cancel()
            self._cut_timer = None

    def _cut(self) -> None:
        if self.transport is not None:
            log.warning("a client that takes nothing any more is cut")
            self._guard.num_cut += 1
            self.transport.abort()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to a request that is no HTTP (400), or when even the error handling of the application failed.

        ConnectionError, which ends the connection, when a handler wants just that or its answer has begun.
        """
        if request.writer.output_size > 0 or isinstance(exc, ConnectionError):
            raise ConnectionError("the connection has to end")
        if status == 400:
            log.debug("a request could not be read: %s", type(exc).__name__)
            error: ApiError = BadRequest("the request is not valid HTTP, or its head is too large")
        else:
            log.error("a request failed outside of its handler", exc_info=exc)
            error = ApiError(status, "internal error", code="internal_error")
        response = json_response(error_body(error), status)
        response.force_close()
        return response


class _Server(web.Server):
    def __init__(self, server: web.Server, guard: Guard, **options: Any) -> None:
        super().__init__(
            server.request_handler, request_factory=server.request_factory, handler_cancellation=True, **options
        )
        self._guard = guard
        self._options = options

    def __call__(self) -> Any:
        if len(self.connections) >= self._guard.max_connections:
            self._guard.num_refused += 1
            return _Refused()
        return _Connection(self, guard=self._guard, loop=self._loop, **self._options)


class Runner(web.AppRunner):
    """Cancels a handler when its client is gone; does not decompress bodies; logs no line a request of its own."""

    def __init__(self, app: web.Application, guard: Guard, *, shutdown_timeout_s: float) -> None:
        super().__init__(app, access_log=None, shutdown_timeout=shutdown_timeout_s)
        self._guard = guard

    async def _make_server(self) -> web.Server:
        return _Server(
            await super()._make_server(), self._guard, access_log=None, auto_decompress=False,
            keepalive_timeout=KEEP_ALIVE_S, lingering_time=LINGER_S, max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES, max_headers=MAX_HEADERS,
        )  # fmt: skip


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """body: a value, or bytes that are JSON already."""
    data = body if isinstance(body, bytes) else dump(body)
    return web.Response(
        body=data, status=status, content_type="application/json", headers={"Server": SERVER_NAME} | (headers or {})
    )
