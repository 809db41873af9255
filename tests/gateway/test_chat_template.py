"""Chat templates: as transformers renders them, bounded, and without a way out of the sandbox."""

from datetime import datetime
from typing import Any

import pytest

from services.gateway import chat_template
from services.gateway.chat_template import ChatTemplateError

NOW = datetime(2024, 7, 26, 12, 0)
CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "é"}}, "id": "c1"}


def render(source: str, *messages: dict[str, Any], **options: Any) -> str:
    return chat_template.render(source, messages or [{"role": "user", "content": "hi"}], now=NOW, **options)


def test_renders_messages_and_the_generation_prompt() -> None:
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hi</s>"),
        ("{% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),  # trim_blocks and lstrip_blocks
        ("{% for m in messages * 3 %}{% if loop.index > 2 %}{% break %}{% endif %}a{% endfor %}", "aa"),
        ("{{ {'a': '<é>', 'b': [1, none]} | tojson }}", '{"a": "<é>", "b": [1, null]}'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        ("{% if tools is none and not documents %}none{% endif %}", "none"),
        ("{% generation %}x{{ messages[0].content }}{% endgeneration %}", "xhi"),
        ("{% set ns = namespace(n=0) %}{% for i in range(5) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "10"),
        ("{{ undefined_name }}{{ messages[0].nothing }}", ""),
        ("{{ '-' * 3 }}{{ 2 * 3 }}{{ '<b>' }}", "---6<b>"),
    ],
)
def test_behaves_as_published_templates_expect(source: str, expected: str) -> None:
    assert render(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}) == expected


def test_what_a_template_raises_is_what_the_client_reads() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate") as e:
        render("{{ raise_exception('Conversation roles must alternate') }}")
    assert e.value.status == 400 and e.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ strftime_now.__self__.year }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ 'a' * 10000000000 }}",
        "{{ 10000000000 * [0] }}",
        "{{ 9 ** 999999999 }}",
        "{% for i in range(100000000000) %}a{% endfor %}",
        "{% for i in range(1000) %}{% for j in range(2000) %}{% endfor %}{% endfor %}",
        "{% for",
        "{{ messages | nofilter }}",
    ],
)
def test_a_template_that_breaks_out_or_fails_is_one_safe_error(source: str) -> None:
    with pytest.raises(ChatTemplateError) as e:
        render(source)
    assert e.value.message == "the model's chat template cannot render these messages"


def test_the_output_is_bounded() -> None:
    source = "{% for i in range(1000) %}{{ 'a' * 1000000 }}{% endfor %}"
    with pytest.raises(ChatTemplateError, match="too long"):
        render(source)


def test_a_bad_template_is_found_at_start_up() -> None:
    chat_template.check(CHATML)
    with pytest.raises(ChatTemplateError, match="does not compile"):
        chat_template.check("{% if %}")


def test_messages_cannot_inject_template_code() -> None:
    assert "{{ 7 * 7 }}" in render(CHATML, {"role": "user", "content": "{{ 7 * 7 }}"})


def test_chat_messages_calls_are_shown_by_templates_that_do_not_know_them() -> None:
    turn = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    call = '{"tool_calls": [{"name": "f", "arguments": {"x": "é"}}]}'
    assert render(CHATML, turn, add_generation_prompt=False) == f"<|im_start|>assistant\n{call}<|im_end|>\n"
    spoken = turn | {"content": "well"}
    assert f"well\n{call}<|im_end|>" in render(CHATML, spoken)
    knowing = "{{ messages[0].content }}{% for c in messages[0].tool_calls %}[{{ c.function.name }}]{% endfor %}"
    assert render(knowing, spoken) == "well[f]"
    assert spoken["content"] == "well"  # the caller's message is not changed


def test_a_developer_is_a_system_message_where_the_template_knows_none() -> None:
    message = {"role": "developer", "content": "x"}
    assert render("{{ messages[0].role }}", message) == "system"
    assert render("{{ messages[0].role }}{# developer #}", message) == "developer"


TOOL = {"type": "function", "function": {"name": "f", "description": "é"}}


def test_tools_are_for_the_template_or_described_in_a_system_message() -> None:
    assert (
        render("{{ tools | tojson }}", tools=[TOOL])
        == '[{"type": "function", "function": {"name": "f", "description": "é"}}]'
    )
    described = render(CHATML, tools=[TOOL], add_generation_prompt=False)
    assert described.startswith("<|im_start|>system\nYou can call") and '{"name": "f", "description": "é"}' in described
    assert described.endswith("<|im_start|>user\nhi<|im_end|>\n") and '{"tool_calls": [' in described
    system, user = {"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}
    both = render(CHATML, system, user, tools=[TOOL])
    assert both.startswith("<|im_start|>system\nBe short.\n\nYou can call") and both.count("system") == 1


def test_values_are_variables_and_never_replace_what_is_the_templates_own() -> None:
    assert render("{{ enable_thinking }} {{ messages | length }}", values={"enable_thinking": False}) == "False 1"
    assert render("{{ messages | length }}", values={"messages": []}) == "1"


def test_the_last_message_is_gone_on_with_where_its_text_ends() -> None:
    turns = [{"role": "user", "content": "Begin."}, {"role": "assistant", "content": " Once upon a "}]
    text = render(CHATML, *turns, add_generation_prompt=False, continue_final_message=True)
    assert text == "<|im_start|>user\nBegin.<|im_end|>\n<|im_start|>assistant\n Once upon a"
    for content in ("en", "|", ""):
        turn = {"role": "assistant", "content": content}
        text = render(CHATML, turns[0], turn, add_generation_prompt=False, continue_final_message=True)
        assert text.endswith(f"<|im_start|>assistant\n{content}"), "also where the template's own text has such a part"
    with pytest.raises(ChatTemplateError, match="last message"):
        render("{{ messages | length }}", turn, continue_final_message=True)
