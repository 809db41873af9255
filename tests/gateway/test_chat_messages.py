"""What a request's messages may be, and the one form they get."""

from typing import Any

import pytest

from services.gateway.chat_messages import parse_messages
from services.gateway.errors import BadRequest

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
PARSED_CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}, "id": "c1"}


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}, {"content": []}])
def test_chat_messages_an_assistant_turn_without_text_is_kept(content: dict[str, Any]) -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", **content, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    assert parse_messages(messages) == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [PARSED_CALL]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]


def test_text_parts_are_joined_in_order() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "a\nb"}]


def test_unknown_keys_do_not_reach_a_template() -> None:
    message = {"role": "developer", "content": "x", "name": "n", "tool_calls": [], "refusal": None, "extra": 1}
    assert parse_messages([message]) == [{"role": "developer", "content": "x", "name": "n"}]


@pytest.mark.parametrize("arguments", ["", "{}", None, {}])
def test_arguments_become_an_object(arguments: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    [message] = parse_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "x", **fields}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "role"),
        ({"role": None, "content": "x"}, "role"),
        ({"role": "root", "content": "x"}, "role"),
        ({"role": ["user"], "content": "x"}, "role"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": None}, "content"),
        ({"role": "tool", "content": None}, "content"),
        ({"role": "user", "content": 7}, "content"),
        ({"role": "user", "content": True}, "content"),
        ({"role": "user", "content": {"text": "x"}}, "content"),
        ({"role": "user", "content": ["x"]}, "content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "content[0].text"),
        ({"role": "user", "content": [{"text": "x"}]}, "content[0].type"),
        ({"role": "user", "content": [{"type": ["text"], "text": "x"}]}, "content[0].type"),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "u"}}],
            },
            "content[1].type",
        ),
        ({"role": "user", "content": [{"type": "text", "text": "x"}] * 5000}, "content"),
        ({"role": "user", "content": "x", "name": ""}, "name"),
        ({"role": "user", "content": "x", "name": "n" * 300}, "name"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "tool_calls"),
        (assistant(tool_calls="f()"), "tool_calls"),
        (assistant(tool_calls=[CALL] * 200), "tool_calls"),
        (assistant(tool_calls=[None]), "tool_calls[0]"),
        (assistant(tool_calls=[CALL, {"type": "custom", "function": {}}]), "tool_calls[1]"),
        (assistant(tool_calls=[{"function": {}}]), "tool_calls[0].function.name"),
        (assistant(tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), "tool_calls[0].function.arguments"),
        (assistant(tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}]), "tool_calls[0].function.arguments"),
        (assistant(tool_calls=[{"function": {"name": "f", "arguments": 3}}]), "tool_calls[0].function.arguments"),
        (assistant(function_call={"name": "f"}), "function_call"),
        (assistant(audio={"id": "a"}), "audio"),
    ],
)
def test_refuses_by_name(message: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as e:
        parse_messages([{"role": "user", "content": "ok"}, message])
    assert e.value.param == f"messages[1].{param}" and e.value.message.startswith(e.value.param)
