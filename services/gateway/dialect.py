"""How the served model writes thoughts and calls, and what a chat may tell its template: known by that. *Pure.*"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway import reasoning, tool_formats
from services.gateway.errors import BadRequest
from services.gateway.json_reader import shown
from services.gateway.reasoning import ReasoningFormat
from services.gateway.tokenization import Tokenizer
from services.gateway.tool_formats import ToolFormat

MAX_VALUE_CHARS = 1024
# what templates ask for beside messages and tools; nothing else is handed on
TEMPLATE_KEYS = frozenset((
    "enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "keep_past_thinking", "date_string",
    "tools_in_user_message", "xml_tools", "python_tools", "add_vision_id", "model_identity", "system_message",
))  # fmt: skip
SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class Dialect:
    """special_ids: of the marks of both that are special tokens."""

    tools: ToolFormat
    reasoning: ReasoningFormat | None
    template_keys: frozenset[str]
    special_ids: Mapping[str, int]


def dialect_of(tokenizer: Tokenizer, tool_parser: str = "auto", reasoning_parser: str = "auto") -> Dialect:
    """The parsers are names of rows, `auto` for what the template shows; reasoning may be `none`."""
    source = tokenizer.chat_template or ""
    tools = tool_formats.of_template(source) if tool_parser == "auto" else tool_formats.BY_NAME[tool_parser]
    if reasoning_parser == "auto":
        thoughts = reasoning.of_template(source)
    else:
        thoughts = reasoning.BY_NAME.get(reasoning_parser)
    used = {name for name in TEMPLATE_KEYS if re.search(rf"\b{name}\b", source)}
    texts = [*tools.marks, *tool_formats.written(tools).marks]
    special = {text: i for text in texts if (i := tokenizer.special_token_id(text)) is not None}
    return Dialect(tools, thoughts, frozenset(used), special)


def template_values(given: Mapping[str, Any] | None, effort: str | None, dialect: Dialect) -> dict[str, Any]:
    """Variables of the template, from `chat_template_kwargs` and `reasoning_effort`; BadRequest for what it has not."""
    values: dict[str, Any] = {}
    for name, value in (given or {}).items():
        path = f"chat_template_kwargs.{shown(name)}"
        if name not in dialect.template_keys:
            known = ", ".join(sorted(dialect.template_keys)) or "none"
            raise BadRequest(f"{path} is not known to the model's chat template (known: {known})", param=path)
        is_text = isinstance(value, str) and len(value) <= MAX_VALUE_CHARS
        if not (is_text or isinstance(value, bool | int | float) or value is None):
            raise BadRequest(f"{path} must be a short text, a number, true or false", param=path)
        values[name] = value
    if effort is not None:
        values = _with_effort(effort, dialect) | values
    return values


def _with_effort(effort: str, dialect: Dialect) -> dict[str, Any]:
    if "reasoning_effort" in dialect.template_keys:
        return {"reasoning_effort": effort}
    switches = {name: effort != "none" for name in SWITCHES if name in dialect.template_keys}
    if not switches and effort != "none":
        raise BadRequest("reasoning_effort is not known to the model's chat template", param="reasoning_effort")
    return switches
