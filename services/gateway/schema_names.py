"""One spelling of each property's name. *Pure.*

The library tells a name that has a schema from all others by its letters, and lets others be written in escapes: "a",
which must be a number, could come as "\\u0061" and be a text. A pattern for all names has no escapes that it does not
need.
"""

from __future__ import annotations

from typing import Any

from services.gateway.schema_negation import Schema

_ONE_SPELLING: Schema = {"patternProperties": {"": True}, "additionalProperties": False}
_SCHEMAS_BY_NAME = ("properties", "$defs", "definitions")
_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalProperties", "additionalItems")


def with_one_spelling(schema: Schema) -> Schema:
    """Of what the walk has made. Where there are patterns of names already the library takes no other beside them."""
    spelt = _Spelling()
    made = spelt.of(schema)
    return schema if spelt.has_patterns else made


class _Spelling:
    def __init__(self) -> None:
        self.has_patterns = False
        self._made: dict[int, Any] = {}  # parts stand at several places, which would double with each level

    def of(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self.of(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        if id(schema) not in self._made:
            self._made[id(schema)] = self._of_one(schema)
        return self._made[id(schema)]

    def _of_one(self, schema: dict[str, Any]) -> dict[str, Any]:
        self.has_patterns |= "patternProperties" in schema
        made = dict(schema)
        for keyword, value in schema.items():
            if keyword in _SCHEMAS:
                made[keyword] = self.of(value)
            elif keyword in _SCHEMAS_BY_NAME:
                made[keyword] = {name: self.of(each) for name, each in value.items()}
        if schema.get("properties") and schema.get("additionalProperties") is not False:
            made["allOf"] = [*made.get("allOf", ()), _ONE_SPELLING]
        return made
