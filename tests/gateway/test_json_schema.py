"""What JSON Schema says in keywords that grammars do not know: what becomes of it, what is refused, and its bounds."""

from __future__ import annotations

import contextlib
import json
import random
import re
from typing import Any

import pytest

from services.gateway.errors import BadRequest
from services.gateway.json_schema import plain
from services.gateway.schema_branches import Exclusions
from services.gateway.schema_negation import none_of
from tests.helpers import bounded_work


def refused(schema: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        plain(schema, "s")
    assert caught.value.code == "unsupported_schema"
    return caught.value


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        ({"not": {"pattern": "a"}}, "s.not"),
        ({"not": {"type": "integer"}}, "s.not"),
        ({"not": {"items": {"type": "null"}}}, "s.not"),
        ({"not": {"properties": {"a": {"multipleOf": 2}}}}, "s.not"),
        ({"not": {"enum": [{}]}}, "s.not"),
        ({"not": {"type": [["null"]]}}, "s.not"),
        ({"not": {"const": "a" * 51}}, "s.not"),
        ({"not": {"contains": {}}}, "s.not.contains"),
        ({"if": {"pattern": "a"}, "then": {"type": "null"}}, "s.if"),
        ({"if": True, "then": {"uniqueItems": True}}, "s.then.uniqueItems"),
        ({"dependentSchemas": {"a": {"contains": {}}}}, "s.dependentSchemas.a.contains"),
        ({"dependentRequired": ["a"]}, "s.dependentRequired"),
        ({"propertyNames": {"format": "date"}}, "s.propertyNames"),
        ({"propertyNames": {"enum": 1}}, "s.propertyNames"),
        ({"propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"$ref": "#/$defs/n"}}}, "s.propertyNames"),
        ({"unevaluatedProperties": False, "anyOf": [{"properties": {"a": {}}}]}, "s.unevaluatedProperties"),
        ({"unevaluatedItems": {"type": "null"}, "contains": {}, "minContains": 0}, "s.unevaluatedItems"),
        ({"contains": {}, "minContains": 0, "maxContains": 2}, "s.contains"),
        ({"uniqueItems": True, "maxItems": 2}, "s.uniqueItems"),
        ({"items": [{"foo": 1}]}, "s.items[0].foo"),
        ({"id": {"type": "string"}}, "s.id"),
        ({"allOf": {"type": "null"}}, "s.allOf"),
        ({"properties": ["a"]}, "s.properties"),
        ({"format": ["date"]}, "s.format"),
        ({"minProperties": 2}, "s.minProperties"),
        ({"minProperties": 2, "required": ["a", "a"]}, "s.minProperties"),
        ({"not": {"maxProperties": 1}}, "s.not"),
        ({"not": {"type": [{}]}}, "s.not"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "contains": {}, "minContains": 0}, "s.contains"),
        (
            {"propertyNames": {"$ref": "#/$defs/a%25b"}, "$defs": {"a%25b": {"const": "q"}, "a%b": {"const": "z"}}},
            "s.propertyNames",
        ),
        (3, "s"),
    ],
)
def test_what_cannot_be_kept_is_named(schema: Any, param: str) -> None:
    assert refused(schema).param == param and param in refused(schema).message


def nested(keyword: str, depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = (
            {"oneOf": [schema, {"maxLength": 3}]} if keyword == "oneOf" else {keyword: schema, "then": {}, "else": {}}
        )
        schema |= {"then": {"maxLength": 3}, "else": {"minLength": 2}} if keyword == "if" else {}
    return schema


@pytest.mark.parametrize("keyword", ["if", "not", "oneOf"])
def test_what_doubles_with_each_level_ends(keyword: str) -> None:
    with bounded_work(1):
        try:
            made = plain(nested(keyword, 60), "s")
        except BadRequest as e:
            assert e.code == "unsupported_schema"
        else:
            assert len(json.dumps(made)) < 1 << 20


def union(num: int, **also: Any) -> Any:
    kinds = [{"type": "object", "properties": {"k": {"const": i}}, "required": ["k"]} for i in range(num)]
    return {"oneOf": kinds, **also}


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"const": i} for i in range(4000)]},
        {"oneOf": [{"const": i} for i in (*range(4000), 0)]},
        {"oneOf": [{"enum": list(range(n, n + 20000))} for n in (0, 20000, 40000, 59999)]},
        {"oneOf": [{"enum": [[i] for i in range(n, n + 4000)]} for n in (0, 4000)]},
        {"oneOf": [{"type": ["string"] * 9000} for _ in range(300)]},
        union(2000),
        union(100, required=[f"p{i}" for i in range(5000)]),
        {"anyOf": [union(100) for _ in range(100)]},
        {"not": {"const": "a" * 60000}},
        {"oneOf": [{"const": "a" * 30000, "minLength": 1}, {"enum": ["a" * 30000]}]},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_many_branches_and_long_values_take_little_time(schema: Any) -> None:
    """The loop that reads requests waits for it."""
    with bounded_work(0.5), contextlib.suppress(BadRequest):
        plain(schema, "s")


