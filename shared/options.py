"""Settings as command-line options and as documentation tables, both derived from the fields in `shared/settings.py`.

An option that is given becomes an environment entry; what it may be is decided there, not here.
"""

from __future__ import annotations

import argparse
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import ByteSize
from pydantic.fields import FieldInfo

from shared.settings import Section, option, variable

_METAVARS = {int: "N", float: "X", ByteSize: "SIZE", str: "TEXT"}


def add_options(parser: argparse.ArgumentParser, sections: Iterable[type[Section]], skip: Iterable[str] = ()) -> None:
    """One group a section; an option's value is set only if it is given. A field in two sections is added once."""
    seen = set(skip)
    for section in sections:
        group = parser.add_argument_group(section.TITLE)
        for field, info in section.model_fields.items():
            if field not in seen:
                seen.add(field)
                group.add_argument(option(field, info), dest=field, default=argparse.SUPPRESS, **_looks(info))


def _looks(info: FieldInfo) -> dict[str, Any]:
    shown = default_text(info)
    text = f"{info.description} ({shown})" if shown else str(info.description)
    looks: dict[str, Any] = {"help": text.replace("%", "%%")}
    kind = _plain_type(info)
    if kind is bool:
        return looks | {"action": argparse.BooleanOptionalAction if info.default else "store_true"}
    if typing.get_origin(kind) is tuple:
        return looks | {"action": "append", "metavar": "TEXT"}
    if typing.get_origin(kind) is typing.Literal:
        return looks | {"metavar": "|".join(map(str, typing.get_args(kind)))}
    return looks | {"metavar": _METAVARS.get(kind, "PATH")}


def _plain_type(info: FieldInfo) -> Any:
    kind: Any = info.annotation
    while typing.get_origin(kind) is Annotated:
        kind = typing.get_args(kind)[0]
    return kind


def default_text(info: FieldInfo) -> str:
    """The default for people; empty where there is none or it says nothing."""
    value = info.default
    if value in ("", ()):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, ByteSize) and value:
        return value.human_readable()
    return f"{value:g}" if isinstance(value, float) else str(value)


def given(namespace: argparse.Namespace, sections: Iterable[type[Section]]) -> dict[str, str]:
    """The environment entries of the options that were given."""
    entries = {}
    for section in sections:
        for field in section.model_fields:
            if hasattr(namespace, field):
                entries[variable(field)] = _as_text(getattr(namespace, field))
    return entries


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, list) else str(value)


def markdown_tables(sections: Iterable[type[Section]]) -> str:
    """One table a section: option, variable, default, meaning."""
    return "\n".join(_table(section.TITLE, section.model_fields) for section in sections)


def _table(title: str, fields: Mapping[str, FieldInfo]) -> str:
    lines = [f"### {title}", "", "| option | variable | default | meaning |", "|---|---|---|---|"]
    for field, info in fields.items():
        cells = [f"`{option(field, info)}`", f"`{variable(field)}`", default_text(info), str(info.description)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])
