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

from services.gateway import structured
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
    *({"type": "string", "format": name} for name in structured.FORMATS),
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
