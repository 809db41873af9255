"""What a client's headers say about taking up a stream: where it is, how long it may stay away, which call it repeats.
*Pure.*
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from services.gateway import sse
from services.gateway.errors import ApiError, BadRequest
from services.gateway.sse import Place

RESUME = "X-Headrace-Resume"
IDEMPOTENCY_KEY = "Idempotency-Key"
LAST_EVENT_ID = "Last-Event-ID"
MAX_KEY_CHARS = 255
RETRY_MS = 30_000  # how long a call that may be repeated goes on without a client where nothing else is said
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,3})?")

Places = tuple[Place | None, ...]


@dataclass(frozen=True, slots=True)
class After:
    """What a client has: a place a choice, or (None) everything."""

    places: Places | None


def idempotency_key(headers: Mapping[str, str]) -> str | None:
    """None where the call has none."""
    key = headers.get(IDEMPOTENCY_KEY)
    if key is not None and not (0 < len(key) <= MAX_KEY_CHARS and all(" " <= c <= "~" for c in key)):
        raise BadRequest(
            f"{IDEMPOTENCY_KEY} must be 1 to {MAX_KEY_CHARS} printable ASCII characters", param=IDEMPOTENCY_KEY
        )
    return key


def resume_ms(headers: Mapping[str, str], default_ms: int, max_s: float) -> int:
    """How long generation goes on without a client."""
    text = headers.get(RESUME)
    if text is None:
        return default_ms
    if _SECONDS.fullmatch(text) is None or float(text) > max_s:
        raise BadRequest(f"{RESUME} must be a number of seconds from 0 to {max_s:g}", param=RESUME)
    return round(float(text) * 1000)


def after(headers: Mapping[str, str], query: Mapping[str, str], rid: str) -> After | None:
    """What the client has of the call `rid`; None: nothing. The header wins, since a browser that comes back by itself
    repeats the address."""
    text = headers.get(LAST_EVENT_ID) or query.get("after") or ""
    if not text:
        return None
    parsed = sse.parse_event_id(text)
    if parsed is None or parsed[0] != rid:
        raise BadRequest(f"{LAST_EVENT_ID} is no event id of this stream", param=LAST_EVENT_ID)
    return After(parsed[1])


def not_found() -> ApiError:
    """Also of another API key's stream: what exists is told only to whom it belongs."""
    return ApiError(404, "there is no such stream", code="stream_not_found")


def expired() -> ApiError:
    return ApiError(410, "the stream is not kept any more", code="stream_expired")


def moved() -> ApiError:
    return ApiError(409, "another connection has taken up this stream", code="stream_moved")


def too_many() -> ApiError:
    return ApiError(429, "this stream was taken up too often", code="too_many_attachments")


def other_body() -> ApiError:
    return ApiError(
        422, f"another request with this {IDEMPOTENCY_KEY} was not the same", code="idempotency_key_reused",
        param=IDEMPOTENCY_KEY,
    )  # fmt: skip


def beyond_the_end() -> BadRequest:
    return BadRequest(f"{LAST_EVENT_ID} lies beyond the end of the stream", param=LAST_EVENT_ID)
