"""Checks a request's `messages` and brings them into the one form that chat templates take. *Pure.*

Content becomes a text: null, missing and empty are the same for an assistant, and text parts are joined by line
breaks, as vLLM and llama.cpp do. What cannot be shown to the model is refused, naming the message; nothing is dropped.
"""

from __future__ import annotations

from typing import Any

from services.gateway import json_reader
from services.gateway.chat_template import Message
from services.gateway.errors import BadRequest

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_PARTS = 4096
MAX_TOOL_CALLS = 128
MAX_NAME_CHARS = 256

# The same in words of JSON Schema, for the documentation; a test holds the two together.
_NAME = {"type": ["string", "null"], "minLength": 1, "maxLength": MAX_NAME_CHARS}
_PART = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"const": kind}, kind: {"type": "string"}},
            "required": ["type", kind],
        }
        for kind in ("text", "refusal")
    ]
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "maxItems": MAX_PARTS, "items": _PART}]}
_TOOL_CALL = {
    "type": "object",
    "properties": {
        "id": _NAME,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS},
                "arguments": {"type": ["string", "object", "null"], "description": "an object, or its JSON text"},
            },
            "required": ["name"],
        },
    },
    "required": ["function"],
}


def _message_schema(roles: tuple[str, ...], content: dict[str, Any], calls: dict[str, Any]) -> dict[str, Any]:
    unsupported = {name: {"type": "null", "description": "not supported"} for name in ("function_call", "audio")}
    fields = {"role": {"enum": roles}, "content": content, "name": _NAME, "tool_call_id": _NAME, "tool_calls": calls}
    required = ["role"] if "assistant" in roles else ["role", "content"]
    return {"type": "object", "properties": fields | unsupported, "required": required}


MESSAGE_SCHEMA: dict[str, Any] = {
    "anyOf": [
        _message_schema(tuple(role for role in ROLES if role != "assistant"), _CONTENT, {"enum": [None, []]}),
        _message_schema(
            ("assistant",),
            {"anyOf": [*_CONTENT["anyOf"], {"type": "null"}]},
            {"type": ["array", "null"], "maxItems": MAX_TOOL_CALLS, "items": _TOOL_CALL},
        ),
    ]
}


def parse_messages(messages: list[dict[str, Any]]) -> list[Message]:
    """Messages with `role` and `content` as text, and `name`, `tool_calls` and `tool_call_id` where given."""
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: dict[str, Any], path: str) -> Message:
    role = message.get("role")
    if role is None:
        raise _bad(f"{path}.role", "is missing")
    if role not in ROLES:
        raise _bad(f"{path}.role", f"must be one of {', '.join(ROLES)}")
    for field in ("function_call", "audio"):
        if message.get(field) is not None:
            raise _bad(f"{path}.{field}", "is not supported")
    parsed: Message = {"role": role, "content": _content(message.get("content"), role, f"{path}.content")}
    for field in ("name", "tool_call_id"):
        if message.get(field) is not None:
            parsed[field] = _name(message[field], f"{path}.{field}")
    calls = message.get("tool_calls")
    if calls not in (None, []):
        if role != "assistant":
            raise _bad(f"{path}.tool_calls", "is for assistant messages")
        parsed["tool_calls"] = _tool_calls(calls, f"{path}.tool_calls")
    return parsed


def _content(content: Any, role: str, path: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":
            return ""
        raise _bad(path, "is missing")
    if not isinstance(content, list):
        raise _bad(path, "must be a text or a list of text parts")
    if len(content) > MAX_PARTS:
        raise _bad(path, f"has more than {MAX_PARTS} parts")
    return "\n".join([_part(part, f"{path}[{i}]") for i, part in enumerate(content)])


def _part(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise _bad(path, "must be a text part")
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        known = kind in ("image_url", "input_audio", "video_url", "file")
        raise _bad(f"{path}.type", f"{kind} is not supported, only text" if known else "must be text")
    text = part.get(kind)
    if not isinstance(text, str):
        raise _bad(f"{path}.{kind}", "must be a text")
    return text


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or len(calls) > MAX_TOOL_CALLS:
        raise _bad(path, f"must be a list of at most {MAX_TOOL_CALLS} calls")
    return [_tool_call(call, f"{path}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise _bad(path, "must be a function call")
    parsed: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": _name(function.get("name"), f"{path}.function.name"),
            "arguments": _arguments(function.get("arguments"), f"{path}.function.arguments"),
        },
    }
    if call.get("id") is not None:
        parsed["id"] = _name(call["id"], f"{path}.id")
    return parsed


def _arguments(arguments: Any, path: str) -> dict[str, Any]:
    """Templates take an object, while OpenAI's wire form is that object as JSON text."""
    if arguments in (None, ""):
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json_reader.loads(arguments.encode("utf-8"))
        except BadRequest:
            raise _bad(path, "must be the JSON text of an object") from None
    if not isinstance(arguments, dict):
        raise _bad(path, "must be the JSON text of an object")
    return arguments


def _name(value: Any, path: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME_CHARS:
        raise _bad(path, f"must be a text of 1 to {MAX_NAME_CHARS} characters")
    return value


def _bad(path: str, reason: str) -> BadRequest:
    return BadRequest(f"{path} {reason}", param=path)
