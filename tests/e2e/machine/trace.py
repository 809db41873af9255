"""What travelled to Redis, as lines that people can read."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Any

from shared.scripts import Scripts
from shared.wire import MAX_MESSAGE_BYTES, ProtocolError, decode

MAX_WIDTH = 400


def names_of(scripts: Scripts) -> dict[str, str]:
    """Scripts by the digests under which they are called."""
    names = [path.name.removesuffix(".lua") for path in (files("shared") / "lua").iterdir()]
    return {hashlib.sha1(scripts.source(name).encode()).hexdigest(): name for name in names}


def text(trace: list[tuple[str, tuple[Any, ...], str]], scripts: Scripts) -> str:
    names = names_of(scripts)
    return "\n".join(f"{i:5} {_line(entry, scripts.prefix, names)}" for i, entry in enumerate(trace))


def _line(entry: tuple[str, tuple[Any, ...], str], prefix: str, names: dict[str, str]) -> str:
    step, command, fault = entry
    if command[0] == "EVALSHA":
        command = (names.get(command[1], command[1]), *command[4:])
    elif command[0] == "SCRIPT LOAD":
        command = command[:1]
    words = " ".join(_word(word, prefix) for word in command)
    return f"{step:26} {words[:MAX_WIDTH]}" + (f"   ! {fault}" if fault else "")


def _word(word: Any, prefix: str) -> str:
    if isinstance(word, str):
        return word.removeprefix(prefix) or "''"
    if not isinstance(word, bytes):
        return str(word)
    try:
        assert len(word) <= MAX_MESSAGE_BYTES
        return f"<{decode(word)!r}>"
    except ProtocolError:
        return word.decode(errors="replace") if word.isascii() else f"({len(word)} bytes)"
