"""Log lines cannot be forged, flooded, or made to tell a secret."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import logs

KEY = "sk-very-secret-key"


def record(message: str, *args: Any, exc_info: Any = None) -> logging.LogRecord:
    return logging.LogRecord("gateway.app", logging.WARNING, __file__, 1, message, args, exc_info)


@given(st.text())
def test_a_line_is_one_line_of_printable_characters(text: str) -> None:
    line = logs.LineFormatter("gateway").format(record("client id %s", text))
    assert line.isprintable() and len(line.splitlines()) == 1


def test_escapes_show_what_was_sent() -> None:
    line = logs.LineFormatter("gateway").format(record("id %s", "a\r\nERROR forged\x1b[2J\x85 \u202e é"))
    assert line.endswith(r"id a\r\nERROR forged\x1b[2J\x85 \u202e é")


def test_a_long_value_does_not_push_out_the_others() -> None:
    line = logs.LineFormatter("gateway").format(record("id %s refused: %s", "x" * 10_000, "too long"))
    assert line.endswith("(10000 characters) refused: too long")
    assert len(logs.LineFormatter("gateway").format(record("y" * 100_000))) < logs.MAX_LINE_CHARS + 100


@pytest.mark.parametrize("as_json", [False, True])
def test_secrets_are_hidden_wherever_they_stand(as_json: bool) -> None:
    formatter = logs.LineFormatter("gateway", [KEY], as_json)
    try:
        raise ValueError(f"bad {KEY}")
    except ValueError:
        exc_info = sys.exc_info()
    padding = "x" * (logs.MAX_VALUE_CHARS - 5)  # the cut falls inside the key
    for line in (
        formatter.format(record(f"key {KEY}")),
        formatter.format(record("key %s", padding + KEY)),
        formatter.format(record("settings %s", {"key": KEY})),
        formatter.format(record("failed", exc_info=exc_info)),
    ):
        assert "sk-v" not in line and "***" in line


def test_lines_of_a_traceback_are_indented_and_cannot_look_like_an_event() -> None:
    try:
        raise ValueError("bad\n12:00:00.000 INFO    forged: line\x1b[2J")
    except ValueError:
        lines = logs.LineFormatter("gateway").format(record("failed", exc_info=sys.exc_info())).split("\n")
    assert lines[0].endswith("gateway.app: failed")
    assert len(lines) > 3 and all(line.startswith("    ") and line.isprintable() for line in lines[1:])


def test_json_lines_carry_the_same() -> None:
    fields = json.loads(logs.LineFormatter("gateway", as_json=True).format(record("id %s", 'a"\n')))
    assert fields["message"] == 'id a"\\n' and fields["level"] == "warning" and fields["service"] == "gateway"
    assert fields["time"].endswith("Z") and "trace" not in fields


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_set_up_replaces_other_handlers_and_keeps_the_level(root_logger: logging.Logger) -> None:
    stream = io.StringIO()
    logs.set_up("gateway", "warning", secrets=[KEY], stream=stream)
    logging.getLogger("a").info("quiet")
    logging.getLogger("a").warning("key %s", KEY)
    assert stream.getvalue().endswith("WARNING a: key ***\n") and len(root_logger.handlers) == 1


def test_escaping_needs_no_file_that_is_not_loaded() -> None:
    """A process without a free file descriptor logs that it has none."""
    code = "import sys, shared.logs; sys.exit('encodings.unicode_escape' not in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
