"""How models write tool calls: one row a family, from which texts are parsed and grammars are made. *Pure.*

`tool_parser.py` reads by these rows. A format is chosen by what stands in the chat template, since that shows earlier
calls to the model in the form in which it writes its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from services.gateway import chat_template

ID_CHARS = 24


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """begins: texts of which each opens calls; none: they are the whole answer. ends: texts that close
    what was opened. dropped: texts that mean nothing.

    body: a call is an object with `name` and the arguments under arguments_key, perhaps several in a list (json); or
    name_before, name, name_end, the arguments (named); or a list of Python calls (pythonic). signs: texts of which one
    stands in the templates of such models, and none of `unless`. id_chars: how long ids of calls are.

    before, between, after: what stands around all calls, call_before and call_after around each, where an answer is
    made to have some; is_written: whether answers are made in this form.
    """

    name: str
    signs: tuple[str, ...]
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    body: Literal["json", "named", "pythonic"] = "json"
    arguments_key: str = "arguments"
    name_before: str = ""
    name_end: str = ""
    id_chars: int = ID_CHARS
    before: str = ""
    call_before: str = ""
    call_after: str = ""
    between: str = ""
    after: str = ""
    is_written: bool = True
    unless: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(
            text for text in (*self.begins, *self.ends, *self.dropped, self.name_before, self.name_end) if text
        )


_CALLS, _END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

# the first whose sign stands in the template; names are vLLM's where it has one
FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat("pythonic", ("[func_name1(",), body="pythonic", is_written=False),  # templates show calls as JSON too
    ToolFormat("deepseek_v31", (_SEP,), (_CALL,), (_END_CALL, _END_CALLS), (_CALLS,), "named", name_end=_SEP,
               before=_CALLS, call_before=_CALL, call_after=_END_CALL, after=_END_CALLS,
               unless=("```json", f"function{_SEP}")),
    ToolFormat("deepseek_v3", (_SEP,), (_CALL,), ("\n```", _END_CALL, _END_CALLS), (_CALLS,), "named",
               name_before=f"function{_SEP}", name_end="\n```json\n", before=_CALLS, call_before=_CALL,
               call_after=f"\n```{_END_CALL}", between="\n", after=_END_CALLS),
    ToolFormat("mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), id_chars=9, before="[TOOL_CALLS][", between=", ",
               after="]"),
    ToolFormat("granite", ("<|tool_call|>", "<|start_of_role|>"), ("<|tool_call|>", "<tool_call>"), ("</tool_call>",),
               before="<|tool_call|>[", between=", ", after="]"),
    ToolFormat("hermes", ("<tool_call>",), ("<tool_call>",), ("</tool_call>",), call_before="<tool_call>\n",
               call_after="\n</tool_call>", between="\n"),
    ToolFormat("llama3_json", ('"parameters": ', "<|python_tag|>"), ("<|python_tag|>",), arguments_key="parameters",
               between="; "),
    ToolFormat("generic", (), before='{"tool_calls": [', between=", ", after="]}"),
)  # fmt: skip
BY_NAME = {row.name: row for row in FORMATS}


def of_template(source: str) -> ToolFormat:
    """`generic` where the template is told nothing of tools."""
    if not chat_template.reads(source, "tools"):
        return BY_NAME["generic"]
    shown = (row for row in FORMATS if any(sign in source for sign in row.signs))
    return next((row for row in shown if not any(sign in source for sign in row.unless)), BY_NAME["generic"])


def id_chars(name: str) -> int:
    """Of ids of calls in the form of that name, also where a newer gateway has named it."""
    row = BY_NAME.get(name)
    return ID_CHARS if row is None else row.id_chars


# --- grammars -----------------------------------------------------------------------------------------------------


def written(row: ToolFormat) -> ToolFormat:
    """The form in which an answer that must be a call is made."""
    return row if row.is_written else BY_NAME["llama3_json"]


def call_grammar(
    row: ToolFormat, arguments: Mapping[str, str], special_ids: Mapping[str, int], *, several: bool, otherwise: str = ""
) -> str:
    """Lark for calls of these tools: name -> the arguments as a term of a rule.

    special_ids: of the row's marks that are special tokens. several: more than one call may come. otherwise: what an
    answer without calls may be, as a term; `text` for any text, which may stand before calls too.
    """
    first = row.before + row.call_before
    mark = next((mark for mark in row.marks if first.startswith(mark)), "")
    call = f"{_terms(row.call_before, special_ids)} one {_terms(row.call_after, special_ids)}"
    more = f"({_terms(row.between, special_ids)} call)*" if several else ""
    after = _terms(row.after, special_ids)
    rules = [f"call: {call}", "one: " + " | ".join(f"tool{i}" for i in range(len(arguments)))]
    for i, (name, term) in enumerate(arguments.items()):
        opened, closed = row.name_before + name + row.name_end, ""
        if row.body != "named":
            opened, closed = f'{{"name": {json.dumps(name)}, "{row.arguments_key}": ', "}"
        rules.append(f"tool{i}: {_terms(opened, special_ids)} arguments{i} {_terms(closed, {})}")
        rules.append(f"arguments{i}: {term}")
    if otherwise == "text" and mark and mark not in special_ids:  # a mark that is text ends the text before it
        rest = _terms(first.removeprefix(mark), special_ids)
        tail = f"{rest} one {_terms(row.call_after, special_ids)} {more} {after}"
        start = ["start: (head calls)* text", f"calls: {tail}", f"head[lazy]: TEXT {_quoted(mark)}", "text: TEXT",
                 "TEXT: /(.|\\n)*/"]  # fmt: skip
        return "\n".join([*start, *rules])
    rules.append(f"calls: {_terms(row.before, special_ids)} call {more} {after}")
    if not otherwise:
        start = ["start: calls"]
    elif otherwise != "text":
        start = ["start: calls | other", f"other: {otherwise}"]
    elif mark:
        start = ["start: text calls | text", "text: /(.|\\n)*/"]
    else:  # what begins like a call is one
        start = ["start: text | calls", "text: /([^\\s{\\[](.|\\n)*)?/"]
    return "\n".join([*start, *rules])


def _terms(text: str, special_ids: Mapping[str, int]) -> str:
    """As terms of a Lark rule; special tokens by their ids."""
    marks = sorted(special_ids, key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
    return " ".join(f"<[{special_ids[part]}]>" if part in special_ids else _quoted(part) for part in parts if part)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
