"""How log lines look: one line an event, nothing in it that could pass for another line, no secrets.

Values that come from outside are escaped and cut here, not where they are logged, so that no caller can forget it.
Prompts and outputs are not logged by anybody. A traceback in the text format follows as indented lines.
"""

from __future__ import annotations

import codecs
import json
import logging
import sys
import time
from collections.abc import Iterable
from typing import Literal, Protocol

codecs.lookup("unicode_escape")  # loads it now: where no file can be opened any more, that is to be logged
MAX_VALUE_CHARS = 500
MAX_LINE_CHARS = 4000
MAX_TRACEBACK_CHARS = 20_000


class Stream(Protocol):
    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...


def escape(text: str) -> str:
    """The text with every character that a terminal or a log reader might act on written as its escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]}… ({len(text)} characters)"


class LineFormatter(logging.Formatter):
    """Text or JSON lines; `secrets` are strings that are replaced wherever they appear."""

    def __init__(self, service: str, secrets: Iterable[str] = (), as_json: bool = False) -> None:
        super().__init__()
        self._service = service
        self._secrets = sorted(set(secrets), key=len, reverse=True)
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        message = cut(escape(self._hide(self._message(record))), MAX_LINE_CHARS)
        trace = cut(self._hide(self.formatException(record.exc_info)), MAX_TRACEBACK_CHARS) if record.exc_info else ""
        if self._as_json:
            return self._json(record, message, trace)
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock}.{int(record.msecs):03d} {record.levelname:<7} {record.name}: {message}"
        return "\n    ".join([line, *(escape(part) for part in trace.splitlines())])

    def _json(self, record: logging.LogRecord, message: str, trace: str) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": message,
        }
        return json.dumps(fields | ({"trace": trace} if trace else {}), ensure_ascii=False)

    def _message(self, record: logging.LogRecord) -> str:
        """The message with long string arguments cut, so that one of them cannot push out the others."""
        if not isinstance(record.args, tuple):
            return record.getMessage()
        args = tuple(cut(self._hide(a), MAX_VALUE_CHARS) if isinstance(a, str) else a for a in record.args)
        return str(record.msg) % args if args else str(record.msg)

    def _hide(self, text: str) -> str:
        """Done before any cutting, which could leave a part of a secret that is no longer recognised."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def set_up(
    service: str,
    level: str = "info",
    format: Literal["text", "json"] = "text",
    secrets: Iterable[str] = (),
    stream: Stream | None = None,
) -> None:
    """Sends all logging of this process to stderr; called once, at start."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(LineFormatter(service, secrets, format == "json"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
