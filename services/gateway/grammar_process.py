"""Compiles grammars in a process that its gateway can kill: `python -m services.gateway.grammar_process`.

A schema of a few lines can take minutes and gigabytes to compile, whatever limits the library is given. What passes
here, within this process' time and memory, a worker can compile too.
"""

from __future__ import annotations

import re
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from services.gateway import child_process
from services.gateway.child_process import Answer, Frame
from services.gateway.structured import HEADER
from shared.protocol import MAX_GRAMMAR_CHARS

MAX_REASON_CHARS = 200
LIMITS = LLParserLimits(max_lexer_states=30_000, max_grammar_size=200_000, verbose_errors=False)
# what the library says before the reason, and after it where it quotes the grammar
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_ENDS_REASON = re.compile(r"\n|; following special tokens|; generated from")
_ELSEWHERE = re.compile(r"^Resource '(.*)' is not present in a registry")
_IN_REGEX = re.compile(r"^error: (.*)$", re.MULTILINE)


class _Bytes:
    """Bytes for tokens, and the model's special tokens where they are: enough to compile for."""

    eos_token_id = None
    bos_token_id = None

    def __init__(self, size: int, special: dict[str, str]) -> None:
        self.tokens = [b""] * max(size, 256 + len(special))
        for token_id, text in special.items():
            self.tokens[int(token_id)] = text.encode()
        free = (i for i in range(len(self.tokens)) if str(i) not in special)
        for byte, i in zip(range(256), free, strict=False):
            self.tokens[i] = bytes([byte])
        self.special_token_ids = sorted(map(int, special))

    def __call__(self, text: bytes) -> list[int]:
        return []


def open_(first: Frame) -> tuple[Frame, Answer]:
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(first["size"], first["special"])))

    def check(call: Frame) -> Frame:
        """The grammar as the worker takes it, or why there is none."""
        grammar = call["grammar"]
        try:
            lark = HEADER + gbnf_to_lark(grammar) if call["is_gbnf"] else grammar
        except Exception:  # the library raises whatever its reader meets
            return {"error": "is no GBNF that can be read"}
        if len(lark) > MAX_GRAMMAR_CHARS:
            return {"error": "is too long"}
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0, limits=LIMITS)
        if matcher.is_error():
            return {"error": f"cannot be used: {_reason(matcher.get_error())}"}
        mask = matcher.compute_bitmask()
        if not (matcher.is_accepting() or _any_before(mask, tokenizer.vocab_size - 1)):
            return {"error": "allows nothing, or has no end"}
        first = next((i for i in range(tokenizer.vocab_size - 1) if mask[i // 8] >> i % 8 & 1), None)
        if first is not None and not (matcher.try_consume_tokens([first]) and matcher.rollback(1)):
            return {"error": "must not have max_tokens or stop"}  # nothing behind those can be taken back
        return {"grammar": lark}

    return {}, check


def _any_before(mask: bytes, end: int) -> bool:
    """Is there a bit below that one, which is the library's own end?"""
    return int.from_bytes(mask, "little") & ((1 << end) - 1) != 0


def _reason(error: str) -> str:
    in_regex = _IN_REGEX.search(error) if "regex parse error" in error else None
    text = in_regex[1] if in_regex else _ENDS_REASON.split(_PLACE.sub("", error), maxsplit=1)[0]
    if elsewhere := _ELSEWHERE.match(text):
        text = f"$ref to another document is not supported: {elsewhere[1]}"
    return "".join(c if c.isprintable() else "?" for c in text)[:MAX_REASON_CHARS]


if __name__ == "__main__":
    child_process.run(sys.stdin.buffer, sys.stdout.buffer, open_)
