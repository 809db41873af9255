"""Token ids to text as they come: a character is given out when its last byte is there. *Pure.*

The pieces joined, with `flush` at the end, are the one-shot decoding of all bytes; U+FFFD appears only where the
bytes can no longer become a character.
"""

from __future__ import annotations

import codecs
from typing import Protocol


class TokenBytes(Protocol):
    """What is needed of a tokenizer here."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def whole_text(self, token_id: int) -> str | None: ...


_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One choice's bytes between tokens."""

    def __init__(self, tokenizer: TokenBytes) -> None:
        self._tokenizer = tokenizer
        self._utf8 = _Utf8Decoder("replace")
        self._inside = False  # in a character whose last byte is still to come

    def push(self, token_id: int) -> str:
        """The characters that this token completes, often all of its own."""
        if not self._inside:
            text = self._tokenizer.whole_text(token_id)
            if text is not None:
                return text
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._inside = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        """U+FFFD for a character that was begun and will not be completed."""
        self._inside = False
        return self._utf8.decode(b"", True)
