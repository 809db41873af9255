"""Finds out whether grammars can be compiled, in another process and in little time; remembers those that can."""

from __future__ import annotations

import json
from collections import OrderedDict

from services.gateway.child_pool import ChildPool
from services.gateway.child_process import encode_frame
from services.gateway.errors import BadRequest
from services.gateway.structured import Wanted
from services.gateway.tokenization import Tokenizer
from shared.protocol import MAX_GRAMMAR_CHARS

MAX_REMEMBERED_CHARS = 1 << 22
MAX_CPU_S = 0.25  # a worker compiles it too, for each answer
TOO_COMPLEX = "is too complex: it takes too long to compile"


class GrammarPool:
    """For one vocabulary. The process starts with the first grammar."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = {str(i): tokenizer.token_text(i) for i in sorted(tokenizer.special_token_ids)}
        self._pool = ChildPool(
            "services.gateway.grammar_process", {"size": tokenizer.vocab_size, "special": special},
            what="grammars", max_answer_chars=2 * MAX_GRAMMAR_CHARS, error=BadRequest,
            max_cpu_s=MAX_CPU_S,
            failed=TOO_COMPLEX, too_slow=TOO_COMPLEX, too_long=TOO_COMPLEX,
        )  # fmt: skip
        self._known: OrderedDict[Wanted, str] = OrderedDict()
        self._num_chars = 0

    async def compiled(self, wanted: Wanted) -> str:
        """The grammar as a worker takes it; BadRequest with the reason where it cannot be compiled, or not in time."""
        if wanted in self._known:
            self._known.move_to_end(wanted)
            return self._known[wanted]
        try:
            answer = await self._pool.ask(encode_frame({"grammar": wanted.grammar, "is_gbnf": wanted.is_gbnf}))
        except BadRequest as e:
            raise BadRequest(f"{wanted.param} {e.message}", param=wanted.param, code="grammar_too_complex") from None
        fields = json.loads(answer)
        if "error" in fields:
            raise BadRequest(f"{wanted.param} {fields['error']}", param=wanted.param, code="unsupported_grammar")
        self._remember(wanted, str(fields["grammar"]))
        return self._known[wanted]

    def _remember(self, wanted: Wanted, grammar: str) -> None:
        if wanted not in self._known:
            self._num_chars += len(wanted.grammar) + len(grammar)
        self._known[wanted] = grammar
        while self._num_chars > MAX_REMEMBERED_CHARS:
            old, text = self._known.popitem(last=False)
            self._num_chars -= len(old.grammar) + len(text)

    async def close(self) -> None:
        await self._pool.close()
