"""Around every HTTP request: its id, its errors in one shape, its count; and what each answer's head says.

Decides nothing about what is served; who may call is `auth.py`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from services.gateway import deadlines, resuming
from services.gateway.admission import TryLater, rate_limit_headers
from services.gateway.errors import ApiError, error_body
from services.gateway.http_server import SERVER_NAME, json_response
from services.gateway.metrics_defs import GatewayMetrics
from shared.scripts import Admission

log = logging.getLogger(__name__)

MAX_CLIENT_ID_CHARS = 64
RID: web.RequestKey[str] = web.RequestKey("rid", str)  # of the request, and of its record in Redis
ADMISSION: web.RequestKey[Admission] = web.RequestKey("admission", Admission)
CLIENT_ID: web.RequestKey[str] = web.RequestKey("client_id", str)

ALLOWED_HEADERS = ", ".join(
    ["Authorization", "Content-Type", "X-Request-Id", resuming.IDEMPOTENCY_KEY, resuming.LAST_EVENT_ID, resuming.RESUME]
    + [deadlines.HEADER]
)
EXPOSED_HEADERS = ", ".join(
    ["X-Request-Id", "Retry-After"]
    + [f"x-ratelimit-{of}-{what}" for of in ("limit", "remaining", "reset") for what in ("requests", "tokens")]
)
_HTTP_ERRORS = {
    404: ("there is no such path", "not_found"),
    405: ("the path does not allow this method", "method_not_allowed"),
    413: ("the body is too large", "body_too_large"),
}


def new_rid() -> str:
    return secrets.token_hex(16)


def clean_client_id(text: str) -> str:
    """What of a client's own id is echoed and logged: printable ASCII, cut."""
    return "".join(c for c in text if " " < c <= "~")[:MAX_CLIENT_ID_CHARS]


def error_response(error: ApiError) -> web.Response:
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, TryLater) else {}
    if isinstance(error, TryLater) and error.admission is not None:
        headers |= rate_limit_headers(error.admission)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 409:
        headers["X-Should-Retry"] = "false"  # OpenAI's client would, and so generate anew what another connection has
    return json_response(error_body(error), error.status, headers)


def observe(metrics: GatewayMetrics) -> Middleware:
    """The outermost: whatever happens inside ends as an answer in OpenAI's shape, and is counted."""

    @web.middleware
    async def observed(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[RID] = new_rid()
        request[CLIENT_ID] = clean_client_id(request.headers.get("X-Request-Id", ""))
        status = 499  # the client left
        try:
            response = await _answered(request, handler)
            status = response.status
            return response
        finally:
            metrics.http_requests.labels(request.match_info.route.name or "unknown", str(status)).inc()

    return observed


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as e:
        return error_response(e)
    except web.HTTPException as e:
        message, code = _HTTP_ERRORS.get(e.status, (e.reason.lower(), None))
        response = error_response(ApiError(e.status, message, code=code))
        if "Allow" in e.headers:
            response.headers["Allow"] = e.headers["Allow"]
        return response
    except ConnectionError:
        raise  # of the client: there is nobody to answer
    except Exception:
        log.exception("%s: a handler failed", request[RID])
        return error_response(ApiError(500, "internal error", code="internal_error"))


def last_of_connections(
    is_draining: Callable[[], bool],
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """While the gateway shuts down an answer ends its connection, so that the client's next request goes elsewhere."""

    async def prepare(_: web.Request, response: web.StreamResponse) -> None:
        if is_draining():
            response.force_close()
            response.headers["Connection"] = "close"

    return prepare


def cross_origin(origins: tuple[str, ...]) -> Middleware:
    """Answers a browser's question before the call itself, which carries no key; no origin is allowed by default."""

    @web.middleware
    async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not (asks and _allowed_origin(request, origins)):
            return await handler(request)
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": ALLOWED_HEADERS,
            "Access-Control-Max-Age": "600",
        }
        return web.Response(status=204, headers=headers)

    return preflight


def _allowed_origin(request: web.Request, origins: tuple[str, ...]) -> str:
    origin = request.headers.get("Origin", "")
    if "*" in origins:
        return "*"
    return origin if origin in origins else ""


def head_of_answers(origins: tuple[str, ...]) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """A signal that completes every answer's headers before they are sent."""

    async def complete(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = SERVER_NAME
        response.headers["X-Content-Type-Options"] = "nosniff"
        rid = request.get(RID)
        if rid is not None:
            response.headers["X-Request-Id"] = request[CLIENT_ID] or rid
        if ADMISSION in request:
            response.headers.update(rate_limit_headers(request[ADMISSION]))
        if origins:
            response.headers["Vary"] = "Origin"
        if origin := _allowed_origin(request, origins):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS

    return complete
