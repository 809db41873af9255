"""From a JSON value to a checked request, or a `BadRequest` that names the field. *Pure.*

Error texts are written here, from the kind of the violation and the schema's own numbers: neither the input nor a
class name can get into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from services.gateway.errors import BadRequest
from services.gateway.json_reader import shown
from services.gateway.openai_schema import IGNORED, Request

R = TypeVar("R", bound=Request)

# Kind of violation -> what is said about the field; {names} are the schema's bounds.
_REASONS = {
    "missing": "is missing",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be a text",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entry",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "has characters that are not allowed, or is too long",
    "literal_error": "must be {expected}",
    "extra_forbidden": "is not supported",
}


def parse(cls: type[R], body: Any, *, strict: bool = False) -> R:
    """The request, every field checked as far as that is possible without the model. strict: none may be unknown."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    if strict:
        known = {*cls.model_fields, *cls.UNSUPPORTED, *IGNORED}
        for name in body:
            if name not in known:
                raise BadRequest(f"{shown(name)} is not known", param=shown(name), code="unknown_parameter")
    for name, neutral in cls.UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and not any(_same(value, n) for n in neutral):
            raise BadRequest(f"{name} is not supported", param=name, code="unsupported_parameter")
    try:
        return cls.model_validate(body)
    except ValidationError as e:
        first = e.errors(include_url=False, include_input=False)[0]
        path = _path(first["loc"])
        reason = _REASONS.get(first["type"], "is not valid").format(**first.get("ctx", {}))
        raise BadRequest(f"{path} {reason}", param=path) from None


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and not merely as 0 and false are."""
    return type(value) is type(neutral) and bool(value == neutral)


def _path(location: Sequence[int | str]) -> str:
    """messages[0].content; the library's own markers in brackets are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not (part.startswith("[") and part.endswith("]")):
            path += f".{shown(part)}" if path else shown(part)
    return path
