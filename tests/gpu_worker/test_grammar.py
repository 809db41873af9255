"""What may come next: a function of the request and the tokens alone, that never leads into a dead end."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLParserLimits

from services.gateway import structured
from services.gpu_worker.grammar import AnswerState, GrammarError, Grammars
from services.gpu_worker.grammar_words import MAX_DIGITS
from shared import scripted_vocab as vocab
from shared.protocol import Constraint
from shared.vocabulary import Vocabulary

GRAMMARS = Grammars()
STOPS = [vocab.EOS]
SCHEMAS: list[Any] = [
    {},
    True,
    {"type": "object"},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    {"type": "string", "pattern": "^[a-z]+$", "maxLength": 8},
    {"enum": ["red", 1, None]},
    {"type": "number", "minimum": 0.5, "maximum": 17},
    {"$ref": "#/$defs/node", "$defs": {"node": {
        "type": "object", "properties": {"value": {"type": "integer"}, "next": {"anyOf": [
            {"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["value", "next"], "additionalProperties": False}}},
]  # fmt: skip


def by_schema(schema: Any) -> Constraint:
    return Constraint(grammar=structured.json_wanted(schema, "schema").grammar, json_text=True)


def by_lark(text: str, **fields: Any) -> Constraint:
    return Constraint(grammar=structured.HEADER + text, **fields)


def begin(constraint: Constraint) -> AnswerState:
    return GRAMMARS.begin(constraint, STOPS)


def ids(mask: bytes | None) -> list[int]:
    assert mask is not None
    return [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]


def answer(state: AnswerState, choose: Callable[[list[int]], int], num_tokens: int = 300) -> list[int]:
    """Up to its end, or as long."""
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens.append(choose(ids(state.mask_after(tokens))))
        if tokens[-1] in STOPS:
            break
    return tokens


def preferring(characters: str) -> Callable[[list[int]], int]:
    wanted = list(characters.encode())
    return lambda allowed: next((i for i in allowed if i in wanted), allowed[-1])


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
@pytest.mark.parametrize("taste", ["0123456789", " \n\t", '"', "[{", "}]"])
def test_tools_and_json_an_answer_that_ends_is_valid_whatever_the_model_likes(schema: Any, taste: str) -> None:
    tokens = answer(begin(by_schema(schema)), preferring(taste))
    text = bytes(t for t in tokens if t < 256).decode("utf-8", "replace")
    if tokens[-1] in STOPS:
        assert jsonschema_rs.validator_for(schema).is_valid(json.loads(text)), text
    outside = "".join(text.split('"')[::2])
    assert max(map(len, re.findall(r"\s+", outside)), default=0) <= 2 * 65, "at two places"
    assert max(map(len, re.findall(r"\d+", outside)), default=0) <= MAX_DIGITS


@pytest.mark.parametrize("seed", range(20))
def test_random_answers_are_valid_and_their_masks_do_not_depend_on_the_way(seed: int) -> None:
    chance = random.Random(seed)
    schema = SCHEMAS[seed % len(SCHEMAS)]
    state = begin(by_schema(schema))
    tokens = answer(state, chance.choice, 60)
    places = [chance.randrange(len(tokens)) for _ in range(8)]
    for place in places:
        fresh = begin(by_schema(schema)).mask_after(tokens[:place])
        assert state.mask_after(tokens[:place]) == fresh
        fork = state.fork()
        for token in tokens[place:]:
            if token not in STOPS:
                fork.accept(token)
        assert state.mask() == fresh
        fork.rollback(len([t for t in tokens[place:] if t not in STOPS]))
        assert fork.mask() == fresh


def test_a_token_that_is_not_allowed_changes_nothing() -> None:
    state = begin(by_schema({"type": "array"}))
    state.accept(ord("["))
    before = state.mask()
    with pytest.raises(GrammarError):
        state.accept(ord("x"))
    assert state.mask() == before
    state.accept(ord("]"))
    assert ids(state.mask()) == STOPS


def test_an_end_is_allowed_after_every_complete_value() -> None:
    state = begin(by_schema({}))
    for text in ("1", "12", "12.5", "12.5e3", '"x"', "[]", "null"):
        assert vocab.EOS in ids(state.mask_after(text.encode())), text
    for text in ("", "-", "12.", '"x', "[", "nul"):
        assert vocab.EOS not in ids(state.mask_after(text.encode())), text


def test_a_stop_token_that_is_kept_is_text() -> None:
    state = GRAMMARS.begin(by_lark('start: "banana"'), [vocab.EOS, ord("a")])
    assert ids(state.mask_after(b"ba")) == [ord("n")] and ids(state.mask_after(b"banan")) == [ord("a")]
    assert ids(state.mask_after(b"banana")) == sorted([ord("a"), vocab.EOS])
    assert state.allows([*b"banana", vocab.EOS]) and ids(state.mask_after(b"b")) == [ord("a")]


def test_special_tokens_are_no_text() -> None:
    state = begin(by_lark("start: /(.|\\n)*/"))
    assert [i for i in ids(state.mask()) if i >= 256] == STOPS


def test_what_cannot_be_compiled() -> None:
    with pytest.raises(GrammarError, match="cannot be used"):
        begin(by_lark("start: nowhere"))


def test_an_answer_does_not_use_up_what_another_of_the_same_grammar_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    few = LLParserLimits(max_lexer_states=200, verbose_errors=False)
    monkeypatch.setattr("services.gpu_worker.grammar.LIMITS", few)
    held = by_lark("start: /[ab]{0,1000}/")
    long, other = begin(held), begin(held)
    with pytest.raises(GrammarError):
        for n in range(400):
            long.mask_after(b"a" * n)
    assert ids(other.mask()) and ids(begin(held).mask())


def test_words_that_must_not_be_and_tokens_that_alone_may() -> None:
    state = begin(Constraint(bad_words=(tuple(b"no"), (ord("x"),))))
    assert not {ord("x")} & set(ids(state.mask())) and ord("o") in ids(state.mask())
    assert ord("o") not in ids(state.mask_after(b"n")) and ord("o") in ids(state.mask_after(b"nn!"))
    only = begin(Constraint(allowed_ids=tuple(b"ab")))
    assert ids(only.mask()) == ids(only.mask_after(b"abba")) == sorted(b"ab")
    both = begin(by_lark('start: "a" | "b" | "c"', allowed_ids=tuple(b"bcd"), bad_words=((ord("c"),),)))
    assert ids(both.mask()) == [ord("b")]
    all_banned = begin(by_lark('start: "a"', bad_words=((ord("a"),),)))
    assert ids(all_banned.mask()) == [ord("a")], "where there is nothing else"


# --- thinking -----------------------------------------------------------------------------------------------------

END = "</t>"


def thinking(budget: int | None = None, starts: Sequence[int] = (), grammar: str = "") -> AnswerState:
    return begin(
        Constraint(
            grammar=grammar and structured.HEADER + grammar, think_end=END, think_end_ids=tuple(END.encode()),
            think_start_ids=tuple(starts), think_budget=budget,
        )
    )  # fmt: skip


def test_a_grammar_holds_behind_the_thoughts() -> None:
    state = thinking(grammar='start: "yes" | "no"')
    assert vocab.EOS not in ids(state.mask()) and ord("x") in ids(state.mask())
    assert ids(state.mask_after(b"well</t>")) == sorted(b"yn\n"), "some lines below, if it likes"
    assert ids(state.mask_after(b"well</t>\n\n")) == sorted(b"yn")
    assert ids(state.mask_after(b"well</t>\n\nno")) == STOPS
    assert ids(state.mask_after(b"well</t>no")) == STOPS
    assert ids(state.mask_after(b"</t>y")) == [ord("e")]


def test_no_token_ends_the_thoughts_and_begins_the_answer_unseen() -> None:
    words = [b"a", b"<", b"/t>", b"/t>\n", b"/t>yes", b"</t>", b"</t>no", b"a</t> b", b"t>n", b"</", b">x", b"> ", b"y"]
    vocabulary = Vocabulary([*words, b""], frozenset([len(words)]))
    constraint = Constraint(grammar=structured.HEADER + 'start: "yes" | "no"', think_end=END)

    def banned(*tokens: bytes) -> list[bytes]:
        state = Grammars(lambda: vocabulary).begin(constraint, [len(words)])
        allowed = ids(state.mask_after([words.index(token) for token in tokens]))
        return [word for i, word in enumerate(words) if i not in allowed]

    whole = [b"</t>no", b"a</t> b"]
    assert banned() == banned(b"a") == whole
    assert banned(b"<") == [b"/t>yes", *whole] and banned(b"</") == [*whole, b"t>n"]
    assert banned(b"</", b"</") == [*whole, b"t>n"] and banned(b"<", b"a") == whole


def test_thoughts_may_be_left_out_where_the_model_begins_them_itself() -> None:
    state = thinking(starts=b"<t>", grammar='start: "yes"')
    assert ids(state.mask()) == sorted(b"<y")
    assert ids(state.mask_after(b"<")) == [ord("t")]
    assert ids(state.mask_after(b"ye")) == [ord("s")]
    assert ids(state.mask_after(b"<t>a</t>y")) == [ord("e")]
    alike = thinking(starts=b"<t>", grammar='start: "<to>"')
    assert ids(alike.mask_after(b"<t")) == sorted(b">o") and ids(alike.mask_after(b"<to")) == [ord(">")]
    assert not alike.allows(b"<x") and ids(alike.mask_after(b"<")) == [ord("t")]
    assert ids(alike.mask_after(b"<to>")) == STOPS and ids(alike.mask_after(b"<t>x</t><")) == [ord("t")]


def test_a_budget_ends_thoughts() -> None:
    state = thinking(3)
    assert state.mask_after(b"ab") is None
    for i in range(4):
        assert ids(state.mask_after(b"abc" + END[:i].encode())) == [ord(END[i])]
    assert state.mask_after(b"abc</t>") is None and state.mask_after(b"a</t>bcdef") is None
    assert ids(thinking(0).mask()) == [ord("<")]
    later = thinking(1, starts=b"<t>")
    assert later.mask_after(b"<t>") is None and ids(later.mask_after(b"<t>a")) == [ord("<")]
    assert later.mask_after(b"not at all") is None


def test_drafts_that_are_not_allowed_are_found_and_change_nothing() -> None:
    state = begin(by_schema({"type": "array", "items": {"type": "integer"}}))
    assert state.allows(b"[1,2") and not state.allows(b"[1,x]") and not state.allows(b"[1x")
    assert state.mask_after(b"[1") == begin(by_schema({"type": "array", "items": {"type": "integer"}})).mask_after(
        b"[1"
    )
