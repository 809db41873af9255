"""Finds out whether grammars can be compiled, in another process and in little time; remembers what it found."""

from __future__ import annotations

import asyncio
import json
import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from services.gateway.child_pool import ChildPool
from services.gateway.child_process import encode_frame
from services.gateway.errors import BadRequest
from services.gateway.structured import Wanted
from services.gateway.tokenization import Tokenizer
from shared.protocol import MAX_GRAMMAR_CHARS

MAX_REMEMBERED_CHARS = 1 << 22
MAX_CPU_S = 0.25  # a worker compiles it too, for each answer
REFUSED_S = 60.0  # a machine without a free processor may be why
TOO_COMPLEX = "is too complex: it takes too long to compile"


@dataclass(frozen=True, slots=True)
class _Found:
    """The grammar; or why there is none, where there is a code. until: loop time up to which that is believed."""

    text: str
    code: str = ""
    until: float = math.inf


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
        self._known: OrderedDict[tuple[str, Wanted], _Found] = OrderedDict()
        self._num_chars = 0
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[_Found]] = set()

    async def compiled(self, wanted: Wanted, owner: str = "") -> str:
        """The grammar as a worker takes it; BadRequest with the reason where it cannot be compiled, or not in time.

        owner: whose it is. What others ask for changes neither what is said nor, while a process is free, how soon."""
        if len(wanted.grammar) > MAX_GRAMMAR_CHARS:
            found = _Found("is too long", "unsupported_grammar")
        else:
            found = await self._found(owner, wanted)
        if found.code and wanted.instead:
            return await self.compiled(replace(wanted, grammar=wanted.instead, instead=""), owner)
        if found.code:
            raise BadRequest(f"{wanted.param} {found.text}", param=wanted.param, code=found.code)
        return found.text

    async def _found(self, owner: str, wanted: Wanted) -> _Found:
        found = self._remembered(owner, wanted)
        if found is None:  # a caller that leaves does not end its turn before the process has ended its work
            task = asyncio.ensure_future(self._in_turn(owner, wanted))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
            found = await asyncio.shield(task)
        return found

    def _ended(self, task: asyncio.Task[_Found]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone

    async def _in_turn(self, owner: str, wanted: Wanted) -> _Found:
        """One after the other for each owner, so that nobody has all processes."""
        turn = self._turns.setdefault(owner, asyncio.Lock())
        async with turn:
            found = self._remembered(owner, wanted)
            if found is None:
                found = await self._find_out(wanted)
                self._remember(owner, wanted, found)
            return found

    async def _find_out(self, wanted: Wanted) -> _Found:
        try:
            answer = await self._pool.ask(encode_frame({"grammar": wanted.grammar, "is_gbnf": wanted.is_gbnf}))
        except BadRequest as e:
            until = asyncio.get_running_loop().time() + REFUSED_S
            return _Found(e.message, "grammar_too_complex", until)
        fields = json.loads(answer)
        if "error" in fields:
            return _Found(str(fields["error"]), "unsupported_grammar")
        return _Found(str(fields["grammar"]))

    def _remembered(self, owner: str, wanted: Wanted) -> _Found | None:
        found = self._known.get((owner, wanted))
        if found is None or asyncio.get_running_loop().time() > found.until:
            return None
        self._known.move_to_end((owner, wanted))
        return found

    def _remember(self, owner: str, wanted: Wanted, found: _Found) -> None:
        old = self._known.pop((owner, wanted), None)
        self._num_chars += len(wanted.grammar) + len(found.text)
        self._num_chars -= 0 if old is None else len(wanted.grammar) + len(old.text)
        self._known[owner, wanted] = found
        while self._num_chars > MAX_REMEMBERED_CHARS:
            (_, other), old = self._known.popitem(last=False)
            self._num_chars -= len(other.grammar) + len(old.text)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._pool.close()
