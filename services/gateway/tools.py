"""Which tools a chat may or must call, and the grammar by which it then must. *Pure.*"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.gateway import structured, tool_formats
from services.gateway.dialect import Dialect
from services.gateway.errors import BadRequest
from services.gateway.openai_parts import Tool
from services.gateway.openai_schema import ChatCompletionRequest
from services.gateway.structured import HEADER, Wanted
from services.gateway.tool_formats import ToolFormat

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_TEXT = "text"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """row: how calls are read, None where there are none to be; specs: what the template is told."""

    row: ToolFormat | None = None
    names: tuple[str, ...] = ()
    max_calls: int | None = None
    specs: tuple[dict[str, Any], ...] = ()
    wanted: Wanted | None = None


def tool_use(request: ChatCompletionRequest, asked: Wanted | None, dialect: Dialect) -> ToolUse:
    """asked: what an answer that is no call must be."""
    tools = request.tools
    names = [tool.function.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise BadRequest(f"tools[{i}].function.name appears twice", param=f"tools[{i}].function.name")
    choice, named = _choice(request.tool_choice, names)
    specs = tuple(spec_of(tool) for tool in tools)
    if choice == "none" or not tools:
        return ToolUse(specs=specs, wanted=asked)
    several = request.parallel_tool_calls is not False and not named
    max_calls = None if several else 1
    must_call = choice == "required" or bool(named)
    if must_call and asked is not None:
        raise BadRequest(f"tool_choice {choice} together with {asked.param} is not supported", param="tool_choice")
    if not must_call and asked is None and not any(tool.function.strict for tool in tools):
        return ToolUse(dialect.tools, tuple(names), max_calls, specs)
    row = tool_formats.written(dialect.tools)
    if asked is not None and not row.call_before and not row.before.startswith(row.begins or "\0"):
        # an answer and a call would begin alike, and the grammar's lexer does not go back
        raise BadRequest(f"tools together with {asked.param} are not supported by this model", param="tools")
    callable_ = {i: tool for i, tool in enumerate(tools) if not named or tool.function.name == named}
    otherwise = "" if must_call else _ANY_TEXT if asked is None else _term(asked)

    def grammar(terms: dict[str, str]) -> str:
        return HEADER + tool_formats.call_grammar(row, terms, dialect.special_ids, several=several, otherwise=otherwise)

    terms = {t.function.name: _arguments(t, f"tools[{i}].function.parameters") for i, t in callable_.items()}
    any_object = {t.function.name: _any_object() for t in callable_.values() if not t.function.strict}
    param = "tool_choice" if must_call else "tools"
    held, loose = grammar(terms), grammar(terms | any_object)
    wanted = Wanted(held, otherwise != _ANY_TEXT, param, instead=loose if loose != held else "")
    return ToolUse(row, tuple(names), max_calls, specs, wanted)


def spec_of(tool: Tool) -> dict[str, Any]:
    """As templates take it."""
    return tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})


def _choice(given: Any, names: list[str]) -> tuple[str, str]:
    """none, auto or required; or the one tool to call."""
    if given is None:
        return "auto", ""
    if given in ("none", "auto", "required"):
        if given == "required" and not names:
            raise BadRequest("tool_choice needs tools", param="tool_choice")
        return str(given), ""
    function = given.get("function") if isinstance(given, dict) and given.get("type") == "function" else None
    if not isinstance(function, dict) or set(given) != {"type", "function"} or set(function) != {"name"}:
        raise BadRequest("tool_choice must be none, auto, required or name one function", param="tool_choice")
    if function["name"] not in names:
        raise BadRequest("tool_choice.function.name is none of the tools", param="tool_choice.function.name")
    return "named", str(function["name"])


def _arguments(tool: Tool, param: str) -> str:
    """What is strict is kept, or refused by name; else what can be kept is."""
    schema = NO_PARAMETERS if tool.function.parameters is None else tool.function.parameters
    try:
        return structured.json_rule(schema, param)
    except BadRequest:
        if tool.function.strict:
            raise
        return _any_object()


def _any_object() -> str:
    """What those who are not strict may be called with where their parameters cannot be kept, or do not compile."""
    return structured.json_rule({"type": "object"}, "tools")


def _term(asked: Wanted) -> str:
    if not asked.is_json:
        raise BadRequest(f"tools together with {asked.param} are not supported", param="tools")
    return asked.grammar.removeprefix(f"{HEADER}start: ")
