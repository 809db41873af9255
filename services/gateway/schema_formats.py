"""Formats of texts as JSON Schema and OpenAPI name them, in words that grammars know. *Pure.*"""

from __future__ import annotations

from typing import Any

# What the library's forms of formats leave open: a 29th of February is in leap years, second 60 at few moments, parts
# of a mail's address are bounded, no label of a host has -- at its third place, where codes of other letters do, and
# a host has a bound too.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = f"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2])|[0-9]{{4}}-02-(?:[01][0-9]|2[0-8])|{_LEAP_YEAR}-02-29)"
_LABEL = "(?:[^.]{1,2}|[^.]{2}(?:[^.-][^.]{0,60}|-[^.-][^.]{0,59}))"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5]"
_NARROWER: dict[str, dict[str, Any]] = {
    "date": {"pattern": _DATE}, "time": {"pattern": f"^{_TIME}"}, "date-time": {"pattern": f"{_DATE}[^:]*[Tt]{_TIME}"},
    "email": {"pattern": rf"^[^@]{{1,64}}@(?:\[.*\]|{_LABEL}(?:\.{_LABEL})*)$"},
    "hostname": {"pattern": rf"^{_LABEL}(?:\.{_LABEL})*$", "maxLength": 253},
}  # fmt: skip
_OF_THE_LIBRARY = (
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
)  # fmt: skip
_ASCII_OF = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri", "iri-reference": "uri-reference"}

# RFC 3986: characters of names, of segments of paths, and of what comes behind them
_NAME = "(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})"
_IN_PATH = f"(?:{_NAME}|[:@])"
_AUTHORITY = f"//(?:(?:{_NAME}|:)*@)?{_NAME}*(?::[0-9]{{0,4}})?(?:/{_IN_PATH}*)*"
_PATH = f"/(?:{_IN_PATH}+(?:/{_IN_PATH}*)*)?"
_WITH_SCHEME = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{_AUTHORITY}|{_PATH}|{_IN_PATH}+(?:/{_IN_PATH}*)*)?"
_RELATIVE = f"(?:{_AUTHORITY}|{_PATH}|(?:{_NAME}|@)+(?:/{_IN_PATH}*)*)?"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_WRITTEN_OUT: dict[str, dict[str, Any] | bool] = {
    "uri-reference": {
        "pattern": rf"^(?:{_WITH_SCHEME}|{_RELATIVE})(?:\?(?:{_IN_PATH}|[/?])*)?(?:#(?:{_IN_PATH}|[/?])*)?$"
    },
    "json-pointer": {"pattern": f"^{_POINTER}$"},
    "relative-json-pointer": {"pattern": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$"},
    # OpenAPI's
    "int32": {"minimum": -(1 << 31), "maximum": (1 << 31) - 1},
    "int64": {"minimum": -9 * 10**18, "maximum": 9 * 10**18},  # near to what the library can count to
    **dict.fromkeys(("float", "double", "decimal", "password", "binary"), True),
}
FORMATS = (*_OF_THE_LIBRARY, *_ASCII_OF, *_WRITTEN_OUT)


def of_format(name: Any) -> dict[str, Any] | bool | None:
    """What it demands; None if it cannot be kept. Letters beyond ASCII are not written where they would be right."""
    if not isinstance(name, str):
        return None
    name = _ASCII_OF.get(name, name)
    if name in _OF_THE_LIBRARY:
        return {"format": name} | _NARROWER.get(name, {})
    return _WRITTEN_OUT.get(name)
