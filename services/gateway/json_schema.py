"""JSON Schema as grammars know it: what is said in other keywords is said in theirs, the rest refused by name. *Pure.*

`plain` goes through a schema once. Whether what it makes compiles, and in time, is found out elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NoReturn

from services.gateway.errors import BadRequest
from services.gateway.json_reader import shown
from services.gateway.schema_branches import Exclusions
from services.gateway.schema_formats import FORMATS, of_format
from services.gateway.schema_names import with_one_spelling
from services.gateway.schema_negation import MAX_NODES, MAX_TEXT_CHARS, Negation, Schema, any_of, regex_escaped

MAX_ONE_OF = 8  # branches that overlap: each is told against every other
MAX_FOLLOWED = 512  # `$ref`s
MAX_REFS = 8  # one behind the other
MAX_NAME_CHARS = 1000

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength")
_ASSERTIONS = frozenset((
    "type", "enum", "const", "required", *_COUNTS, "pattern", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", "$ref",
))  # fmt: skip
_ANNOTATIONS = frozenset((
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
    "discriminator", "contentMediaType", "contentEncoding", "contentSchema", "externalDocs", "xml",
    "readonly", "links", "enumNames", "enumDescriptions", "markdownDescription", "propertyOrder", "propertyOrdering",
))  # fmt: skip
_NO_MISSPELT_KEYWORD = ("x-", "_")  # what begins so is somebody's own
_DIALECTS = re.compile(r"https?://json-schema\.org/draft(-0[4-7]|/2019-09|/2020-12)/schema#?")
# What evaluates properties and items of the same value too
_IN_PLACE = frozenset((
    "$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas",
    "dependencies", "contains",
))  # fmt: skip


def plain(schema: Any, path: str) -> Schema:
    """BadRequest names the keyword that cannot be kept, and where it stands."""
    return with_one_spelling(_Walk(schema).of(schema, path))


def _refuse(path: str, reason: str = "is not supported") -> NoReturn:
    raise BadRequest(f"{path} {reason}", param=path, code="unsupported_schema")


class _Walk:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._negation = Negation()
        self._exclusions = Exclusions()
        self._num_followed = 0
        dialect = root.get("$schema") if isinstance(root, dict) else None
        self._may_contain_none = not (isinstance(dialect, str) and "/draft-0" in dialect)  # minContains came later
        self._one_document = not any(_names_documents(value) for value in _parts(root))

    def of(self, schema: Any, path: str) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            _refuse(path, "must be a JSON schema")
        made: dict[str, Any] = {}
        also: list[Schema] = []  # what else must hold
        for keyword, value in schema.items():
            at = f"{path}.{shown(keyword)}"
            if isinstance(value, list) and keyword == "oneOf":
                self._one_of(value, self._list(value, at), schema, made, also)
            elif not self._same(keyword, value, schema, at, made):
                self._otherwise(keyword, value, schema, at, made, also)
        if also := [each for each in also if each is not True]:
            made["allOf"] = [*made.get("allOf", ()), *also]
        return made

    def _same(self, keyword: str, value: Any, schema: dict[str, Any], at: str, made: dict[str, Any]) -> bool:
        """Whether grammars know it by the same name."""
        if keyword == "minProperties" and not _at_most(value, max(1, len(_names(schema.get("required"))))):
            _refuse(at, "is not supported beyond 1 and what is required: a name may come twice")
        if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
            made[keyword] = {name: self.of(sub, f"{at}.{shown(name)}") for name, sub in value.items()}
        elif keyword in (*_LISTS_OF_SCHEMAS, "items") and isinstance(value, list):
            made[keyword] = self._list(value, at)
        elif keyword in ("items", "additionalProperties"):
            made[keyword] = self.of(value, at)
        elif keyword in _COUNTS and isinstance(value, float) and value.is_integer():
            made[keyword] = int(value)  # JSON has one kind of number
        elif keyword in (*_SCHEMAS_BY_NAME, *_LISTS_OF_SCHEMAS):
            _refuse(at, "must hold JSON schemas")
        elif keyword in _ASSERTIONS or (keyword in ("$id", "$anchor", "id") and isinstance(value, str)):
            made[keyword] = value
        else:
            return keyword in _ANNOTATIONS or keyword.startswith(_NO_MISSPELT_KEYWORD)
        return True

    def _list(self, value: list[Any], at: str) -> list[Schema]:
        return [self.of(sub, f"{at}[{i}]") for i, sub in enumerate(value)]

    def _otherwise(
        self, keyword: str, value: Any, schema: dict[str, Any], at: str, made: dict[str, Any], also: list[Schema]
    ) -> None:
        match keyword:
            case "format":
                narrower = of_format(value)
                if narrower is None:
                    _refuse(at, f"is not supported, only {', '.join(FORMATS)}")
                also.append(narrower)
            case "$schema":
                if isinstance(value, str) and _DIALECTS.fullmatch(value):
                    made[keyword] = value
            case "additionalItems":
                if isinstance(schema.get("items"), list):
                    made[keyword] = self.of(value, at)
            case "uniqueItems" if value is False or _at_most(schema.get("maxItems"), 1):
                pass
            case "minContains" | "maxContains" if "contains" not in schema:
                pass
            case "contains" if (
                self._may_contain_none and schema.get("minContains") == 0 and "maxContains" not in schema
            ):
                self.of(value, at)
            case "minContains" if schema["contains"] is not None and value == 0 and "maxContains" not in schema:
                pass
            case "not":
                also.append(self._denied(self.of(value, at), at))
            case "if":
                also.append(self._condition(value, schema, at))
            case "then" | "else":
                pass  # `if` tells what becomes of it; without one they mean nothing
            case "dependentRequired" | "dependentSchemas" | "dependencies" if isinstance(value, dict):
                also += [self._dependency(name, each, f"{at}.{shown(name)}") for name, each in value.items()]
            case "propertyNames":
                also.append(self._names(value, at))
            case "unevaluatedProperties" | "unevaluatedItems":
                self._unevaluated(keyword, self.of(value, at), schema, at, made)
            case _:
                _refuse(at)

    # --- opposites ----------------------------------------------------------------------------------------------------

    def _denied(self, schema: Schema, at: str) -> Schema:
        denied = self._negation.of(schema)
        if self._negation.too_much:
            _refuse(at, f"is not supported with more than {MAX_NODES} parts to deny")
        if denied is None:
            _refuse(
                at,
                "is not supported, only of types, enum and const (texts of at most "
                f"{MAX_TEXT_CHARS} letters), required, properties, bounds, anyOf and allOf",
            )
        return denied

    def _condition(self, value: Any, schema: dict[str, Any], at: str) -> Schema:
        where, beside = self.of(value, at), at.removesuffix("if")
        then = self.of(schema.get("then", True), f"{beside}then")
        otherwise = self.of(schema.get("else", True), f"{beside}else")
        if then in (True, {}):
            return True if otherwise in (True, {}) else any_of([where, otherwise])
        denied = self._denied(where, at)
        if otherwise in (True, {}):
            return any_of([denied, then])
        return any_of([_all_of(where, then), _all_of(denied, otherwise)])

    def _one_of(
        self, given: list[Any], branches: list[Schema], schema: Any, made: dict[str, Any], also: list[Schema]
    ) -> None:
        """Where no two can hold together it is anyOf; else each is told without the others, if it can be; else the
        library may see what is not seen here."""
        targets = [self._behind_refs(branch) for branch in given]
        if self._exclusions.all_exclusive(targets, schema):
            also.append(any_of(branches))
            return
        if len(branches) <= MAX_ONE_OF:
            denied = [self._negation.of(branch) for branch in branches]
            if not self._negation.too_much and None not in denied:
                also.append(
                    any_of([_all_of(branch, *denied[:i], *denied[i + 1 :]) for i, branch in enumerate(branches)])
                )
                return
        made["oneOf"] = branches

    def _behind_refs(self, schema: Any) -> Any:
        for _ in range(MAX_REFS):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            schema = self._target(schema["$ref"])
        return None

    # --- properties ---------------------------------------------------------------------------------------------------

    def _dependency(self, name: str, value: Any, at: str) -> Schema:
        """Of the one property: what else is required, or what the object must be."""
        if isinstance(value, list):
            return {"anyOf": [{"properties": {name: False}}, {"required": value}]} if value else True
        needed = self.of(value, at)
        return True if needed in (True, {}) else any_of([{"properties": {name: False}}, needed])

    def _names(self, schema: Any, at: str) -> Schema:
        if isinstance(schema, bool):
            return schema or {"maxProperties": 0}
        patterns = self._patterns(schema, at)
        return _all_of(*({"patternProperties": {p: True}, "additionalProperties": False} for p in patterns))

    def _patterns(self, schema: Any, at: str) -> list[str]:
        """Of texts that are right by it."""
        if not isinstance(schema, dict):
            _refuse(at, "must be a JSON schema")
        found: list[str] = []
        for keyword, value in schema.items():
            if keyword == "const" or (keyword == "enum" and isinstance(value, list)):
                texts = [v for v in (value if keyword == "enum" else [value]) if isinstance(v, str)]
                found.append(f"^(?:{'|'.join(map(regex_escaped, texts))})$" if texts else r"[^\s\S]")
            elif keyword == "pattern" and isinstance(value, str):
                found.append(value)
            elif keyword in ("minLength", "maxLength") and _at_most(value, MAX_NAME_CHARS):
                continue
            elif keyword == "$ref" and (target := self._target(value)) is not None:
                found += self._patterns(target, at)
            elif (keyword, value) != ("type", "string") and keyword not in _ANNOTATIONS:
                _refuse(at, "is not supported, only with enum, const, pattern and lengths")
        if {"minLength", "maxLength"} & set(schema):
            found.append(rf"^[\s\S]{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}$")
        return found

    def _target(self, ref: Any) -> Any:
        """What a pointer from the root names, if it is one; so many are followed at most."""
        self._num_followed += 1
        if not self._one_document or self._num_followed > MAX_FOLLOWED:
            return None
        if not isinstance(ref, str) or not ref.startswith("#/") or "%" in ref:
            return None
        at = self._root
        for part in ref[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(at, dict) or name not in at:
                return None
            at = at[name]
        return at

    def _unevaluated(self, keyword: str, value: Schema, schema: dict[str, Any], at: str, made: dict[str, Any]) -> None:
        """Where nothing else looks at the same value it means the additional ones."""
        if value in (True, {}):
            return
        if _IN_PLACE & set(schema):
            _refuse(at, "is not supported together with keywords that hold for the same value")
        if keyword == "unevaluatedProperties":
            if "additionalProperties" not in schema:
                made["additionalProperties"] = value
        elif isinstance(schema.get("items"), list):
            if "additionalItems" not in schema:
                made["additionalItems"] = value
        elif "items" not in schema:
            made["items"] = value


def _parts(schema: Any) -> Iterable[Any]:
    return schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()


def _names_documents(schema: Any) -> bool:
    """Whether a pointer within may start from somewhere else than the root."""
    if isinstance(schema, dict) and any(isinstance(schema.get(name), str) for name in ("$id", "id")):
        return True
    return any(map(_names_documents, _parts(schema)))


def _all_of(*schemas: Schema | None) -> Schema:
    """Each of them."""
    parts = [schema for schema in schemas if schema is not True and schema is not None]
    if len(parts) < 2:
        return parts[0] if parts else True
    return False if False in parts else {"allOf": parts}


def _names(required: Any) -> set[str]:
    return {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()


def _at_most(value: Any, bound: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value <= bound
