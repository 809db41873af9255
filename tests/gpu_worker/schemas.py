"""JSON schemas: 300 of our own over every keyword that is supported, and those of a public suite that lies in a folder.

The suite is json-schema-org/JSON-Schema-Test-Suite; `JSON_SCHEMA_TEST_SUITE` names a copy of it.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.gateway import schema_formats, structured
from services.gateway.errors import BadRequest
from services.gateway.grammar_process import open_
from shared import scripted_vocab as vocab
from shared.protocol import Constraint

NUM_SCHEMAS = 300
SUITE = "JSON_SCHEMA_TEST_SUITE"
# ECMA's white space; what stood beside a `$ref` meant nothing once; what is encoded in a string is a note
OTHER_MEANINGS = ("ecmascript-regex.json", "ref.json", "content.json")

LEAVES: list[Any] = [
    {}, True, {"title": "T", "description": "anything"},
    *({"type": name} for name in ("null", "boolean", "integer", "number", "string", "array", "object")),
    {"type": ["integer", "null"]}, {"type": ["string", "boolean", "array"]},
    {"const": None}, {"const": "ä \"q\" \\ 🦊"}, {"const": {"a": [1, 2.5, {}]}}, {"const": -0.5},
    {"enum": ["red", "green", "blue"]}, {"enum": [1, "1", True, None, [1]]},
    {"type": "string", "enum": ["a", "ab", "abc"]},
    {"type": "integer", "minimum": 3}, {"type": "integer", "maximum": -3},
    {"type": "integer", "minimum": -7, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 5}, {"type": "integer", "multipleOf": 5},
    {"type": "integer", "multipleOf": 3, "minimum": 10, "maximum": 20},
    {"type": "number", "minimum": 0.25}, {"type": "number", "minimum": -1, "maximum": 1},
    {"type": "number", "exclusiveMinimum": -2.5, "exclusiveMaximum": 2.5}, {"type": "number", "multipleOf": 0.01},
    {"type": "string", "minLength": 2}, {"type": "string", "maxLength": 3},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[a-z]{2,5}$"}, {"type": "string", "pattern": "^(foo|ba[rz])-[0-9]+$"},
    {"type": "string", "pattern": "b+c"}, {"type": "string", "pattern": "^\\d{3}$"},
    *({"type": "string", "format": name} for name in schema_formats.FORMATS),
    {"type": "array", "items": {"type": "integer"}}, {"type": "array", "items": {"type": "boolean"}, "minItems": 2},
    {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2}, {"type": "array", "maxItems": 0},
    {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"enum": ["a"]}]},
    {"type": "array", "prefixItems": [{"type": "boolean"}], "items": False},
    {"type": "array", "prefixItems": [{"type": "boolean"}], "items": {"type": "integer"}, "minItems": 2},
    {"type": "object", "properties": {"a": {"type": "integer"}}},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["b"]},
    {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    {"type": "object", "properties": {"a": True}, "required": ["a", "z"]},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "boolean"}}, "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]}, {"anyOf": [{"const": 1}, {"const": 2}]},
    {"oneOf": [{"type": "boolean"}, {"type": "array", "maxItems": 1}]},
    {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 9}]},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"required": ["a"]}]},
    {"$ref": "#/$defs/x", "$defs": {"x": {"type": "integer", "minimum": 1}}},
    {"type": "object", "properties": {"n": {"$ref": "#/definitions/n"}}, "definitions": {"n": {"enum": ["n"]}}},
    {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"],
     "additionalProperties": False},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}}},
]  # fmt: skip


# What is told in other keywords before it is compiled: a schema, what it allows, and what it forbids.
RETOLD: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "integer", "uniqueItems": False, "x-order": 1, "_note": 2, "id": "i", "$anchor": "a"}, [3], ["3"]),
    ({"$schema": "https://example.com/my-dialect", "type": "null"}, [None], [1]),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "null"}, [None], [1]),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "integer"}, {"type": "null"}],
      "additionalItems": False}, [[1, None], [1]], [[1, 2], [1, None, 3]]),
    ({"items": {"type": "integer"}, "additionalItems": False}, [[1, 2]], [["a"]]),
    ({"type": "array", "items": {"type": "null"}, "maxItems": 1, "uniqueItems": True}, [[], [None]], [[None, None]]),
    ({"contains": {"type": "null"}, "minContains": 0}, [[1], 2], []),
    ({"type": "null", "minContains": 2, "maxContains": 1, "then": False, "else": False}, [None], [1]),
    ({"type": "object", "dependentRequired": {"a": ["b"], "c": []}}, [{}, {"b": 1}, {"c": 1}, {"b": 2, "a": 1}],
     [{"a": 1}]),
    ({"dependencies": {"a": ["b"], "b": {"properties": {"b": {"type": "null"}}}, "c": True}},
     [{}, {"b": None}, {"b": None, "a": 1}, 3], [{"a": 1}, {"b": 1}]),
    ({"dependentSchemas": {"a": {"maxProperties": 1}}}, [{"a": 1}, {"b": 1, "c": 1}], [{"a": 1, "b": 1}]),
    ({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}}, [{}, {"a": 1}, 3],
     [{"c": 1}, {"a": "1"}]),
    ({"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"title": "N", "const": "a.b"}}},
     [{"a.b": 1}], [{"a-b": 1}]),
    ({"type": "object", "properties": {"ab": {"type": "null"}, "c": {}},
      "propertyNames": {"minLength": 2, "maxLength": 3}}, [{"ab": None}, {"xyz": 1}], [{"c": 1}, {"abcd": 1}]),
    ({"type": "object", "propertyNames": {"pattern": "^x"}}, [{"xy": 1}], [{"yx": 1}]),
    ({"propertyNames": False}, [{}, 1], [{"a": 1}]),
    ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
    ({"type": "object", "additionalProperties": True, "unevaluatedProperties": False}, [{"a": 1}], [1]),
    ({"type": "array", "prefixItems": [{}], "unevaluatedItems": False}, [[1]], [[1, 2]]),
    ({"not": {"type": ["object", "array"]}}, [1, "a", None, True], [{}, []]),
    ({"type": "object", "not": {"required": ["a", "b"]}}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}]),
    ({"type": "string", "not": {"enum": ["a", "ab", "é\n", 3]}}, ["", "b", "abc", "aé", "é"], ["a", "ab", "é\n"]),
    ({"not": {"enum": [1, 2.5, True, None, ""]}}, [0, 2, 3, False, "x", []], [1, 2.5, True, None, ""]),
    ({"not": {"const": 3}, "type": "integer"}, [2, 4, -3], [3]),
    ({"not": {"minimum": 3}}, [2.5], [3, "a"]), ({"type": "number", "not": {"exclusiveMaximum": 3}}, [3, 4], [2]),
    ({"type": "string", "not": {"maxLength": 2}}, ["abc"], ["ab"]),
    ({"type": "array", "not": {"minItems": 1}}, [[]], [[1]]),
    ({"not": {"anyOf": [{"type": ["string", "null"]}, {"maximum": 3}]}}, [4], ["", None, 3, True]),
    ({"not": {"allOf": [{"type": "string"}, {"maxLength": 2}]}}, ["abc", 1], ["ab"]),
    ({"not": {"not": {"type": "null"}}}, [None], [1]),
    ({"not": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "type": "object"}, [{}, {"a": 2}], [{"a": 1}]),
    ({"type": "object", "properties": {"k": {"enum": ["a", "b"]}, "x": {}, "y": {}}, "required": ["k"],
      "if": {"properties": {"k": {"const": "a"}}}, "then": {"required": ["x"]}, "else": {"required": ["y"]}},
     [{"k": "a", "x": 1}, {"k": "b", "y": 1}], [{"k": "a"}, {"k": "b", "x": 1}, {"k": "a", "y": 1}]),
    ({"if": {"type": "string"}, "then": {"maxLength": 1}}, ["a", 12], ["ab"]),
    ({"if": {"pattern": "^a"}, "else": {"type": "null"}}, ["ab", None, 1], ["b"]),
    ({"if": True, "then": {"type": "null"}}, [None], [1]), ({"if": {"pattern": "a"}}, ["b"], []),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
     [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
    ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {
        name: {"type": "object", "properties": {"kind": {"const": name}, name: {"type": "integer"}},
               "required": ["kind", name], "additionalProperties": False} for name in "ab"}},
     [{"kind": "a", "a": 1}, {"kind": "b", "b": 1}], [{"kind": "a", "b": 1}]),
    ({"oneOf": [{"enum": [1, 2]}, {"enum": [3]}]}, [1, 3], [4]),
    ({"oneOf": [{"maximum": 3}, {"minimum": 2}]}, [1, 5], [2, 3, "a"]),
    ({"type": "string", "format": "password"}, ["x"], [1]),
]  # fmt: skip


def own_schemas() -> list[Any]:
    """Every leaf, alone and within others; those that have names of their own only alone."""
    movable = [leaf for leaf in LEAVES if "$ref" not in json.dumps(leaf)]
    pairs = list(zip(movable, movable[7:] + movable[:7], strict=True))
    return [
        *LEAVES,
        *({"type": "object", "properties": {"p": a, "q": b}, "required": ["p"], "additionalProperties": False}
          for a, b in pairs),
        *({"type": "array", "items": leaf, "minItems": 1, "maxItems": 3} for leaf in movable),
        *({"$defs": {"d": a}, "type": "object", "properties": {"r": {"$ref": "#/$defs/d"}, "s": b},
           "required": ["r", "s"]} for a, b in pairs),
        *({"type": "array", "prefixItems": [a, b], "items": False, "minItems": 2} for a, b in pairs),
        *({"anyOf": [{"type": "null"}, a, b]} for a, b in pairs),
    ][:NUM_SCHEMAS]  # fmt: skip


def suite_cases() -> Iterator[tuple[str, Any, list[Any]]]:
    """Where it stands, a schema of the suite, and what it does not allow."""
    folder = Path(os.environ[SUITE])
    seen = set()
    for draft in ("draft2020-12", "draft2019-09", "draft7", "draft6"):
        for path in sorted((folder / "tests" / draft).rglob("*.json")):
            if path.name in OTHER_MEANINGS:
                continue
            for group in json.loads(path.read_text()):
                schema = group["schema"]
                essence = {k: v for k, v in schema.items() if k != "$schema"} if isinstance(schema, dict) else schema
                key = json.dumps(essence, sort_keys=True)
                if key not in seen:
                    seen.add(key)
                    invalid = [test["data"] for test in group["tests"] if not test["valid"]]
                    yield f"{draft}/{path.name}: {group['description']}", schema, invalid


_check = open_({"size": vocab.VOCAB_SIZE, "special": {}})[1]


def constraint_of(schema: Any) -> Constraint | None:
    """As a gateway admits it; None for what it refuses."""
    try:
        wanted = structured.json_wanted(schema, "schema")
    except BadRequest:
        return None
    answer = _check({"grammar": wanted.grammar, "is_gbnf": False})
    return None if "error" in answer else Constraint(grammar=answer["grammar"], json_text=True)


def keywords_of(schema: Any) -> set[str]:
    """Of a schema and all within it; names of properties may be among them."""
    if isinstance(schema, dict):
        return {*schema, *itertools.chain(*map(keywords_of, schema.values()))}
    return set(itertools.chain(*map(keywords_of, schema))) if isinstance(schema, list) else set()
