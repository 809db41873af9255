"""Which tools may or must be called, and that what must be a call is one in every form."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import pytest

from services.gateway import byte_tokenizer, tool_formats
from services.gateway.dialect import Dialect, dialect_of
from services.gateway.errors import BadRequest
from services.gateway.forms import Form, form_of
from services.gateway.openai_schema import ChatCompletionRequest
from services.gateway.request_parsing import parse
from services.gateway.tool_parser import ToolParser
from services.gpu_worker.grammar import Grammars
from shared import scripted_vocab as vocab
from shared.protocol import Constraint

TOKENIZER = byte_tokenizer.byte_tokenizer()
GRAMMARS = Grammars()
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
           "required": ["city"], "additionalProperties": False}  # fmt: skip
POINT = {"type": "object", "properties": {"at": {"$ref": "#/$defs/p"}}, "required": ["at"], "$defs": {
    "p": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
          "additionalProperties": False}}, "additionalProperties": False}  # fmt: skip


def tool(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


TOOLS = [tool("get_weather", WEATHER), tool("go", POINT), tool("now")]
SCHEMAS: dict[str, Any] = {"get_weather": WEATHER, "go": POINT, "now": {"type": "object", "maxProperties": 0}}


def form(dialect: str = "generic", **fields: Any) -> Form:
    request = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS} | fields
    return form_of(parse(ChatCompletionRequest, request), in_dialect(dialect))


def in_dialect(name: str) -> Dialect:
    return dialect_of(TOKENIZER, name)


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        form(**fields)
    return caught.value


def written(asked: Form, seed: int) -> str:
    """An answer that the grammar allows, by chance, with short texts."""
    assert asked.wanted is not None
    state = GRAMMARS.begin(Constraint(grammar=asked.wanted.grammar, json_text=True), [vocab.EOS])
    chance, ids = random.Random(seed), list[int]()
    for _ in range(3000):
        mask = state.mask_after(ids)
        assert mask is not None
        allowed = [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]
        closing = [i for i in allowed if i == vocab.EOS or chr(i) in '"}]']
        ids.append(chance.choice(closing if closing and chance.random() < 0.5 else allowed))
        if ids[-1] == vocab.EOS:
            return bytes(ids[:-1]).decode()
    raise AssertionError(bytes(ids))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "go"}}])
@pytest.mark.parametrize("dialect", tool_formats.BY_NAME)
def test_what_must_be_a_call_is_one(dialect: str, choice: Any) -> None:
    for seed in range(6):
        asked = form(dialect, tool_choice=choice)
        assert asked.tools.row is not None
        parser = ToolParser(asked.tools.row, asked.tools.names, asked.tools.max_calls)
        content, calls = parser.push(written(asked, seed), last=True)
        assert content == "" and calls
        assert choice == "required" or [call.name for call in calls] == ["go"]
        for call in calls:
            assert jsonschema_rs.validator_for(SCHEMAS[call.name]).is_valid(json.loads(call.arguments)), call


def test_one_call_where_no_more_are_wanted() -> None:
    assert form(tool_choice="required", parallel_tool_calls=False).tools.max_calls == 1
    for seed in range(20):
        text = written(form("hermes", tool_choice="required", parallel_tool_calls=False), seed)
        assert text.count("<tool_call>") == 1


@pytest.mark.parametrize("dialect", ["hermes", "llama3_json", "mistral", "generic"])
def test_strict_tools_are_held_to_their_parameters_where_they_are_called(dialect: str) -> None:
    asked = form(dialect, tools=[tool("get_weather", WEATHER, strict=True)])
    row = asked.tools.row
    assert asked.wanted is not None and row is not None
    key = row.arguments_key
    calls = f'{{"name": "get_weather", "{key}": {{"city": "%s"}}}}'
    text = row.before + row.call_before + calls
    for content, city, allowed in (("", "Rome", True), ("", "Paris", False)):
        state = GRAMMARS.begin(Constraint(grammar=asked.wanted.grammar), [vocab.EOS])
        assert state.allows((content + text % city).encode()) is allowed
    state = GRAMMARS.begin(Constraint(grammar=asked.wanted.grammar), [vocab.EOS])
    assert state.allows(b"No call at all, but 1 < 2.")


def test_an_answer_by_schema_or_a_call() -> None:
    answer = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "required": ["a"]}}}
    asked = form("hermes", response_format=answer)
    assert asked.wanted is not None
    for text, allowed in (('{"a": 1}', True), ('<tool_call>\n{"name": "now", "arguments": {', True), ("text", False)):
        state = GRAMMARS.begin(Constraint(grammar=asked.wanted.grammar), [vocab.EOS])
        assert state.allows(text.encode()) is allowed, text


@pytest.mark.parametrize("dialect", tool_formats.BY_NAME)
def test_answers_by_schema_are_possible_beside_tools_in_every_form_or_refused(dialect: str) -> None:
    answer = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    try:
        asked = form(dialect, response_format=answer)
    except BadRequest as e:
        assert e.param == "tools" and dialect in ("generic", "llama3_json", "pythonic")
        return
    assert asked.wanted is not None
    for text in ('{"n":1}', '{"name": 5}', '{ "tool_calls": [] }'):
        assert GRAMMARS.begin(Constraint(grammar=asked.wanted.grammar), [vocab.EOS]).allows(text.encode()), text


def test_without_tools_or_with_none_of_them_nothing_is_looked_for() -> None:
    assert form(tools=[]) == form(tools=None) and form(tools=[]).tools.row is None
    none = form(tool_choice="none")
    assert none.tools.row is None and len(none.tools.specs) == 3 and none.wanted is None
    auto = form()
    assert auto.tools.row is not None and auto.wanted is None and auto == form(tool_choice="auto")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [tool("now"), tool("now")]}, "tools[1].function.name"),
        ({"tools": [tool("not a name")]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [tool("f", {"contains": {}}, strict=True)]}, "tools[0].function.parameters.contains"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"structured_outputs": {"regex": "a"}}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ],
)
def test_what_cannot_be_asked(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_parameters_that_cannot_be_kept_are_any_where_nobody_insists() -> None:
    wanted = form(tools=[tool("f", {"contains": {}})], tool_choice="required").wanted
    assert wanted is not None and not wanted.instead
    wanted = form(tools=[tool("f", {"pattern": "(?=x)"})], tool_choice="required").wanted
    assert wanted is not None and "(?=x)" in wanted.grammar and "(?=x)" not in wanted.instead
    strict = form(tools=[tool("f", {"pattern": "(?=x)"}, strict=True)], tool_choice="required").wanted
    assert strict is not None and not strict.instead
