"""Answers that must follow a grammar, through the whole stack: whole, streamed, on any worker, with all the rest."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest

from tests.e2e.clients import Client, Connect
from tests.e2e.load import USAGE, Json, chat, plain
from tests.e2e.stack import NewStack

DIGITS = "<script>" + "7" * 600
SPACES = "<script>" + " " * 600
PERSON: Json = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip
SCHEMAS: list[Any] = [
    {}, True, {"type": "object"}, {"type": "string", "pattern": "^[a-z]+$", "maxLength": 8}, PERSON,
    {"type": "array", "items": {"type": "number"}, "maxItems": 4},
]  # fmt: skip


def by_schema(schema: Any) -> Json:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}}


@pytest.mark.parametrize("taste", [DIGITS, SPACES, "words"])
@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
async def test_tools_and_json_of_any_schema_and_taste(client: Client, schema: Any, taste: str) -> None:
    for ask in (chat, plain):
        answer = await client.ask(ask(f"say {taste}", 300, **by_schema(schema), **USAGE))
        answer.check()
        if answer.choices[0].finish_reason == "stop":
            assert jsonschema_rs.validator_for(schema).is_valid(json.loads(answer.text)), answer.text
    if taste == DIGITS and schema == {}:
        assert answer.choices[0].finish_reason == "stop" and len(answer.text) <= 32 + 1 + 2


async def test_choices_seeds_logprobs_and_stops_as_always(client: Client) -> None:
    body = chat("several", 80, n=3, temperature=1, seed=5, logprobs=True, top_logprobs=2, **by_schema(PERSON), **USAGE)
    streamed = await client.ask(body)
    whole = await client.ask({k: v for k, v in body.items() if k != "stream_options"} | {"stream": False})
    streamed.check()
    assert [c.text for c in streamed.choices.values()] == [c.text for c in whole.choices.values()]
    assert len({c.text for c in streamed.choices.values()}) == 3
    for choice in streamed.choices.values():
        if choice.finish_reason == "stop":
            assert jsonschema_rs.validator_for(PERSON).is_valid(json.loads(choice.text))
    compact = {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}}
    cut = await client.ask(plain("several", 300, stop=['"age"'], **compact))
    assert cut.choices[0].finish_reason == "stop" and cut.text.rstrip().endswith(",")


@pytest.mark.parametrize(
    ("outputs", "check"),
    [
        ({"choice": ["red", "green"]}, lambda text: text in ("red", "green")),
        ({"regex": "[0-9]{3}-[0-9]{2}"}, lambda text: len(text) == 6 and text[3] == "-"),
        ({"grammar": 'root ::= "a" [xyz] "!"'}, lambda text: text[0] == "a" and text[2] == "!"),
        ({"grammar": 'start: "b" /[xyz]/ "?"'}, lambda text: text[0] == "b" and text[2] == "?"),
        ({"json": PERSON, "disable_any_whitespace": True}, lambda text: " " not in text.split('"')[2]),
        ({"json": '{"type": "boolean"}'}, lambda text: text in ("true", "false")),
        ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    ],
)
async def test_structured_outputs(client: Client, outputs: Json, check: Callable[[str], bool]) -> None:
    answer = await client.ask(plain("<script>{}", 120, structured_outputs=outputs, min_tokens=2))
    answer.check()
    assert answer.choices[0].finish_reason == "stop" and check(answer.text), answer.text


async def test_what_cannot_be_kept_is_refused_at_once(client: Client) -> None:
    for fields, param in (
        (by_schema({"properties": {"a": {"contains": {}}}}),
         "response_format.json_schema.schema.properties.a.contains"),
        (by_schema({"$ref": "#"}), "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": "(?=x)"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}, "ignore_eos": True}, "ignore_eos"),
    ):  # fmt: skip
        answer = await client.ask(plain("x", 4, **fields))
        assert answer.status == 400 and answer.error and answer.error["param"] == param, answer.error


async def test_tools_and_json_keywords_that_cannot_be_kept_are_refused_within_a_second(client: Client) -> None:
    for keyword, value in (
        ("contains", {}), ("uniqueItems", True), ("$dynamicRef", "#a"), ("$dynamicAnchor", "a"), ("unheardOf", {}),
        ("not", {"pattern": "a"}), ("if", {"format": "uri"}), ("propertyNames", {"not": {}}), ("format", "phone"),
        ("dependentRequired", 3), ("items", 3), ("allOf", {}), ("properties", []), ("dependencies", []),
    ):  # fmt: skip
        began = time.perf_counter()
        answer = await client.ask(plain("x", 4, **by_schema({"anyOf": [{keyword: value, "then": False}, {}]})))
        took_s = time.perf_counter() - began
        assert answer.status == 400 and answer.error and answer.error["code"] == "unsupported_schema", keyword
        assert answer.error["param"] == f"response_format.json_schema.schema.anyOf[0].{keyword}"
        assert took_s < 1, (keyword, took_s)


async def test_bad_words_and_allowed_tokens(client: Client) -> None:
    never = await client.ask(plain("<script>one two one", 40, bad_words=["two"]))
    assert "two" not in never.text and never.text.startswith("one tw")
    only = await client.ask(plain("any", 20, allowed_token_ids=list(b"xyz")))
    assert set(only.text) <= set("xyz") and len(only.text) == 20


async def test_usage_in_every_chunk(client: Client) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}}
    answer = await client.ask(chat("counted", 12, **options))
    answer.check()
    counts = [json.loads(line)["usage"]["completion_tokens"] for line in answer.lines[1:-1]]
    assert counts == sorted(counts) and counts[-1] == 12


@pytest.mark.timeout(90)
async def test_an_answer_goes_on_in_its_grammar_on_another_worker(new_stack: NewStack, connect: Connect) -> None:
    body = plain("goes on", 90, temperature=1, seed=3, n=2, **by_schema({"type": "array", "items": PERSON}), **USAGE)
    async with new_stack(workers=2, env={"scripted_step_ms": 15}) as stack:
        client = connect(stack.url)
        undisturbed = await client.ask(body)
        reached = asyncio.Event()
        asking = client.begin(body, lambda answer: reached.set() if answer.position > 40 else None)
        await asyncio.wait_for(reached.wait(), 20)
        stack.kill(stack.by_incarnation(stack.state.running()[0].worker))
        answer = await asking
    answer.check()
    assert answer.essence() == undisturbed.essence()
