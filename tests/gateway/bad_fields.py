"""Every field of every route with every kind of value, made from `/openapi.json`: a new field is there by itself.

Which values are right is not said here: the schema says it, and a validator that is not ours reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema_rs

Json = dict[str, Any]

# Fields with rules that a schema cannot say: they depend on the model, or on another field.
FURTHER_RULES = {
    "/v1/chat/completions": {
        "messages", "logit_bias", "min_tokens", "n", "prediction", "stop_token_ids", "stream_options", "top_logprobs",
        "response_format", "structured_outputs", "allowed_token_ids", "bad_words", "tools", "tool_choice",
        "continue_final_message", "add_generation_prompt", "chat_template_kwargs", "reasoning_effort",
        "thinking_token_budget",
    },
    "/v1/completions": {
        "prompt", "best_of", "logit_bias", "logprobs", "min_tokens", "n", "stop_token_ids", "stream_options",
        "response_format", "structured_outputs", "allowed_token_ids", "bad_words", "suffix",
    },
    "/tokenize": {
        "prompt", "messages", "tools", "continue_final_message", "add_generation_prompt", "chat_template_kwargs",
    },
    "/detokenize": {"tokens"},
}  # fmt: skip

HUGE = "x" * 100_000
MISSING = object()


class Raw(str):
    """JSON text that Python's own writer would not write."""


# Ordinary values of what must be there, and few tokens where nothing else is tested.
ORDINARY: Json = {
    "prompt": "x", "tokens": [1], "messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "temperature": 0,
}  # fmt: skip
ONE_OF = ("prompt", "messages")  # never both
SIMPLE: list[Any] = [
    MISSING, None, True, False, "", "x", "1", 0, 1, -1, 0.5, 1.0, 1 << 31, 1 << 32, 1 << 63, (1 << 63) - 1, -(1 << 63),
    -(1 << 63) - 1, 1 << 64, 1e300, -1e300, [], {}, [None], [[]], [{}], [True], [-1], [1.5], {"x": 1}, {"": None},
    HUGE, [HUGE], "\0", "\u2028\U0001f98a",
]  # fmt: skip
INNER: list[Any] = [None, True, "x", 1, -1, 0.5, 1 << 63, 1e300, [], {}, [[]], HUGE]
UNREADABLE = [
    Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e999"), Raw("-1e999"), Raw("[NaN]"), Raw("1" + "0" * 5000),
    Raw('"\\ud83d"'), Raw('["\\udc00"]'), Raw('{"\\ud83d": 1}'), Raw("[" * 100 + "]" * 100), Raw("[" * 100_000),
    Raw('{"a":' * 90 + "1" + "}" * 90), Raw("01"), Raw("'x'"), Raw(""),
]  # fmt: skip
DEEP = [json.loads("[" * 60 + "]" * 60), json.loads('{"a":' * 60 + "1" + "}" * 60)]


@dataclass(frozen=True)
class Case:
    """allowed: the body is right by the schema; readable: it is JSON of a kind that every reader understands alike."""

    path: str
    field: str
    what: str
    body: bytes
    allowed: bool
    readable: bool = True

    def __str__(self) -> str:
        return f"{self.path} {self.field}={self.what}"


def cases(document: Json) -> Iterator[Case]:
    for path, methods in document["paths"].items():
        operation = methods.get("post", {})
        if "requestBody" in operation:
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            yield from _of_route(document, path, _resolved(document, schema))


def check_verdict(case: Case, status: int, error: Json | None) -> None:
    """Taken only if the schema allows it; refused with the field's name, and if allowed only by a further rule."""
    if error is None:
        assert status == 200 and case.allowed, f"{case}: refused by the schema, and taken"
        return
    if case.field == "timeout" and case.allowed and status == 504:
        return  # as it asked for
    if case.field == "tools" and case.allowed and error["code"] == "context_length_exceeded":
        return  # they stand in the prompt
    assert status in (400, 404), f"{case}: {status} {error}"
    named = (error["param"] or "").split(".")[0].split("[")[0]
    assert named == case.field or {named, case.field} == set(ONE_OF) or (not named and not case.readable), (
        f"{case}: {error}"
    )
    assert not case.allowed or status == 404 or case.field in FURTHER_RULES[case.path], f"{case} is allowed: {error}"


