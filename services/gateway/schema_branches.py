"""Whether two JSON schemas can hold for the same value: seen where it is plain to see. *Pure.*"""

from __future__ import annotations

from typing import Any

NUM_TYPES = 7
MAX_STEPS = 30_000  # of all comparisons in one schema: a few hundredths of a second


class Exclusions:
    """Counts its steps, over all calls, since each branch of a union is compared with every other: what it has not
    come to may hold together, for all that is known."""

    def __init__(self) -> None:
        self._steps_left = MAX_STEPS

    def all_exclusive(self, branches: list[Any], beside: Any) -> bool:
        """Can no two of them hold for the same value? beside: what else holds for it."""
        if self._all_values_differ(branches):
            return True
        return all(self.exclusive(a, b, beside) for i, a in enumerate(branches) for b in branches[:i])

    def exclusive(self, a: Any, b: Any, beside: Any) -> bool:
        """By type, by values, or by a property that both require. False: they may hold together."""
        if not self._may_take(1):
            return False
        if not isinstance(a, dict) or not isinstance(b, dict):
            return a is False or b is False
        outer = _types(beside)
        types, others = (_types(a) or outer), (_types(b) or outer)
        if types and others and not types & others:
            return True
        values, other_values = _values(a), _values(b)
        if values is not None and other_values is not None:
            return self._differ(values, other_values)
        if types != {"object"} or others != {"object"}:
            return False
        properties, others_properties = a.get("properties"), b.get("properties")
        if not isinstance(properties, dict) or not isinstance(others_properties, dict):
            return False
        required, others_required, required_beside = _required(a), _required(b), _required(beside)
        if not self._may_take(len(required) + len(others_required) + len(required_beside)):
            return False
        shared = {*required, *required_beside} & {*others_required, *required_beside}
        return any(self.exclusive(properties.get(name), others_properties.get(name), None) for name in shared)

    def _differ(self, values: list[Any], others: list[Any]) -> bool:
        """1 and true are equal here, so that it says less."""
        if not self._may_take(len(values) + len(others)):
            return False
        if all(map(_is_plain, (*values, *others))):
            return set(values).isdisjoint(others)
        return self._may_take(len(values) * len(others)) and not any(value in others for value in values)

    def _all_values_differ(self, branches: list[Any]) -> bool:
        """At one glance: every branch names its values, and none is named twice."""
        lists = [_values(branch) if isinstance(branch, dict) else None for branch in branches]
        values = [value for each in lists for value in each or ()]
        return None not in lists and all(map(_is_plain, values)) and len(set(values)) == len(values)

    def _may_take(self, num_steps: int) -> bool:
        self._steps_left -= num_steps
        return self._steps_left >= 0


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _types(schema: Any) -> set[str]:
    """None named: any."""
    given = schema.get("type") if isinstance(schema, dict) else None
    names = {given} if isinstance(given, str) else set()
    if isinstance(given, list) and len(given) <= NUM_TYPES:
        names = {name for name in given if isinstance(name, str)}
    return names | ({"integer"} if "number" in names else set())


def _values(schema: dict[str, Any]) -> list[Any] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _required(schema: Any) -> list[str]:
    value = schema.get("required") if isinstance(schema, dict) else None
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
