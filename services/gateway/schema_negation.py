"""What a JSON schema does not allow, as a schema. *Pure.*

`not`, `if` and a `oneOf` whose branches overlap are told by it in keywords that grammars know. Of a pattern, a format,
`multipleOf`, of all items or all other properties there is no opposite among those: None.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any] | bool

MAX_NODES = 2000
MAX_TEXT_CHARS = 50  # of a text to deny: each is some levels of groups in a regular expression, which may have 250
_TYPES = ("null", "boolean", "object", "array", "string", "number")
_SAY_NOTHING = frozenset((
    "title", "description", "default", "examples", "$comment", "$schema", "$id", "$anchor", "$defs", "definitions",
))  # fmt: skip
_BOUNDS = {
    "minimum": "exclusiveMaximum", "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum", "exclusiveMaximum": "minimum",
}  # fmt: skip
_COUNTS = {
    "minLength": ("string", "maxLength", -1), "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1), "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1), "maxProperties": ("object", "minProperties", 1),
}  # fmt: skip


class Negation:
    """Counts what it makes, over all calls: what is denied twice doubles each time. `too_much` is for its owner."""

    def __init__(self) -> None:
        self._num_nodes = 0

    @property
    def too_much(self) -> bool:
        return self._num_nodes > MAX_NODES

    def of(self, schema: Schema) -> Schema | None:
        self._num_nodes += 1
        if self.too_much:
            return None
        if isinstance(schema, bool):
            return not schema
        branches: list[Schema] = []
        for keyword, value in schema.items():
            if keyword not in _SAY_NOTHING:
                found = self._of_keyword(keyword, value, schema)
                if found is None:
                    return None
                branches += found
        return any_of(branches)

    def _of_keyword(self, keyword: str, value: Any, schema: dict[str, Any]) -> list[Schema] | None:
        """Each of these is denied by it, and together they are all that is."""
        if keyword in ("anyOf", "allOf") and isinstance(value, list):
            parts = [self.of(part) for part in value]
            if None in parts:
                return None
            return [each for each in parts if each is not None] if keyword == "allOf" else [{"allOf": parts}]
        if keyword == "properties" and isinstance(value, dict):
            return self._of_properties(value)
        if keyword == "required" and isinstance(value, list):
            return [{"type": "object", "properties": {name: False}} for name in value if isinstance(name, str)]
        if keyword == "additionalProperties":
            return [] if value is True or value == {} else None
        if keyword == "type":
            return _of_types(value)
        if keyword in ("enum", "const"):
            return _of_values(value if keyword == "enum" else [value])
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if keyword in _BOUNDS:
            exclusive = "exclusiveMinimum" if keyword == "minimum" else "exclusiveMaximum"
            if schema.get(exclusive) is True:  # as draft 4 wrote it
                return None
            return [{"type": "number", _BOUNDS[keyword]: value}]
        if keyword in _COUNTS:
            kind, opposite, step = _COUNTS[keyword]
            if keyword == "maxProperties" and value > 0:
                return None  # a name may come twice, so that more than one cannot be asked for
            return [{"type": kind, opposite: value + step}] if value + step >= 0 else []
        return None

    def _of_properties(self, properties: dict[str, Schema]) -> list[Schema] | None:
        found: list[Schema] = []
        for name, schema in properties.items():
            denied = self.of(schema)
            if denied is None:
                return None
            if denied is not False:
                found.append({"type": "object", "properties": {name: denied}, "required": [name]})
        return found


def any_of(branches: list[Schema]) -> Schema:
    branches = [branch for branch in branches if branch is not False]
    if len(branches) < 2:
        return branches[0] if branches else False
    return True if True in branches else {"anyOf": branches}


def _of_types(value: Any) -> list[Schema] | None:
    names = value if isinstance(value, list) else [value]
    given = {name if isinstance(name, str) else "" for name in names}
    if not given <= {*_TYPES, "integer"} or ("integer" in given and "number" not in given):
        return None  # no keyword says that a number is no integer
    left = [name for name in _TYPES if name not in given]
    return [{"type": left}] if left else []


def _of_values(values: Any) -> list[Schema] | None:
    if not isinstance(values, list) or any(isinstance(value, dict | list) for value in values):
        return None
    bools = {value for value in values if isinstance(value, bool)}
    texts = {value for value in values if isinstance(value, str)}
    if any(len(text) > MAX_TEXT_CHARS for text in texts):
        return None
    numbers = sorted({value for value in values if isinstance(value, int | float) and not isinstance(value, bool)})
    found: list[Schema] = [{"type": [name for name in _TYPES if name not in {*map(_type_of, values)}]}]
    if len(bools) == 1:
        found.append({"enum": [not value for value in bools]})
    if texts:
        found.append({"type": "string", "pattern": f"^{none_of(texts)}$"})
    for low, high in zip([None, *numbers], [*numbers, None], strict=True) if numbers else ():
        between = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        found.append({"type": "number"} | {name: end for name, end in between.items() if end is not None})
    return found


def _type_of(value: Any) -> str:
    names = {type(None): "null", bool: "boolean", str: "string"}
    return names.get(type(value), "number")


def none_of(texts: set[str]) -> str:
    """A regular expression for every text but these, without look-around: one that ends too early, or goes on."""
    after: dict[str, set[str]] = {}
    for text in texts:
        if text:
            after.setdefault(text[0], set()).add(text[1:])
    others = "".join(map(regex_escaped, sorted(after)))
    branches = [rf"[^{others}][\s\S]*" if others else r"[\s\S]+"]
    branches += [regex_escaped(c) + none_of(rest) for c, rest in sorted(after.items())]
    return f"(?:{'|'.join(branches)}){'' if '' in texts else '?'}"


def regex_escaped(text: str) -> str:
    """As every dialect reads it, also within brackets."""
    return "".join(c if c.isascii() and c.isalnum() else rf"\x{{{ord(c):x}}}" for c in text)
