"""Separates what a model thinks from what it answers, in text that arrives in pieces. *Pure.*

What has been given out is a function of the text so far, however it was cut. Spaces around thoughts and before the
answer are left out. Which texts open and close thoughts is known by the chat template, which leaves those of earlier
turns out by the same texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """start and end: the texts around thoughts. Where the prompt has opened them the model writes only the end."""

    name: str
    start: str
    end: str


FORMATS = (
    ReasoningFormat("deepseek_r1", "<think>", "</think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
)
BY_NAME = {row.name: row for row in FORMATS}


def of_template(source: str) -> ReasoningFormat | None:
    """None where the template says nothing of thoughts."""
    return next((row for row in FORMATS if row.end in source), None)


class ReasoningSplitter:
    """begun: whether the prompt has opened the thoughts. num_chars: how much of the text so far is thoughts, with the
    marks around them."""

    def __init__(self, row: ReasoningFormat, begun: bool) -> None:
        self._row = row
        self._state: Literal["before", "thinking", "between", "answer"] = "thinking" if begun else "before"
        self._held = ""
        self._has_thoughts = False
        self._num_pushed = 0
        self.num_chars = 0

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Thoughts, and text of the answer, that are certain with this text; last: no more will come."""
        thoughts, answer = "", ""
        self._held += text
        self._num_pushed += len(text)
        if self._state == "before":
            answer = self._before(last)
        if self._state == "thinking":
            thoughts = self._thinking(last)
        if self._state == "between":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "answer"
        if self._state == "answer":
            answer, self._held = answer + self._held, ""
        return thoughts, answer

    def _before(self, last: bool) -> str:
        """Spaces before thoughts are none of the answer's; those of an answer without thoughts are."""
        begin = self._held.lstrip()
        if begin.startswith(self._row.start):
            self._state, self._held = "thinking", begin[len(self._row.start) :]
        elif not self._row.start.startswith(begin) or last:
            self._state = "answer"
        return ""

    def _thinking(self, last: bool) -> str:
        thoughts, found, rest = self._held.partition(self._row.end)
        if found:
            self._state, self._held = "between", rest
            self.num_chars = self._num_pushed - len(rest)
        else:
            self.num_chars = self._num_pushed
            num_held = 0 if last else _num_begun(thoughts, self._row.end)
            thoughts, self._held = thoughts[: len(thoughts) - num_held], thoughts[len(thoughts) - num_held :]
        if not self._has_thoughts:
            thoughts = thoughts.lstrip()
        if not found:
            kept = thoughts.rstrip()
            self._held, thoughts = ("" if last else thoughts[len(kept) :] + self._held), kept
        else:
            thoughts = thoughts.rstrip()
        self._has_thoughts = self._has_thoughts or bool(thoughts)
        return thoughts


def _num_begun(text: str, mark: str) -> int:
    """How many characters at the end may be the beginning of the mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)
