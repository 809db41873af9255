"""JSON and server-sent events as bytes, and the event ids by which a client takes up a stream. *Pure.*

An event id is `<rid>:<p0>,<p1>,...`: for each choice the position (tokens) of what the client has, with an `e` when
it has the choice's end; `<rid>:end` when it has everything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_EVENT_ID = re.compile(r"([0-9A-Za-z_-]{1,64}):(end|[0-9]{1,9}e?(?:,[0-9]{1,9}e?){0,127})")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a client is in a choice's stream; ended: it has the event with the finish reason."""

    position: int
    ended: bool = False


def dump(value: Any) -> bytes:
    """Strict JSON; ValueError for NaN and infinity, which no reader has to accept."""
    return _encode(value).encode("utf-8")


def event(value: Any, event_id: str = "") -> bytes:
    """One event with a JSON value, which never contains a line break."""
    head = f"id: {event_id}\ndata: " if event_id else "data: "
    return f"{head}{_encode(value)}\n\n".encode()


def done(event_id: str = "") -> bytes:
    """The last event of a stream that ended well."""
    return f"id: {event_id}\n".encode() + DONE if event_id else DONE


def event_id(rid: str, places: Iterable[Place]) -> str:
    return f"{rid}:" + ",".join([f"{p.position}e" if p.ended else str(p.position) for p in places])


def end_id(rid: str) -> str:
    return f"{rid}:end"


def parse_event_id(text: str) -> tuple[str, tuple[Place, ...] | None] | None:
    """(rid, a place for each choice, or None at the stream's end); None if this is no event id of ours."""
    match = _EVENT_ID.fullmatch(text)
    if match is None:
        return None
    rid, places = match.groups()
    if places == "end":
        return rid, None
    return rid, tuple(Place(int(p.rstrip("e")), p.endswith("e")) for p in places.split(","))
