"""Calls are found in text however it is cut, and what only looks like one is content."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway import tool_formats
from services.gateway.tool_parser import ToolParser
from tests.helpers import bounded_work

NAMES = ("get_weather", "now", "f")
Calls = list[tuple[str, Any]]
DS = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
WEATHER: Calls = [("get_weather", {"city": 'Paris, "FR" {é}', "days": [1, {"x": None}]})]
ARGS = json.dumps(WEATHER[0][1], ensure_ascii=False)


def read(name: str, pieces: list[str], max_calls: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    """Content, and name and text of the arguments of each call."""
    parser = ToolParser(tool_formats.BY_NAME[name], NAMES, max_calls)
    content, calls = "", {}
    for i, piece in enumerate([*pieces, ""]):
        text, parts = parser.push(piece, last=i == len(pieces))
        content += text
        assert len({p.index for p in parts}) == len(parts), "one part a call"
        for part in parts:
            assert (part.index in calls) == (not part.name), "a name once, and first"
            old = calls.get(part.index, (part.name, ""))
            calls[part.index] = (old[0], old[1] + part.arguments)
    assert sorted(calls) == list(range(len(calls))) and parser.num_calls == len(calls)
    return content, [calls[i] for i in sorted(calls)]


def cuts(text: str, seed: int) -> list[str]:
    chance = random.Random(seed)
    places = sorted(chance.randrange(len(text) + 1) for _ in range(chance.randrange(12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


CASES: list[tuple[str, str, str, Calls]] = [
    ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGS}}}\n</tool_call>', "", WEATHER),
    ("hermes", f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGS}}}\n</tool_call>\n'
     '<tool_call>{"name":"now","arguments":{}}</tool_call>\n', "Let me see.\n", [*WEATHER, ("now", {})]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "anything"}</tool_call>', "", [("anything", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"id": 5, "name": "f"}</tool_call>', "", [("f", {})]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGS}}}, {{"name": "f", "arguments": {{}}}}]',
     "", [*WEATHER, ("f", {})]),
    ("mistral", f"Hm. [TOOL_CALLS]get_weather[ARGS]{ARGS}", "Hm. ", WEATHER),
    ("mistral", f"[TOOL_CALLS]get_weather{ARGS}[TOOL_CALLS]now{{}}", "", [*WEATHER, ("now", {})]),
    ("granite", f'<|tool_call|>[{{"name": "get_weather", "arguments": {ARGS}}}]', "", WEATHER),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {ARGS}}}', "", WEATHER),
    ("llama3_json", f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGS}}}; '
     '{"name": "now", "parameters": {}}', "", [*WEATHER, ("now", {})]),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {"a": "b"}}', "", [("f", {"a": "b"})]),
    ("pythonic", '[get_weather(city="Paris", days=[1, {"x": None}]), now()]', "",
     [("get_weather", {"city": "Paris", "days": [1, {"x": None}]}), ("now", {})]),
    ("pythonic", "[f(a=true, b='x, (y)', c=-1.5)]", "", [("f", {"a": True, "b": "x, (y)", "c": -1.5})]),
    ("deepseek_v3", f"Well{DS[0]}{DS[1]}function{DS[2]}get_weather\n```json\n{ARGS}\n```{DS[3]}\n"
     f"{DS[1]}function{DS[2]}now\n```json\n{{}}\n```{DS[3]}{DS[4]}", "Well", [*WEATHER, ("now", {})]),
    ("deepseek_v31", f"{DS[0]}{DS[1]}get_weather{DS[2]}{ARGS}{DS[3]}{DS[4]}", "", WEATHER),
    ("generic", f'{{"tool_calls": [{{"name": "get_weather", "arguments": {ARGS}}}, '
     '{"name": "now", "arguments": {}}]}', "", [*WEATHER, ("now", {})]),
    ("generic", '\n{"name": "f", "arguments": {"a": 1}}\n', "", [("f", {"a": 1})]),
]  # fmt: skip
PLAIN = [
    ("hermes", "no call at all <tool_ca"), ("hermes", "  spaces around  \n"), ("hermes", "<tool_call>\nnot JSON"),
    ("hermes", '<tool_call>{"name": 5}</tool_call> and more'), ("generic", '{"answer": 42, "name": "f"}'),
    ("generic", '{"name": "unknown", "arguments": {}}'), ("generic", "[1, 2, 3]"),
    ("generic", "text {\"name\": \"f\"}"),
    ("llama3_json", '{"name": "f", "param'), ("pythonic", "[unknown(a=1)]"), ("pythonic", "[f(open('x'))]"),
    ("pythonic", "[f(a=b)]"), ("mistral", "[TOOL_CALLS]no json here"), ("deepseek_v3", "```json\n{}\n```"),
    ("hermes", ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_found_however_the_text_is_cut(name: str, text: str, content: str, calls: Calls) -> None:
    whole = read(name, [text])
    assert (whole[0], [(n, json.loads(a)) for n, a in whole[1]]) == (content, calls)
    assert read(name, list(text)) == whole
    for seed in range(30):
        assert read(name, cuts(text, seed)) == whole


@pytest.mark.parametrize(("name", "text"), PLAIN)
def test_what_only_looks_like_a_call_is_content(name: str, text: str) -> None:
    for pieces in ([text], list(text), *(cuts(text, seed) for seed in range(20))):
        content, calls = read(name, pieces)
        assert calls == [] and content == text, pieces


@pytest.mark.parametrize("name", tool_formats.BY_NAME)
@given(data=st.data())
def test_any_text_is_read_alike_however_it_is_cut(name: str, data: st.DataObject) -> None:
    row = tool_formats.BY_NAME[name]
    parts = st.sampled_from([
        *row.marks, "{", "}", "[", "]", '"', '"name"', '"f"', ": ", '"arguments"', '"parameters"', "f(", ")", "a=", "1",
        " ", "\n", "text", "\\", "'", ",", '{"name": "f", "arguments": {"a": "',
    ])  # fmt: skip
    text = "".join(data.draw(st.lists(parts, max_size=14)))
    whole = read(name, [text])
    assert read(name, list(text)) == whole
    assert read(name, cuts(text, data.draw(st.integers(0, 1000)))) == whole


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolParser(tool_formats.BY_NAME["hermes"], NAMES)
    assert parser.push('<tool_call>{"name": "f", ')[1] == ()
    _, [start] = parser.push('"arguments": {"a')
    assert (start.index, start.name, start.arguments) == (0, "f", '{"a')
    _, [more] = parser.push('": 1')
    assert (more.index, more.name, more.arguments) == (0, "", '": 1')


def test_what_the_model_writes_breaks_nothing() -> None:
    half = '<tool_call>{"name": "f\\ud800", "arguments": {}}</tool_call>'
    assert read("hermes", [half])[1] == []
    late = '<tool_call>{"arguments": "{\\"a\\": \\"\\\\ud800\\"}", "name": "f"}</tool_call>'
    _, [(_, arguments)] = read("hermes", [late])
    assert arguments.encode() and json.loads(arguments)
    read("generic", ['{"tool_calls":[' * 2000])
    for number in ("NaN", "-Infinity", "1e999"):
        unread = f'<tool_call>{{"arguments": {{"a": {number}}}, "name": "f"}}</tool_call>'
        assert read("hermes", [unread])[1] == [], "no JSON"
    for depth in range(100, 4000, 100):  # what can be read and not be written is there too
        nested = '{"a":' * depth + "1" + "}" * depth
        read("hermes", [f'<tool_call>{{"arguments": {nested}, "name": "f"}}</tool_call>'])
    long = '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 200_000
    assert len(read("hermes", [long])[1][0][1]) > 200_000


@pytest.mark.parametrize("value", ["[" * 31 + "]" * 31, "'" + "x" * 5000 + "'", "(" * 3000, "-" * 4000 + "1", "{**{}}"])
def test_python_that_takes_long_to_read_is_content(value: str) -> None:
    text = f"[f(a={value})]"
    assert read("pythonic", [text]) == (text, [])
    assert read("pythonic", [f"[f(a={'[' * 29}{']' * 29})]"])[1] and read("pythonic", ["[f(**{'a': 1})]"])[1] == []


@pytest.mark.parametrize(
    ("name", "first", "piece"),
    [
        ("hermes", "", " "), ("generic", "", ";"), ("hermes", "text ", "plain text, "), ("llama3_json", "", "\n"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', " "),
        ("generic", '{"name": "f", "id": "', "x"), ("hermes", '<tool_call>{"', "x"),
        ("hermes", '<tool_call>{"a": [', "1,"), ("deepseek_v3", "<｜tool▁call▁begin｜>", "x"),
    ],
)  # fmt: skip
def test_a_character_costs_the_same_however_long_the_text_is(name: str, first: str, piece: str) -> None:
    with bounded_work(1.5):
        read(name, [first, *[piece] * 40_000])


def test_content_without_a_marks_first_character_is_taken_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = ToolParser(tool_formats.BY_NAME["hermes"], NAMES)
    parser.push("some ")
    monkeypatch.setattr(parser, "_machine", None)  # it is not asked
    assert parser.push("text { } [ ]\n, and more") == ("text { } [ ]\n, and more", ())


def test_a_call_beyond_the_most_that_is_cut_is_left_out() -> None:
    whole = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for cut in (whole + '<tool_call>{"name": "f", "arguments": {"a": "lon', whole + '<tool_call>{"name": "f", "argu'):
        assert read("hermes", [cut], max_calls=1) == ("", [("f", "{}")]), cut


def test_calls_beyond_the_most_are_left_out() -> None:
    text = "".join(f'<tool_call>{{"name": "f", "arguments": {{"i": {i}}}}}</tool_call>' for i in range(3))
    assert read("hermes", [text], max_calls=1) == ("", [("f", '{"i": 0}')])


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"), ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", "generic"),
        ('{{ tools }}{"name": f, "parameters": x}', "llama3_json"), ("{{ tools }}<|start_of_role|>", "granite"),
        ("{{ tools }}'function' + '<｜tool▁sep｜>' + tool['name']", "deepseek_v31"),
        ("{{ tools }}<｜tool▁calls▁begin｜>function<｜tool▁sep｜>name", "deepseek_v3"),
        ("{{ tools }}[func_name1(params_name1=params_value1)]", "pythonic"), ("{{ tools }}", "generic"),
    ],
)  # fmt: skip
def test_a_format_is_known_by_its_template(source: str, name: str) -> None:
    assert tool_formats.of_template(source).name == name
