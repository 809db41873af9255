"""Reads JSON values and calls in Python character by character, for `tool_parser.py`. *Pure.*

Each generator is sent one character at a time and returns when it has read what it is for.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Generator

SPACES = " \t\r\n"
_WORDS = {"true": "True", "false": "False", "null": "None"}  # of JSON, where Python is meant


class Depth:
    """Brackets of a value, outside of its strings."""

    def __init__(self, quotes: str = '"', level: int = 0) -> None:
        self.level = level
        self._quotes = quotes
        self._quote = ""
        self._escaped = False

    def ends_with(self, char: str) -> bool:
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == self._quote:
                self._quote = ""
                return self.level == 0
            return False
        if char in self._quotes:
            self._quote = char
        elif char in "{[(":
            self.level += 1
        elif char in "}])":
            self.level -= 1
            return self.level == 0
        return False


def after_spaces() -> Generator[None, str, str]:
    char = yield
    while char in SPACES:
        char = yield
    return char


def string() -> Generator[None, str, str]:
    """The value of a JSON string behind its first quote; empty if it is none."""
    text, escaped = "", False
    while True:
        char = yield
        if char == '"' and not escaped:
            break
        escaped = char == "\\" and not escaped
        text += char
    try:
        value = str(json.loads(f'"{text}"', strict=False))
        value.encode("utf-8")  # half of a surrogate pair can be sent to nobody
    except ValueError:
        return ""
    return value


def value_of(char: str) -> Generator[None, str, tuple[str, str]]:
    """The text of a JSON value that begins with this character, and what ended a bare word."""
    text = char
    if char not in '{["':
        while True:
            char = yield
            if char in ",}" or char in SPACES:
                return text, "" if char in SPACES else char
            text += char
    depth = Depth()
    while not depth.ends_with(char):
        char = yield
        text += char
    return text, ""


def python_call(text: str) -> tuple[str, str] | None:
    """Name and arguments as JSON text, of keywords with literals; true, false and null are taken too."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name | ast.Attribute):
            return None
        if any(k.arg is None for k in call.keywords):
            return None
        values = {k.arg: _literal(k.value) for k in call.keywords}
        return ast.unparse(call.func), json.dumps(values, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> object:
    for name in ast.walk(node):
        if isinstance(name, ast.Name):
            name.id = _WORDS.get(name.id, name.id)
    return ast.literal_eval(ast.unparse(node))
