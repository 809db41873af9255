"""Whether a grammar compiles is found out in a process that can be killed, so that nothing takes longer than it may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from services.gateway import byte_tokenizer, structured
from services.gateway.errors import BadRequest
from services.gateway.grammar_pool import GrammarPool
from services.gateway.openai_schema import CompletionRequest
from services.gateway.request_parsing import parse
from services.gateway.structured import Wanted
from shared.protocol import MAX_GRAMMAR_CHARS
from tests.helpers import bounded_work, wait_until


@pytest.fixture
async def pool() -> AsyncIterator[GrammarPool]:
    pool = GrammarPool(byte_tokenizer.byte_tokenizer())
    yield pool
    await pool.close()


def outputs(**fields: Any) -> Wanted:
    wanted = structured.wanted(parse(CompletionRequest, {"prompt": "x", "structured_outputs": fields}))
    assert wanted is not None
    return wanted


async def refused(pool: GrammarPool, wanted: Wanted) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        await pool.compiled(wanted)
    assert caught.value.param == wanted.param
    return caught.value


async def test_what_compiles_is_given_back_and_remembered(pool: GrammarPool) -> None:
    wanted = outputs(json={"type": "object", "properties": {"a": {"type": "integer"}}})
    assert await pool.compiled(wanted) == wanted.grammar
    assert await pool.compiled(outputs(regex="[a-z]{3}/\\d+")) and await pool.compiled(outputs(choice=['a"\\', "\n✓"]))
    await pool.close()
    assert await pool.compiled(wanted) == wanted.grammar


async def test_both_forms_of_grammar(pool: GrammarPool) -> None:
    assert await pool.compiled(outputs(grammar='start: "a" | <eos>'))
    gbnf = await pool.compiled(outputs(grammar='root ::= "yes" | "no" tail\ntail ::= [0-9]+'))
    assert "::=" not in gbnf and gbnf.startswith(structured.HEADER)
    assert "GBNF" in (await refused(pool, outputs(grammar="root ::= ("))).message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"regex": "(?=a)b"}, "look"), ({"regex": r"(a)\1"}, "backreferences"), ({"regex": "("}, "unclosed group"),
        ({"json": {"$ref": "#"}}, "allows nothing"), ({"json": {"type": "thing"}}, "thing"),
        ({"json": {"type": "string", "pattern": "(?!x)y"}}, "look"), ({"json": {"$ref": "http://x/y"}}, "http"),
        ({"grammar": "start: nowhere"}, "nowhere"), ({"grammar": "start: <nothing>"}, "special token"),
    ],
)  # fmt: skip
async def test_what_does_not_compile_is_said(pool: GrammarPool, fields: Any, said: str) -> None:
    error = await refused(pool, outputs(**fields))
    assert error.code == "unsupported_grammar" and said in error.message and len(error.message) < 300


async def test_what_may_be_meant_instead_is_taken_where_it_does_not_compile(pool: GrammarPool) -> None:
    def either(regex: str, instead: str) -> Wanted:
        first, second = outputs(regex="x"), outputs(regex=instead)
        return replace(first, grammar=f"{structured.HEADER}start: /{regex}/", instead=second.grammar)

    assert "b+" in await pool.compiled(either("(?=a)", "b+")) and "a+" in await pool.compiled(either("a+", "b+"))
    assert "b+" in await pool.compiled(either("a" * MAX_GRAMMAR_CHARS, "b+"))
    assert "look" in (await refused(pool, either("(?=a)", "(?=b)"))).message


async def test_what_cannot_be_taken_back_is_refused(pool: GrammarPool) -> None:
    for rule in ("a[max_tokens=3]: /[ab]+/", 'a[stop="c"]: /[ab]+/'):
        assert "max_tokens or stop" in (await refused(pool, outputs(grammar=f'start: "y" a "x"\n{rule}'))).message


async def test_tools_and_json_what_would_take_minutes_ends_within_seconds(pool: GrammarPool) -> None:
    texts = [{"type": "string", "pattern": f".*{i}.*"} for i in range(200)]
    wanted = outputs(json={"allOf": [{"properties": {f"p{i}": t, "q": t}} for i, t in enumerate(texts)]})
    with bounded_work(0.5):  # in this process
        assert (await refused(pool, wanted)).code == "grammar_too_complex"
    assert await pool.compiled(outputs(regex="a+")), "the next one has another child"


async def test_patterns_that_other_engines_die_of_are_bounded(pool: GrammarPool) -> None:
    for regex in ("(a+)+b", "(a|aa){1,5000}b", "((a{1,100}){1,100}){1,100}", "[ab]*a[ab]{30}c"):
        assert await pool.compiled(outputs(regex=regex))


class Counting:
    """The pool's processes, which a test holds back."""

    def __init__(self, pool: GrammarPool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_asked = 0
        self.gate = asyncio.Event()
        self._ask = pool._pool.ask
        monkeypatch.setattr(pool._pool, "ask", self.ask)

    async def ask(self, call: bytes) -> bytes:
        self.num_asked += 1
        await self.gate.wait()
        return await self._ask(call)


async def test_what_is_refused_is_remembered_for_who_asked(pool: GrammarPool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Counting(pool, monkeypatch)
    asked.gate.set()
    wanted = outputs(regex="(")
    first, again = await refused(pool, wanted), await refused(pool, wanted)
    assert (first.message, first.code) == (again.message, again.code) and asked.num_asked == 1
    with pytest.raises(BadRequest):
        await pool.compiled(wanted, "another")
    assert asked.num_asked == 2, "nobody learns what others have asked for"


async def test_an_owner_has_one_process_at_a_time_also_one_who_leaves(
    pool: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Counting(pool, monkeypatch)
    own = [asyncio.ensure_future(pool.compiled(outputs(regex=f"a{n}"), "one")) for n in range(4)]
    other = asyncio.ensure_future(pool.compiled(outputs(regex="b"), "two"))
    await wait_until(lambda: asked.num_asked == 2)
    own[0].cancel()
    await asyncio.wait(own[:1])
    assert asked.num_asked == 2
    asked.gate.set()
    await asyncio.gather(*own[1:], other)
    assert asked.num_asked == 5


async def test_what_is_too_long_reaches_no_process(pool: GrammarPool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Counting(pool, monkeypatch)
    error = await refused(pool, Wanted("x" * (MAX_GRAMMAR_CHARS + 1), False, "structured_outputs.grammar"))
    assert error.code == "unsupported_grammar" and asked.num_asked == 0
