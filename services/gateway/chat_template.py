"""Renders a conversation with the model's own chat template, in a sandbox. *Pure.*

Templates come from the model's files or the operator, never from a request. The sandbox forbids attribute walks and
changes; the text's size, ranges and multiplications are bounded here, because a sandbox bounds none of them. Time and
memory are bounded by where this runs (`template_process.py`), and it runs nowhere else. Behaves as transformers'
`apply_chat_template` does, so that published templates give the same text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from services.gateway.errors import BadRequest

MAX_OUTPUT_CHARS = 1 << 24
MAX_RANGE_STEPS = 1 << 20  # of all ranges in one rendering
MAX_REPEATED_ITEMS = 1 << 20  # result of multiplying a text or a list
_BLOCKS = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
_TEXTS = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"")
_END_MARK = "\ue000end of the text to go on with\ue001"  # characters that no language has
CANNOT_RENDER = "the model's chat template cannot render these messages"

Message = dict[str, Any]


class ChatTemplateError(BadRequest):
    """The template refuses these messages, or cannot be used."""


def render(
    source: str,
    messages: Sequence[Message],
    *,
    now: datetime,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    values: Mapping[str, Any] | None = None,
    special_tokens: Mapping[str, str] | None = None,
) -> str:
    """The prompt's text. special_tokens are the names a template may use (bos_token, ...); now is for `strftime_now`.
    values: further variables. continue_final_message: the text ends where the last message's own ends.

    What a template cannot show is said in a way that it can: a `developer` is a system message, and tool calls are
    JSON at the end of the assistant's text, tools are described in a system message; nothing is dropped.
    """
    if continue_final_message:
        messages = _with_end_mark(messages)
    variables: dict[str, Any] = {
        **(special_tokens or {}),
        **(values or {}),
        "add_generation_prompt": add_generation_prompt,
        "tools": list(tools) or None,
        "documents": None,
        "range": _bounded_range(),
        "strftime_now": now.strftime,
    }
    adapted = _adapted(source, messages, tools)
    try:
        text = _rendered(source, variables | {"messages": adapted})
    except ChatTemplateError:
        plain = _in_two_roles(source, messages, tools)
        if plain == adapted:
            raise
        text = _rendered(source, variables | {"messages": plain, "range": _bounded_range()})
    return _cut_at_end_mark(text) if continue_final_message else text


def _rendered(source: str, variables: Mapping[str, Any]) -> str:
    pieces: list[str] = []
    num_chars = 0
    try:
        for piece in _compiled(source).generate(variables):
            num_chars += len(piece)
            if num_chars > MAX_OUTPUT_CHARS:
                raise ChatTemplateError("the chat template's text is too long", param="messages")
            pieces.append(piece)
    except ChatTemplateError:
        raise
    except Exception as e:  # a template can raise whatever an expression can
        raise ChatTemplateError(CANNOT_RENDER, param="messages") from e
    return "".join(pieces)


@lru_cache(maxsize=64)
def reads(source: str, name: str) -> bool:
    """Whether the template has a variable of this name, and not merely a text or a message's part that is called so."""
    codes = (_TEXTS.sub("''", block) for block in _BLOCKS.findall(source))
    return any(re.search(rf"(?<![.\w]){name}\b", code) for code in codes)


def check(source: str) -> None:
    """ChatTemplateError if the template does not compile; for start-up, where the operator can still act."""
    try:
        _compiled(source)
    except jinja2.TemplateError as e:
        raise ChatTemplateError(f"the chat template does not compile: {e.message}") from e


def _with_end_mark(messages: Sequence[Message]) -> list[Message]:
    """As transformers the last message's text is taken without spaces at its end."""
    last = messages[-1]
    return [*messages[:-1], last | {"content": last["content"].rstrip() + _END_MARK}]


def _cut_at_end_mark(text: str) -> str:
    before, mark, _ = text.rpartition(_END_MARK)
    if not mark:
        raise ChatTemplateError("the model's chat template does not show the last message as it is", param="messages")
    return before


def _adapted(source: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    if tools and not reads(source, "tools"):
        messages = _with_description(messages, tools)
    knows_developer, knows_tool_calls = "developer" in source, "tool_calls" in source
    adapted = []
    for message in messages:
        if message["role"] == "developer" and not knows_developer:
            message = message | {"role": "system"}
        if message.get("tool_calls") and not knows_tool_calls:
            calls = [call["function"] for call in message["tool_calls"]]
            content = [message["content"]] if message["content"] else []
            message = message | {"content": "\n".join([*content, _to_json({"tool_calls": calls})])}
        adapted.append(message)
    return adapted


def _in_two_roles(source: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """For templates that refuse what they do not know: what tools there are and what they gave is said by the user."""
    adapted = _adapted(source, messages, ())
    if tools and not reads(source, "tools"):
        first = next((i for i, message in enumerate(adapted) if message["role"] == "user"), None)
        if first is not None:
            content = f"{_description(tools)}\n\n{adapted[first]['content']}"
            adapted[first] = adapted[first] | {"content": content}
    if "'tool'" in source or '"tool"' in source:
        return adapted
    turns: list[Message] = []
    for message, last in zip(adapted, [None, *(m["role"] for m in adapted)], strict=False):
        if message["role"] == "tool" == last:
            turns[-1] = turns[-1] | {"content": f"{turns[-1]['content']}\n{message['content']}"}
        else:
            turns.append(message | {"role": "user"} if message["role"] == "tool" else message)
    return turns


def _with_description(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    text = _description(tools)
    first = messages[0]
    if first["role"] in ("system", "developer"):
        return [first | {"content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _description(tools: Sequence[Mapping[str, Any]]) -> str:
    """What a template that knows no tools can show of them; calls have the form of `tool_formats`' generic row."""
    functions = "\n".join(_to_json(tool["function"]) for tool in tools)
    return (
        f"You can call these functions:\n{functions}\nTo call some, answer with nothing but "
        '{"tool_calls": [{"name": "the function\'s name", "arguments": {}}]}'
    )


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise jinja2.exceptions.SecurityError("powers are not available")
        for items, times in ((left, right), (right, left)):
            is_repetition = isinstance(items, str | list | tuple) and isinstance(times, int)
            if is_repetition and len(items) * times > MAX_REPEATED_ITEMS:
                raise jinja2.exceptions.SecurityError("a repetition is too long")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here its body is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols], autoescape=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which no template for a model wants
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    """What the template's author says about the messages is meant for the client."""
    raise ChatTemplateError(str(message)[:1024], param="messages")


def _bounded_range() -> Callable[..., range]:
    steps_left = MAX_RANGE_STEPS

    def bounded(*args: int) -> range:
        nonlocal steps_left
        steps = range(*args)
        steps_left -= len(steps)
        if steps_left < 0:
            raise jinja2.exceptions.SecurityError("ranges are too long")
        return steps

    return bounded
