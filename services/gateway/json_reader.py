"""Reads a request body as JSON, strictly: what another reader could understand differently is refused. *Pure.*

Python's own reader accepts NaN and duplicate keys, turns 1e999 into infinity, makes strings that cannot be encoded
(lone surrogates) and overflows its stack on deep nesting. Here each is a `BadRequest` before the value is used. Knows
nothing of what a field means.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NoReturn

from services.gateway.errors import BadRequest

MAX_DEPTH = 64
MAX_CONTAINERS = 1 << 16  # lists and objects; one takes 100 bytes of memory and 2 of the text
MAX_NUMBER_CHARS = 64
MAX_SHOWN_KEY_CHARS = 64

# Possessive, and with an optional closing quote, so that the scan is linear also for an unterminated string.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def loads(body: bytes) -> Any:
    """The value of a UTF-8 JSON text; BadRequest says what is wrong and where."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as e:
        raise BadRequest(f"the body is not valid UTF-8 (byte {e.start})") from None
    brackets = _brackets(body)
    if depth(brackets) > MAX_DEPTH:
        raise BadRequest(f"the body is nested deeper than {MAX_DEPTH} levels")
    if len(brackets) > 2 * MAX_CONTAINERS:
        raise BadRequest(f"the body has more than {MAX_CONTAINERS} lists and objects")
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as e:
        raise BadRequest(f"the body is not valid JSON (line {e.lineno}, column {e.colno})") from None
    # The text was valid UTF-8, so that only an escape can have made a surrogate.
    if "\\ud" in text or "\\uD" in text:
        for path in _unpaired_surrogates(value, ""):
            raise BadRequest(f"{path or 'the body'} contains an unpaired surrogate", param=path or None)
    return value


def depth(brackets: bytes) -> int:
    """The deepest nesting; no recursion, linear, also for brackets that do not match."""
    return max(accumulate(map(_STEP.__getitem__, brackets)), default=0)


def _brackets(body: bytes) -> bytes:
    """Those outside of strings, in order, also of a text that is not JSON."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return b""  # neither too many nor too deep, and this is nearly every request
    return _STRING.sub(b"", body).translate(None, _NOT_BRACKETS)


def shown(text: str) -> str:
    """A client's key as an error may show it: cut, and printable characters only."""
    cut = text[:MAX_SHOWN_KEY_CHARS]
    return "".join(c if c.isprintable() else "?" for c in cut)


def _refuse_constant(name: str) -> NoReturn:
    raise BadRequest(f"{name} is not a JSON number")


def _read_float(digits: str) -> float:
    value = float(digits) if len(digits) <= MAX_NUMBER_CHARS else math.inf
    if not math.isfinite(value):
        raise BadRequest("a number is too large or too long")
    return value


def _read_int(digits: str) -> int:
    if len(digits) > MAX_NUMBER_CHARS:
        raise BadRequest("a number is too large or too long")
    return int(digits)


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise BadRequest(f"the key {shown(key)} appears twice in one object", param=shown(key))
            seen.add(key)
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_read_object,
    parse_float=_read_float,
    parse_int=_read_int,
    parse_constant=_refuse_constant,
)


def _unpaired_surrogates(value: Any, path: str) -> Iterator[str]:
    """Paths of strings that cannot be encoded; a key at fault is named by the object that holds it."""
    if isinstance(value, str):
        if not _encodable(value):
            yield path
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _unpaired_surrogates(item, f"{path}[{i}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not _encodable(key):
                yield path
            else:
                yield from _unpaired_surrogates(item, f"{path}.{shown(key)}" if path else shown(key))


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
