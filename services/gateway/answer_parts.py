"""What stands in a chat's answer: thoughts, content, calls of tools; told apart as text comes. *Pure.*

What is given out is a function of the text so far, however it was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway import reasoning, tool_formats
from services.gateway.reasoning import ReasoningSplitter
from services.gateway.tool_parser import CallPart, ToolParser
from shared.protocol import TextParams


@dataclass(frozen=True, slots=True)
class Parts:
    content: str
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()


class AnswerParts:
    """Of one choice."""

    def __init__(self, text: TextParams) -> None:
        row = reasoning.BY_NAME.get(text.reasoning_format)
        self._reasoning = ReasoningSplitter(row, text.reasoning_begun) if row is not None else None
        self._shows_reasoning = text.include_reasoning
        format = tool_formats.BY_NAME.get(text.tool_format)
        self._tools = ToolParser(format, text.tool_names, text.max_calls) if format is not None else None
        self.has_content = False

    @property
    def has_calls(self) -> bool:
        return self._tools is not None and self._tools.num_calls > 0

    @property
    def num_reasoning_chars(self) -> int:
        """Of all that was pushed, those of thoughts and the marks around them."""
        return 0 if self._reasoning is None else self._reasoning.num_chars

    def push(self, text: str, *, last: bool = False) -> Parts:
        """What is certain with this text; last: no more will come."""
        thoughts = ""
        if self._reasoning is not None:
            thoughts, text = self._reasoning.push(text, last=last)
        shown = thoughts if self._shows_reasoning else ""
        calls: tuple[CallPart, ...] = ()
        if self._tools is not None:
            text, calls = self._tools.push(text, last=last)
        self.has_content = self.has_content or bool(text)
        return Parts(text, shown, calls)


def marks(text: TextParams) -> tuple[str, ...]:
    """Texts that must be seen here, though they may be those of special tokens."""
    row, format = reasoning.BY_NAME.get(text.reasoning_format), tool_formats.BY_NAME.get(text.tool_format)
    return ((row.start, row.end) if row is not None else ()) + (format.marks if format is not None else ())