def _of_route(document: Json, path: str, schema: Json) -> Iterator[Case]:
    validator = jsonschema_rs.Draft202012Validator(schema | {"components": document["components"]})
    few = {"max_tokens": 4, "temperature": 0} if "max_tokens" in schema["properties"] else {}
    must = schema.get("required") or [next(name for name in ORDINARY if name in schema["properties"])]
    base = few | {name: ORDINARY[name] for name in must}
    for field, about in schema["properties"].items():
        # of a field that is not supported, and is refused before it is read, less is to be tried
        simple = [*INNER, MISSING] if about.get("description") == "not supported" else [*SIMPLE, *DEEP]
        values = [*simple, *_bounds(document, about)]
        for value in values:
            others = set(ONE_OF) if field in ONE_OF else {field}
            body = {k: v for k, v in base.items() if k not in others} | ({} if value is MISSING else {field: value})
            yield Case(path, field, _shown(value), json.dumps(body).encode(), validator.is_valid(body))
        for raw in UNREADABLE:
            text = json.dumps(base | {field: "HERE"}).replace('"HERE"', raw)
            yield Case(path, field, raw[:40], text.encode(), allowed=False, readable=False)


def _bounds(document: Json, schema: Json) -> list[Any]:
    """Values at and beyond what the schema names, also inside of lists and objects."""
    schema = _resolved(document, schema)
    found: list[Any] = [value for branch in schema.get("anyOf", []) for value in _bounds(document, branch)]
    found += [*schema.get("enum", []), *([schema["const"]] if "const" in schema else [])]
    for key, step in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
        if key in schema:
            found += [schema[key], schema[key] + step]
            if schema["type"] == "number":
                found.append(schema[key] + step / 1024)
    for key, unit in (("minLength", "y"), ("maxLength", "y")):
        if key in schema:
            found += [unit * max(0, schema[key] + d) for d in (-1, 0, 1)]
    if "items" in schema:
        one = _example(document, schema["items"])
        sizes = [schema[key] + d for key in ("minItems", "maxItems") if key in schema for d in (-1, 0, 1)]
        found += [[one] * max(0, size) for size in sizes]
        found += [[value] for value in (*INNER, *_bounds(document, schema["items"]))]
    if schema.get("type") == "object":
        found += _objects(document, schema)
    return found


def _objects(document: Json, schema: Json) -> list[Any]:
    found: list[Any] = []
    if "maxProperties" in schema:
        found += [{str(i): 0 for i in range(schema["maxProperties"] + d)} for d in (-100, 0, 1)]
    if isinstance(schema.get("additionalProperties"), dict):
        found += [{"1": value} for value in (*INNER, *_bounds(document, schema["additionalProperties"]))]
        found += [{key: 0} for key in ("-1", "01", "+1", " 1", "1.0", "1e0", "x", "", "\u0661", str(1 << 64))]
    whole = _example(document, schema)
    for name, about in schema.get("properties", {}).items():
        found.append({k: v for k, v in whole.items() if k != name})
        found += [whole | {name: value} for value in (*INNER, *_bounds(document, about))]
    return found


def _example(document: Json, schema: Json) -> Any:
    """A simple value that is right by the schema."""
    schema = _resolved(document, schema)
    if "anyOf" in schema:
        return _example(document, schema["anyOf"][0])
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[-1])
    kind = schema["type"] if isinstance(schema["type"], str) else schema["type"][0]
    if kind == "object":
        return {name: _example(document, schema["properties"][name]) for name in schema.get("required", [])}
    return {"string": "x", "integer": 1, "number": 1, "boolean": True, "array": [], "null": None}[kind]


def _resolved(document: Json, schema: Json) -> Json:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def _shown(value: Any) -> str:
    return "missing" if value is MISSING else json.dumps(value)[:60]
