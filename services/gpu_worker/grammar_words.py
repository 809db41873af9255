"""A vocabulary as grammars need it: sets of tokens, and what the parser asks of a tokenizer. *Pure.*"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from llguidance import LLTokenizer, TokenizerWrapper

from shared.vocabulary import Vocabulary

MAX_DIGITS = 32  # in a row, of a number in JSON: more than any has a use for
MAX_EXPONENT_DIGITS = 2  # beyond 10^308 a number is none for most readers
_LONG_EXPONENT = re.compile(rb"[eE][+-]?[0-9]{%d}" % (MAX_EXPONENT_DIGITS + 1))


class Words:
    """A vocabulary; sets of tokens are integers, bit i for token i."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.all = (1 << len(self.tokens)) - 1
        self.tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)))  # its end is a token of its own, the last
        self.breaks = self.set_of(i for i, token in enumerate(self.tokens) if token and not token.strip(b"\n"))
        leading = [len(token) - len(token.lstrip(b"0123456789")) for token in self.tokens]
        self._digits = [
            self.set_of(i for i, n in enumerate(leading) if n >= count) for count in range(max(leading, default=0) + 1)
        ]
        self.overrunning = lru_cache(maxsize=4)(self._overrunning)
        self._long_exponents = self.set_of(i for i, token in enumerate(self.tokens) if _LONG_EXPONENT.search(token))

    def set_of(self, ids: Iterable[int]) -> int:
        bits = bytearray(len(self.tokens) // 8 + 1)
        for i in ids:
            if i < len(self.tokens):
                bits[i // 8] |= 1 << i % 8
        return int.from_bytes(bits, "little")

    def too_many_digits(self, num_digits: int) -> int:
        """Tokens that would make a number longer than it may be, of which there are so many digits."""
        count = max(0, MAX_DIGITS - num_digits) + 1
        return (self._digits[count] if count < len(self._digits) else 0) | (self._long_exponents if num_digits else 0)

    def _overrunning(self, end: bytes) -> tuple[int, ...]:
        """Tokens that complete this text and go on behind it with more than spaces, where the first 0, 1, … bytes of it
        are there."""
        some = [(i, token) for i, token in enumerate(self.tokens) if end[-1] in token[:-1]]
        whole = {i for i, token in some if token.partition(end)[2].strip()}
        parts = [(end[num:], len(end) - num) for num in range(len(end))]
        behind = [{i for i, token in some if token.startswith(part) and token[n:].strip()} for part, n in parts]
        return tuple(self.set_of(whole | ids) for ids in behind)

    def bytes_of(self, token_id: int) -> bytes:
        return self.tokens[token_id] if token_id < len(self.tokens) else b""


class _Tokens:
    """What llguidance asks of a tokenizer. It need not cut texts: grammars are made with `no_forcing`."""

    eos_token_id = None
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.special_ids)

    def __call__(self, text: bytes) -> list[int]:
        return []
