"""From `response_format` and `structured_outputs` to a grammar. *Pure.*

What JSON Schema may say is in `json_schema.py`: a keyword that cannot be kept is refused by name, never ignored.
Whether a grammar compiles, and in time, is found out elsewhere (`grammar_pool.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import llguidance

from services.gateway import json_reader
from services.gateway.errors import BadRequest
from services.gateway.json_schema import plain
from services.gateway.openai_parts import ResponseFormat, StructuredOutputs
from services.gateway.openai_schema import GenerationRequest
from services.gateway.schema_negation import Schema

MAX_SCHEMA_CHARS = 1 << 16
MAX_WRITTEN_CHARS = 1 << 18  # as it comes, with its descriptions: that bounds the time to read it
# A line break and indentation, or one space, at each place: what no model can go on with for ever.
WHITESPACE = r"[ ]|\n[ \t]{0,64}"
HEADER = '%llguidance {"no_forcing": true}\n'  # a forced text may be cut into tokens in any way


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an answer must be, in llguidance's Lark; is_json: it is one JSON text. param: the field that asks for it.
    is_gbnf: the grammar is llama.cpp's form of one instead, and still has to be translated. instead: where it cannot be
    compiled this is meant, if anything."""

    grammar: str
    is_json: bool
    param: str
    is_gbnf: bool = False
    instead: str = ""


def wanted(request: GenerationRequest) -> Wanted | None:
    """BadRequest for what cannot be kept."""
    by_format = _of_format(request.response_format) if request.response_format is not None else None
    if request.structured_outputs is None:
        return by_format
    if by_format is not None:
        raise BadRequest(
            "structured_outputs together with response_format is not supported", param="structured_outputs"
        )
    return _of_outputs(request.structured_outputs)


def _of_format(asked: ResponseFormat) -> Wanted | None:
    if asked.type != "json_schema" and asked.json_schema is not None:
        raise BadRequest("response_format.json_schema needs the type json_schema", param="response_format.json_schema")
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return json_wanted({"type": "object"}, "response_format")
    if asked.json_schema is None:
        raise BadRequest("response_format.json_schema is missing", param="response_format.json_schema")
    schema = asked.json_schema.schema_
    return json_wanted({} if schema is None else schema, "response_format.json_schema.schema")


def _of_outputs(asked: StructuredOutputs) -> Wanted:
    given = [name for name in ("json", "regex", "choice", "grammar", "json_object") if asked.given(name)]
    if len(given) != 1:
        raise BadRequest(
            "structured_outputs must have exactly one of json, regex, choice, grammar, json_object",
            param="structured_outputs",
        )
    param = f"structured_outputs.{given[0]}"
    compact = asked.disable_any_whitespace
    match given[0]:
        case "json_object":
            return json_wanted({"type": "object"}, param, compact=compact)
        case "json":
            return json_wanted(_schema_of(asked.json_, param), param, compact=compact)
        case "regex":
            return Wanted(f"{HEADER}start: /{llguidance.regex_to_lark(asked.regex or '', 'd')}/", False, param)
        case "choice":
            texts = [json.dumps(text, ensure_ascii=False) for text in asked.choice or []]
            return Wanted(HEADER + "start: " + " | ".join(texts), False, param)
    return _of_grammar(asked.grammar or "", param)


def _of_grammar(text: str, param: str) -> Wanted:
    if "%llguidance" in text:
        raise BadRequest(f"{param} must not have %llguidance in it", param=param)
    is_gbnf = "::=" in text
    return Wanted(text if is_gbnf else HEADER + text, False, param, is_gbnf)


def _schema_of(value: Any, param: str) -> Schema:
    """An object, or its JSON text."""
    if isinstance(value, str):
        try:
            value = json_reader.loads(value.encode("utf-8"))
        except BadRequest:
            raise BadRequest(f"{param} must be a JSON schema, or its text", param=param) from None
    if not isinstance(value, dict | bool):
        raise BadRequest(f"{param} must be a JSON schema, or its text", param=param)
    return value


# --- JSON Schema --------------------------------------------------------------------------------------------------


def json_wanted(schema: Schema, param: str, *, compact: bool = False) -> Wanted:
    return Wanted(f"{HEADER}start: {json_rule(schema, param, compact=compact)}", True, param)


def json_rule(schema: Schema, param: str, *, compact: bool = False) -> str:
    """A JSON text by this schema, as a term of a Lark rule; BadRequest names the keyword that cannot be kept."""
    if len(json.dumps(schema)) > MAX_WRITTEN_CHARS:
        raise BadRequest(f"{param} is longer than {MAX_WRITTEN_CHARS} characters", param=param)
    held = plain(schema, param)
    if held is False:
        raise BadRequest(f"{param} allows nothing", param=param)
    spaces = {"whitespace_flexible": False} if compact else {"whitespace_pattern": WHITESPACE}
    text = json.dumps(({} if held is True else held) | {"x-guidance": spaces}, ensure_ascii=False)
    if len(text) > MAX_SCHEMA_CHARS:
        raise BadRequest(f"{param} is longer than {MAX_SCHEMA_CHARS} characters", param=param)
    return f"%json {text}"
