"""Whether two JSON schemas can hold for the same value: seen where it is plain to see. *Pure.*"""

from __future__ import annotations

from typing import Any


def exclusive(a: Any, b: Any, beside: Any) -> bool:
    """By type, by values, or by a property that both require. False: they may hold together. beside: what else holds
    for the value."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        return a is False or b is False
    outer = _types(beside)
    types, others = (_types(a) or outer), (_types(b) or outer)
    if types and others and not types & others:
        return True
    values, other_values = _values(a), _values(b)
    if values is not None and other_values is not None:
        return not any(value in other_values for value in values)  # 1 and true are equal here, so that it says less
    if types != {"object"} or others != {"object"}:
        return False
    properties, others_properties = a.get("properties"), b.get("properties")
    if not isinstance(properties, dict) or not isinstance(others_properties, dict):
        return False
    shared = {*_required(a), *_required(beside)} & {*_required(b), *_required(beside)}
    return any(exclusive(properties.get(name), others_properties.get(name), None) for name in shared)


def _types(schema: Any) -> set[str]:
    """None named: any."""
    given = schema.get("type") if isinstance(schema, dict) else None
    names = {given} if isinstance(given, str) else set()
    if isinstance(given, list):
        names = {name for name in given if isinstance(name, str)}
    return names | ({"integer"} if "number" in names else set())


def _values(schema: dict[str, Any]) -> list[Any] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _required(schema: Any) -> list[str]:
    value = schema.get("required") if isinstance(schema, dict) else None
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
