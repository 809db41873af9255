"""Puts the chunks of a stream together as a client would: what it then has must be what a whole answer says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]

HEAD = ("id", "object", "created", "model", "system_fingerprint")


def assemble(chunks: Sequence[Json]) -> Json:
    """An answer in the shape of a whole one. Every chunk must be of one answer, and every choice must end once."""
    head = {key: chunks[0][key] for key in HEAD}
    more: Json = {}  # what is told of the prompt
    choices: dict[int, Json] = {}
    usage = None
    for chunk in chunks:
        assert {key: chunk[key] for key in HEAD} == head
        more |= {key: value for key, value in chunk.items() if key not in (*HEAD, "choices", "usage")}
        usage = chunk.get("usage") or usage
        for part in chunk["choices"]:
            _add(choices.setdefault(part["index"], {}), part)
    assert all(choice["finish_reason"] for choice in choices.values())
    for choice in choices.values():
        for call in choice.get("message", {}).get("tool_calls", ()):
            del call["index"]
    names = {"chat.completion.chunk": "chat.completion"}
    whole = head | more | {"object": names.get(head["object"], head["object"])}
    return whole | {"choices": [choices[i] for i in sorted(choices)], "usage": usage}


def _add(choice: Json, part: Json) -> None:
    assert choice.get("finish_reason") is None, f"after the end: {part}"
    for key, value in part.items():
        if key == "delta":
            _add_delta(choice.setdefault("message", {"role": None, "content": None}), value)
        elif key == "text":
            choice[key] = choice.get(key, "") + value
        elif isinstance(value, dict) and isinstance(choice.get(key), dict):
            for name, values in value.items():
                choice[key][name] = choice[key][name] + values
        elif isinstance(value, list) and isinstance(choice.get(key), list):
            choice[key] = choice[key] + value
        elif value is not None or key not in choice:
            choice[key] = value


def _add_delta(message: Json, delta: Json) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            calls = message.setdefault(key, [])
            for part in value:
                _add_call(calls, part)
        elif key == "role":
            assert message[key] in (None, value)
            message[key] = value
        else:
            message[key] = (message.get(key) or "") + value


def _add_call(calls: list[Json], part: Json) -> None:
    if part["index"] == len(calls):
        calls.append(part | {"function": dict(part["function"])})
        return
    assert set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
