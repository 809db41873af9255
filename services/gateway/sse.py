"""JSON and server-sent events as bytes, and the event ids by which a client takes up a stream. *Pure.*

An event id is `<rid>:<p0>,<p1>,...`: for each choice the position (tokens) of what the client has, with an `e` when
it has the choice's end, or `-` when it has nothing of it, not even what comes before the first token; `<rid>:end` when
it has everything but `[DONE]`. A position below 0 lies in a prompt whose log-probabilities are sent.
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
_PLACE = r"(?:-|-?[0-9]{1,9}e?)"
_EVENT_ID = re.compile(rf"([0-9A-Za-z_-]{{1,64}}):(end|{_PLACE}(?:,{_PLACE}){{0,127}})")


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


def event_id(rid: str, places: Iterable[Place | None]) -> str:
    """None: a choice of which the client has nothing."""
    return f"{rid}:" + ",".join(
        ["-" if p is None else f"{p.position}e" if p.ended else str(p.position) for p in places]
    )


def end_id(rid: str) -> str:
    return f"{rid}:end"


def parse_event_id(text: str) -> tuple[str, tuple[Place | None, ...] | None] | None:
    """(rid, a place for each choice, or None at the stream's end); None if this is no event id of ours."""
    match = _EVENT_ID.fullmatch(text)
    if match is None:
        return None
    rid, places = match.groups()
    if places == "end":
        return rid, None
    return rid, tuple(None if p == "-" else Place(int(p.rstrip("e")), p.endswith("e")) for p in places.split(","))
