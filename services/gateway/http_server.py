"""aiohttp's server with our limits and our way to say that a request could not even be read.

Nothing here knows what is served: `Runner` is `web.AppRunner` for any application.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any

import aiohttp.http_parser
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from services.gateway.errors import ApiError, BadRequest, error_body

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75.0  # also how long a client may take to send the head of its request
LINGER_S = 2.0  # how long the rest of a refused body is read, so that the client gets to see the refusal
SEND_BUFFER_BYTES = 128 * 1024  # what the kernel holds for a client that does not read; left alone it takes megabytes
MAX_HEADER_BYTES = 8190
MAX_HEADERS = 100
SERVER_NAME = "headrace"


class UnsafeParser(Exception):
    """aiohttp would read requests in Python; one sentence for the operator."""


def check_parser() -> None:
    """UnsafeParser unless requests are read by llhttp: the parser in Python has let requests be smuggled."""
    if aiohttp.http_parser.HttpRequestParser is aiohttp.http_parser.HttpRequestParserPy:
        raise UnsafeParser("aiohttp has no HTTP parser in C here: unset AIOHTTP_NO_EXTENSIONS, or install its wheel")


class _Connection(RequestHandler):
    __slots__ = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        super().connection_made(transport)

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
    def __init__(self, server: web.Server, **options: Any) -> None:
        super().__init__(
            server.request_handler, request_factory=server.request_factory, handler_cancellation=True, **options
        )
        self._options = options

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._options)


class Runner(web.AppRunner):
    """Cancels a handler when its client is gone; does not decompress bodies; logs no line a request of its own."""

    def __init__(self, app: web.Application, *, shutdown_timeout_s: float) -> None:
        super().__init__(app, access_log=None, shutdown_timeout=shutdown_timeout_s)

    async def _make_server(self) -> web.Server:
        return _Server(
            await super()._make_server(), access_log=None, auto_decompress=False, keepalive_timeout=KEEP_ALIVE_S,
            lingering_time=LINGER_S, max_line_size=MAX_HEADER_BYTES, max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
        )  # fmt: skip


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    data = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    return web.Response(
        body=data, status=status, content_type="application/json", headers={"Server": SERVER_NAME} | (headers or {})
    )
