"""Templates of common families: tools, calls, results and thoughts are in the prompt, and parsers fit the family."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest

from services.gateway import chat_template, reasoning, tool_formats
from services.gateway.chat_messages import parse_messages
from services.gateway.tool_parser import ToolParser
from tests.gateway import published_templates as published

NOW = datetime(2024, 7, 26, 12, 0)
TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Says.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]  # fmt: skip
ARGUMENTS = {"city": "Paris"}
JSON_CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
DS = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
GENERIC = '{"tool_calls": [' + JSON_CALL + "]}"


@dataclass(frozen=True)
class Family:
    """tools, thoughts: what is to be chosen for it; call: how such a model writes one; end: of the prompt."""

    source: str
    tools: str
    thoughts: str | None
    call: str
    end: str


FAMILIES = {
    "llama 3": Family(published.LLAMA3, "llama3_json", None,
                      '{"name": "get_weather", "parameters": {"city": "Paris"}}', "assistant<|end_header_id|>\n\n"),
    "qwen 2.5": Family(published.QWEN25, "hermes", None, f"<tool_call>\n{JSON_CALL}\n</tool_call>",
                       "<|im_start|>assistant\n"),
    "qwen 3": Family(published.QWEN3, "hermes", "deepseek_r1", f"<tool_call>\n{JSON_CALL}\n</tool_call>",
                     "<|im_start|>assistant\n"),
    "mistral": Family(published.MISTRAL, "mistral", None, f"[TOOL_CALLS] [{JSON_CALL}]", "[/TOOL_RESULTS]"),
    "gemma": Family(published.GEMMA, "generic", None, GENERIC, "<start_of_turn>model\n"),
    "granite": Family(published.GRANITE, "granite", "granite", f"<|tool_call|>[{JSON_CALL}]",
                      "<|start_of_role|>assistant<|end_of_role|>"),
    "deepseek v3": Family(published.DEEPSEEK_V3, "deepseek_v3", "deepseek_r1",
                          f"{DS[0]}function{DS[1]}get_weather\n```json\n{json.dumps(ARGUMENTS)}\n```{DS[2]}",
                          "<｜Assistant｜>"),
    "deepseek r1": Family(published.DEEPSEEK_R1, "deepseek_v3", "deepseek_r1",
                          f"{DS[0]}function{DS[1]}get_weather\n```json\n{json.dumps(ARGUMENTS)}\n```{DS[2]}",
                          "<think>\n"),
    "deepseek v3.1": Family(published.DEEPSEEK_V31, "deepseek_v31", "deepseek_r1",
                            f"{DS[0]}get_weather{DS[1]}{json.dumps(ARGUMENTS)}{DS[2]}", "<｜Assistant｜></think>"),
    "phi": Family(published.PHI, "generic", None, GENERIC, "<|assistant|>"),
}  # fmt: skip


def conversation() -> list[dict[str, Any]]:
    function = {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}
    return parse_messages(
        [
            {"role": "user", "content": "How is Paris?"},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "abcdefghi", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": "18 degrees"},
        ]
    )  # fmt: skip


def render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return chat_template.render(source, messages, now=NOW, special_tokens=TOKENS, **options)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_parsers_are_the_family_s(family: Family) -> None:
    row, thoughts = tool_formats.of_template(family.source), reasoning.of_template(family.source)
    assert row.name == family.tools
    assert (thoughts.name if thoughts else None) == family.thoughts
    parser = ToolParser(row, ["get_weather"])
    content, calls = parser.push(family.call, last=True)
    assert content.strip() == "" and [c.name for c in calls] == ["get_weather"]
    assert json.loads("".join(c.arguments for c in calls)) == ARGUMENTS


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_nothing_of_a_round_of_calls_is_left_out(family: Family) -> None:
    text = render(family.source, conversation(), tools=TOOLS)
    for part in ("How is Paris?", '"city"', "Says.", "get_weather", "18 degrees"):
        assert part in text, part
    assert text.endswith(family.end)
    earlier = text[text.rindex("How is Paris?") :]
    assert json.dumps(ARGUMENTS) in earlier, "the earlier call"


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_form_that_is_described_is_the_one_that_is_read(family: Family) -> None:
    """The template's own words for it, or those that are put into a message where it has none."""
    text = render(family.source, [{"role": "user", "content": "Hi"}], tools=TOOLS)
    assert "Says." in text
    assert ('{"tool_calls": [' in text) == (family.tools == "generic")
    assert "Hi" in render(family.source, [{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("name", ["deepseek v3", "deepseek r1", "deepseek v3.1"])
def test_thoughts_of_earlier_turns_are_left_out(name: str) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>hm</think>b"},
             {"role": "user", "content": "c"}]  # fmt: skip
    text = render(FAMILIES[name].source, turns)
    assert "hm" not in text and "b" in text


def test_several_results_are_one_turn_where_there_are_two_roles() -> None:
    call = {"type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    turns = parse_messages(
        [
            {"role": "user", "content": "How is it?"},
            {"role": "assistant", "tool_calls": [call | {"id": "a"}, call | {"id": "b"}]},
            {"role": "tool", "tool_call_id": "a", "content": "18 degrees"},
            {"role": "tool", "tool_call_id": "b", "content": "20 degrees"},
        ]
    )
    assert "<start_of_turn>user\n18 degrees\n20 degrees<end_of_turn>" in render(published.GEMMA, turns, tools=TOOLS)
    with pytest.raises(chat_template.ChatTemplateError, match="must alternate"):
        render(published.GEMMA, turns[:1] * 2, tools=TOOLS)
