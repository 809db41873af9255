"""What a chat may tell the template, and how thoughts are, known by the template."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.dialect import Dialect, dialect_of
from services.gateway.errors import BadRequest
from services.gateway.forms import Form, form_of, template_options
from services.gateway.openai_schema import ChatCompletionRequest
from services.gateway.request_parsing import parse
from shared.protocol import TextParams
from tests.gateway.tiny_tokenizers import ASCII, tiny_tokenizer

THINKING = "{% if enable_thinking %}<think>{% endif %}{{ messages }}{{ content.split('</think>') }}"
EFFORT = "{{ reasoning_effort }}{{ date_string }}"


def dialect(template: str = THINKING, **parsers: str) -> Dialect:
    return dialect_of(tiny_tokenizer(ASCII, special=["<think>"], template=template), **parsers)


def request(**fields: Any) -> ChatCompletionRequest:
    return parse(ChatCompletionRequest, {"messages": [{"role": "user", "content": "x"}]} | fields)


def values(template: str = THINKING, **fields: Any) -> Any:
    return template_options(request(**fields), dialect(template))["values"]


def refused(template: str = THINKING, **fields: Any) -> str | None:
    with pytest.raises(BadRequest) as caught:
        values(template, **fields)
    return caught.value.param


def test_only_what_the_template_knows_is_handed_on() -> None:
    assert values(chat_template_kwargs={"enable_thinking": False}) == {"enable_thinking": False}
    assert values(chat_template_kwargs={}) == values() == {}
    assert refused(chat_template_kwargs={"messages": []}) == "chat_template_kwargs.messages"
    assert refused(chat_template_kwargs={"date_string": "1"}) == "chat_template_kwargs.date_string"
    assert refused(EFFORT, chat_template_kwargs={"date_string": ["1"]}) == "chat_template_kwargs.date_string"


def test_effort_is_what_the_template_has_for_it() -> None:
    assert values(EFFORT, reasoning_effort="low") == {"reasoning_effort": "low"}
    assert values(reasoning_effort="none") == {"enable_thinking": False}
    assert values(reasoning_effort="high") == {"enable_thinking": True}
    assert values("{{ messages }}", reasoning_effort="none") == {}
    assert refused("{{ messages }}", reasoning_effort="low") == "reasoning_effort"


def test_an_answer_is_begun_unless_it_goes_on() -> None:
    options = [template_options(request(**fields), dialect()) for fields in (
        {}, {"continue_final_message": True}, {"add_generation_prompt": False})]  # fmt: skip
    assert [o["add_generation_prompt"] for o in options] == [True, False, False]
    assert [o["continue_final_message"] for o in options] == [False, True, False]


TOKENIZER = tiny_tokenizer(ASCII, special=["<think>"])
PLAIN = TextParams(api="chat")


def form(**parsers: str) -> Form:
    return form_of(request(thinking_token_budget=5), dialect(**parsers))


@pytest.mark.parametrize(
    ("prompt", "thinks", "begun"),
    [("user: x", True, False), ("x <think>\n", True, True), ("x <think>\n\n</think>\n\n", False, False)],
)
def test_thoughts_are_where_the_prompt_leaves_room_for_them(prompt: str, thinks: bool, begun: bool) -> None:
    text, rules = form().text_params(PLAIN, prompt), form().constraint(TOKENIZER, prompt)
    assert (text.reasoning_format, text.reasoning_begun) == ("deepseek_r1" if thinks else "", begun)
    assert (rules is not None) == thinks
    if rules is not None:
        assert rules.think_budget == 5 and rules.think_end == "</think>"
        assert rules.think_start_ids == (() if begun else (TOKENIZER.special_token_id("<think>"),))
        assert bytes(rules.think_end_ids) == b"</think>"


def test_thoughts_can_be_left_in_the_text() -> None:
    assert dialect(reasoning_parser="none").reasoning is None
    assert dialect("{{ messages }}", reasoning_parser="granite").reasoning is not None
