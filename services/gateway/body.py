"""Reads requests' bodies: bounded in size, in time and in encoding, also where the client says no length."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from services.gateway.admission import unavailable
from services.gateway.errors import ApiError

BODY_TIMEOUT_S = 30.0
MAX_BODIES = 16  # of the largest size, that may be held at once; many more of an ordinary size


@dataclass(slots=True)
class _Held:
    """Of one body."""

    num_bytes: int = 0


class Bodies:
    """All bodies that this gateway holds. Each is bounded, and so are all together: else a thousand clients that send
    the rest slowly would have a thousand times the memory of one."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self.max_bytes = MAX_BODIES * max_body_bytes
        self.num_bytes = 0

    @asynccontextmanager
    async def read(self, request: web.Request) -> AsyncIterator[bytes]:
        """The whole body, for the time of the block; ApiError 408, 413, 415 or 503."""
        headers = request.headers
        content, transfer = headers.get("Content-Encoding", ""), headers.get("Transfer-Encoding", "")
        if content.strip().lower() not in ("", "identity") or transfer.strip().lower() not in ("", "chunked"):
            raise ApiError(415, "a compressed body is not accepted", code="unsupported_encoding")
        if (request.content_length or 0) > self._max_body_bytes:
            raise self._too_large()
        held = _Held()
        try:
            yield await self._received(request, held)
        finally:
            self.num_bytes -= held.num_bytes

    async def _received(self, request: web.Request, held: _Held) -> bytes:
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for part in request.content.iter_any():
                    parts.append(part)
                    held.num_bytes += len(part)
                    self.num_bytes += len(part)
                    if held.num_bytes > self._max_body_bytes:
                        raise self._too_large()
                    if self.num_bytes > self.max_bytes:
                        raise unavailable("too many large requests are being read", "too_many_bodies")
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s", code="body_timeout") from None
        except web.RequestPayloadError:
            raise ApiError(400, "the body ended early or is not valid HTTP", code="incomplete_body") from None
        return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_body_bytes} bytes", code="body_too_large")
