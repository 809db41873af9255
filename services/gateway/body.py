"""Reads a request's body: bounded in size, in time and in encoding, also where the client says no length."""

from __future__ import annotations

import asyncio

from aiohttp import web

from services.gateway.errors import ApiError

BODY_TIMEOUT_S = 30.0


async def read_body(request: web.Request, max_bytes: int) -> bytes:
    """The whole body; ApiError 408, 413 or 415."""
    if request.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
        raise ApiError(415, "a compressed body is not accepted", code="unsupported_encoding")
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.content.iter_any():
                parts.append(part)
                size += len(part)
                if size > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s", code="body_timeout") from None
    except web.RequestPayloadError:
        raise ApiError(400, "the body ended early or is not valid HTTP", code="incomplete_body") from None
    return b"".join(parts)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
