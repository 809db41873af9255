"""What a client may see of a choice's text: special tokens left out, stop strings cut, doubtful ends held. *Pure.*

A stop string is looked for in the visible text. One that contains the text of a special token is looked for in the
full text too, in which those tokens are present, since a client may name the end of a turn by its text although it is
never shown; a match there is cut at the same place of the visible text.
"""

from __future__ import annotations

from collections import deque

from services.gateway.detokenizer import Detokenizer
from services.gateway.stop_matcher import Match, StopMatcher
from services.gateway.tokenization import Tokenizer


class VisibleText:
    """num_chars: visible characters so far, held back or not."""

    def __init__(
        self, tokenizer: Tokenizer, *, stops: tuple[str, ...], include_stop: bool, skip_special_tokens: bool,
        marks: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """marks: texts of special tokens that are not skipped."""
        self.num_chars = 0
        self._decoder = Detokenizer(tokenizer)
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        if self._skipped and marks:
            self._skipped = self._skipped - {i for mark in marks if (i := tokenizer.special_token_id(mark)) is not None}
        self._include_stop = include_stop
        self._text = ""  # not yet taken
        self._matcher = StopMatcher(stops) if stops else None
        special = tokenizer.stops_with_special_text(stops) if stops and skip_special_tokens else ()
        self._full = _FullText(tokenizer, special) if special else None
        self._closed = False

    def push(self, token_id: int, *, may_stop: bool = True, hidden: bool = False, last: bool = False) -> bool:
        """Add a token; True if it completes a stop string, which ends the text.

        may_stop: whether a stop string may end in this token. hidden: the token has no visible text. last: no further
        token will come, so that bytes of an incomplete character are shown as U+FFFD.
        """
        begin = self.num_chars
        piece = "" if hidden or token_id in self._skipped else self._decoder.push(token_id)
        if last:
            piece += self._decoder.flush()
            self._closed = True
        self._text += piece
        self.num_chars += len(piece)
        if self._matcher is None:
            return False
        match = self._matcher.push(piece)
        if self._full is not None:
            other = self._full.push(token_id, begin, self.num_chars, last)
            if other is not None and (match is None or other.start < match.start):
                match = other
        if match is None or not may_stop:
            return False
        taken = begin + len(piece) - len(self._text)
        self._text = self._text[: match.start - taken] + (match.stop if self._include_stop else "")
        self._closed = True
        return True

    def take(self) -> str:
        """The visible text that is certain and was not taken yet."""
        text = self._text
        if self._matcher is None or self._closed:
            self._text = ""
            return text
        num_held = self._matcher.num_held
        if self._full is not None:
            num_held = max(num_held, self.num_chars - self._full.held_from())
        if not num_held:
            self._text = ""
            return text
        self._text = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def close(self) -> None:
        """No further token will come, and no stop string can be completed: the rest is certain."""
        self._text += self._decoder.flush()
        self._closed = True


class _FullText:
    """The text with special tokens in it, matched against the stop strings that contain one."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._decoder = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops)
        self._num_chars = 0
        # (full, visible) position at which each token began, from the one that holds the held-back text's start on
        self._marks: deque[tuple[int, int]] = deque([(0, 0)])
        self._visible_end = 0

    def push(self, token_id: int, visible_begin: int, visible_end: int, last: bool) -> Match | None:
        """The match that ends in this token, its start as a position in the visible text."""
        self._marks.append((self._num_chars, visible_begin))
        piece = self._decoder.push(token_id) + (self._decoder.flush() if last else "")
        match = self._matcher.push(piece)
        self._num_chars += len(piece)
        self._visible_end = visible_end
        if match is not None:
            match = Match(self._visible(match.start), match.stop)
        held_from = self._num_chars - self._matcher.num_held
        while len(self._marks) > 1 and self._marks[1][0] <= held_from:
            self._marks.popleft()
        return match

    def held_from(self) -> int:
        """The visible position from which on text must be held back for the sake of these stop strings."""
        return self._visible(self._num_chars - self._matcher.num_held)

    def _visible(self, position: int) -> int:
        """The visible position of a full one that is not before the first mark; inside a hidden token, its place."""
        limit = self._visible_end
        for full, visible in reversed(self._marks):
            if full <= position:
                return min(visible + position - full, limit)
            limit = visible
        raise AssertionError("a match begins before the text that was held back")
