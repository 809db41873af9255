"""Finds tool calls in text that arrives in pieces: what is content, which tool is called, and its arguments. *Pure.*

What has been given out is a function of the text so far, however it was cut, so a stream and a whole answer agree and
any gateway can go on with either. Text that only looks like a call is content. Reads by the rows of `tool_formats.py`,
character by character: each state is a place in a generator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator
from dataclasses import dataclass

from services.gateway.call_readers import SPACES, Depth, after_spaces, python_call, string, value_of
from services.gateway.tool_formats import ToolFormat

MAX_NAME_CHARS = 256
MAX_PYTHON_CHARS = 1 << 12  # of one call, which is read when it is whole
MAX_PYTHON_DEPTH = 32
_BETWEEN = SPACES + ";,"
_ARGUMENTS = ("arguments", "parameters")
_KEYS = (*_ARGUMENTS, "name", "tool_calls", "type", "id")

Reads = Generator[None, str, bool]  # takes a character at a time; whether it was what it should be


@dataclass(frozen=True, slots=True)
class CallPart:
    """Of call number index: its name, once, and its arguments, which are JSON text in pieces."""

    index: int
    name: str = ""
    arguments: str = ""


class ToolParser:
    """names: of the tools there are; where nothing marks a call, it must have one of these. max_calls: later ones are
    left out."""

    def __init__(self, row: ToolFormat, names: Collection[str], max_calls: int | None = None) -> None:
        self.num_calls = 0
        self._row = row
        self._names = frozenset(names)
        self._max_calls = max_calls
        self._is_bare = not row.begins or row.name == "llama3_json"
        self._content: list[str] = []
        self._calls: dict[int, tuple[str, list[str]]] = {}  # names, and arguments in pieces
        self._blanks: list[str] = []  # between calls, or before any, that another would make meaningless
        self._held = ""  # behind them: may become a mark
        self._has_content = False
        self._raw: list[str] = []  # of what may be a call, until one has started; content if none has
        self._has_started = False
        firsts = re.escape("".join({mark[0] for mark in self._marks()}))
        self._plain = re.compile(f"[^{firsts}]+" if firsts else "(?s:.+)")  # no mark begins in it
        self._machine = self._answer()
        next(self._machine)

    def push(self, text: str, *, last: bool = False) -> tuple[str, tuple[CallPart, ...]]:
        """Content and calls that are certain with this text; last: no more will come."""
        at = 0
        while at < len(text):
            is_free = self._has_content and not (self.num_calls or self._raw or self._held)
            if is_free and (plain := self._plain.match(text, at)):
                self._content.append(plain[0])
                at = plain.end()
            else:
                self._machine.send(text[at])
                at += 1
        if last:
            if self._raw:
                self._content += [] if self._has_started or self._is_full else self._raw
            elif self._held.strip(_BETWEEN) or not self.num_calls:
                self._content += [*self._blanks, self._held]
            self._raw, self._blanks, self._held = [], [], ""
        calls = tuple(CallPart(i, name, "".join(pieces)) for i, (name, pieces) in self._calls.items())
        found = "".join(self._content), calls
        self._content, self._calls = [], {}
        return found

    @property
    def _is_full(self) -> bool:
        return self._max_calls is not None and self.num_calls >= self._max_calls

    # --- between calls ---------------------------------------------------------------------------------------------

    def _answer(self) -> Generator[None, str, None]:
        while True:
            char = yield
            if self._is_bare and not self._has_content and char in "{[" and not self._held.strip(_BETWEEN):
                yield from self._call(char)
                continue
            self._held += char
            marks = self._marks()
            mark = next((mark for mark in marks if self._held.endswith(mark)), "")
            if not mark:
                self._release(marks)
                continue
            self._give("".join([*self._blanks, self._held[: -len(mark)]]))
            self._blanks, self._held = [], ""
            if mark in self._row.begins:
                yield from self._call(mark)

    def _marks(self) -> tuple[str, ...]:
        row = self._row
        return (*row.begins, *row.dropped, *(row.ends if self.num_calls else ()))

    def _give(self, text: str) -> None:
        """Content, as far as it is more than spaces beside calls."""
        if text.strip() or (self._has_content and not self.num_calls):
            self._content.append(text)
            self._has_content = True

    def _release(self, marks: Collection[str]) -> None:
        """All of the held text that cannot become a mark, nor be spaces before one."""
        most = min(max(map(len, marks), default=1) - 1, len(self._held))
        tails = (self._held[len(self._held) - n :] for n in range(most, 0, -1))
        tail = next((tail for tail in tails if any(mark.startswith(tail) for mark in marks)), "")
        free = self._held[: len(self._held) - len(tail)]
        self._held = tail
        if free.strip(_BETWEEN) or (self._has_content and not self.num_calls):
            self._give("".join([*self._blanks, free]))
            self._blanks = []
        elif free:
            self._blanks.append(free)

    # --- calls -------------------------------------------------------------------------------------------------------

    def _call(self, opened_by: str) -> Generator[None, str, None]:
        """One call or a list of them. What turns out to be none is content."""
        self._raw, self._blanks, self._held = [*self._blanks, self._held, opened_by], [], ""
        self._has_started = False
        reads = self._body(opened_by if opened_by in ("{", "[") else "")
        is_call = False
        try:
            next(reads)
            while True:
                char = yield
                if not self._has_started:
                    self._raw.append(char)
                reads.send(char)
        except StopIteration as e:
            is_call = bool(e.value)
        if not is_call and not self._has_started:
            self._content += self._raw
            self._has_content = True
        self._raw = []

    def _body(self, char: str) -> Reads:
        is_bare = bool(char)
        while not char or char in SPACES:
            char = yield
        if self._row.body == "named" or (char not in "{[" and self._row.name == "mistral"):
            return (yield from self._named(char))
        if self._row.body == "pythonic" and char == "[":
            return (yield from self._pythonic())
        if char == "{":
            return (yield from self._object(is_bare))
        return (yield from self._list(is_bare)) if char == "[" else False

    def _list(self, is_bare: bool, is_nested: bool = False) -> Reads:
        while True:
            char = yield
            if char == "{":
                if not (yield from self._object(is_bare, is_nested)):
                    return False
            elif char == "]":
                return True
            elif char not in ", \t\r\n":
                return False

    def _object(self, is_bare: bool, is_nested: bool = False) -> Reads:
        """{"name": …, "arguments": …} behind its brace, in any order; or {"tool_calls": [such objects]}."""
        name, arguments, is_done = "", "", False
        char = yield from after_spaces()
        while char != "}":
            if char != '"':
                return False
            key = yield from string()
            if (is_bare and key not in _KEYS) or (yield from after_spaces()) != ":":
                return False
            char = yield from after_spaces()
            if key == "tool_calls" and char == "[" and not is_nested:
                is_done = yield from self._list(is_bare, is_nested=True)
                char = ""
            elif key == "name" and char == '"':
                name, char = (yield from string()), ""
                if not 0 < len(name) <= MAX_NAME_CHARS or (is_bare and name not in self._names):
                    return False
            elif key in _ARGUMENTS and name and char == "{" and not is_done:
                yield from self._streamed(name, char)
                is_done, char = True, ""
            else:
                value, char = yield from value_of(char)
                arguments = value if key in _ARGUMENTS else arguments
            char = char or (yield from after_spaces())
            if char == ",":
                char = yield from after_spaces()
        return is_done or (bool(name) and self._whole(name, arguments))

    def _whole(self, name: str, arguments: str) -> bool:
        """Arguments that came before the name, as a text, or not at all."""
        try:
            value = json.loads(arguments or "{}")
            value = json.loads(value) if isinstance(value, str) else {} if value is None else value
            written = json.dumps(value, allow_nan=False)
        except (ValueError, RecursionError):
            return False
        if isinstance(value, dict):
            self._add(name, written)
        return isinstance(value, dict)

    def _streamed(self, name: str, char: str) -> Generator[None, str, None]:
        index = self._start(name)
        depth = Depth()
        while True:
            self._argue(index, char)
            if depth.ends_with(char):
                return
            char = yield

    def _named(self, char: str) -> Reads:
        """A name, what stands behind it, and an object."""
        text = char
        while "{" not in text:
            if len(text) > MAX_NAME_CHARS + len(self._row.name_end) + len(self._row.name_before):
                return False
            text += yield
        name = text[:-1].strip().removesuffix("[ARGS]").removeprefix(self._row.name_before)
        name = name.removesuffix(self._row.name_end.strip()).strip()
        if not name or any(c in name for c in SPACES):
            return False
        yield from self._streamed(name, "{")
        return True

    def _pythonic(self) -> Reads:
        """Calls as Python writes them, behind the bracket; each is read when it is whole."""
        text = ""
        depth = Depth("'\"", 1)
        while True:
            char = yield
            is_end = depth.ends_with(char)
            if is_end or (char == "," and depth.level == 1):
                call = python_call(text)
                if call is None or call[0] not in self._names:
                    return False
                self._add(*call)
                if is_end:
                    return True
                text = ""
                continue
            text += char
            if len(text) > MAX_PYTHON_CHARS or depth.level > MAX_PYTHON_DEPTH:
                return False

    def _add(self, name: str, arguments: str) -> None:
        self._argue(self._start(name), arguments)

    def _start(self, name: str) -> int | None:
        """The call's number; None for one too many."""
        self._has_started = True
        if self._is_full:
            return None
        self._calls[self.num_calls] = (name, [])
        self.num_calls += 1
        return self.num_calls - 1

    def _argue(self, index: int | None, text: str) -> None:
        if index is not None:
            self._calls.setdefault(index, ("", []))[1].append(text)