def test_unions_of_many_values_are_told_and_of_many_kinds_too() -> None:
    values: list[Any] = [{"oneOf": [{"const": i} for i in range(4000)]}, {"oneOf": [{"const": None}, {"const": 0}]}]
    for schema in (*values, union(60)):
        made = plain(schema, "s")
        assert isinstance(made, dict) and "oneOf" not in made


def test_references_that_go_round_end() -> None:
    names = {f"n{i}": {"allOf": [], "$ref": f"#/$defs/n{(i + 1) % 9}"} for i in range(9)}
    many = {f"p{i}": {"propertyNames": {"$ref": "#/$defs/n0"}} for i in range(500)}
    definitions = {n: {k: v for k, v in d.items() if k != "allOf"} for n, d in names.items()}
    with bounded_work(1):
        refused({"$defs": definitions, "properties": many})
        plain({"oneOf": [{"$ref": "#/$defs/n0"}, {"$ref": "#/$defs/n1"}], "$defs": names}, "s")


def test_pointers_within_other_documents_are_not_followed() -> None:
    """They start from there, not from the root: what the root has by that name says nothing."""
    defs = {"a": {"type": "string"}, "b": {"type": "null"}}
    branches = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}
    made = plain({"$defs": defs, "properties": {"p": branches}}, "s")
    assert isinstance(made, dict) and "oneOf" not in made["properties"]["p"]
    inner = {"$id": "other", "$defs": {"a": {}, "b": {}}} | branches
    made = plain({"$defs": defs, "properties": {"p": inner}}, "s")
    assert isinstance(made, dict) and "oneOf" in made["properties"]["p"]


@pytest.mark.parametrize(
    ("a", "b", "beside", "are"),
    [
        ({"type": "string"}, {"type": ["null", "array"]}, {}, True),
        ({"type": "integer"}, {"type": "number"}, {}, False),
        ({"type": "string"}, {}, {}, False),
        ({"const": 1}, {"enum": [2, 3]}, {}, True),
        ({"const": 1}, {"enum": [True]}, {}, False),
        ({"properties": {"k": {"const": "a"}}, "required": ["k"]}, {"properties": {"k": {"const": "b"}}}, {}, False),
        ({"properties": {"k": {"const": "a"}}}, {"properties": {"k": {"const": "b"}}}, {"type": "object"}, False),
        ({"properties": {"k": {"const": "a"}}}, {"properties": {"k": {"const": "b"}}},
         {"type": "object", "required": ["k"]}, True),
        ({"properties": {"k": {"const": "a"}}}, {"properties": {"k": {"const": "b"}}},
         {"type": ["object", "null"], "required": ["k"]}, False),
        (False, {}, {}, True), (True, {}, {}, False), (None, {"type": "null"}, {}, False),
    ],
)  # fmt: skip
def test_what_cannot_hold_together(a: Any, b: Any, beside: Any, are: bool) -> None:
    assert Exclusions().all_exclusive([a, b], beside) == Exclusions().all_exclusive([b, a], beside) == are


def test_every_text_but_these() -> None:
    chance = random.Random(1)
    for _ in range(50):
        texts = {"".join(chance.choices("ab]-^\\é\n", k=chance.randrange(4))) for _ in range(chance.randrange(1, 6))}
        expression = re.compile(re.sub(r"\\x\{([0-9a-f]+)\}", lambda m: re.escape(chr(int(m[1], 16))), none_of(texts)))
        others = {"".join(chance.choices("ab]-^\\é\nx", k=chance.randrange(6))) for _ in range(200)}
        for text in texts | others:
            assert (expression.fullmatch(text) is None) == (text in texts), (texts, text)
