"""From a checked request to what is admitted: ids, resolved parameters, and refusals that give the real numbers."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from services.gateway import chat_template
from services.gateway.dialect import dialect_of
from services.gateway.errors import BadRequest
from services.gateway.forms import template_options
from services.gateway.openai_schema import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from services.gateway.preparation import Limits, PreparedPrompt, build_specs, conversation, detokenize, tokenize
from services.gateway.request_parsing import parse
from tests.gateway.tiny_tokenizers import ASCII, tiny_tokenizer

NOW = datetime(2024, 7, 26, 12, 0, tzinfo=UTC)
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
TOKENIZER = tiny_tokenizer(ASCII, ["<s>", "<e>"], eos="<e>", bos="<s>", template=TEMPLATE)
BOS, EOS, VOCAB = 128, 129, 130
LIMITS = Limits(max_model_len=100, pool_tokens=1000, max_choices=8)
ONE_MESSAGE = [{"role": "user", "content": "hello"}]


def completion(limits: Limits = LIMITS, **fields: Any) -> list[PreparedPrompt]:
    request = parse(CompletionRequest, {"prompt": "hello"} | fields)
    return build_specs(request, TOKENIZER, limits, draw_seed=lambda: 77, now=NOW)


def chat(limits: Limits = LIMITS, **fields: Any) -> PreparedPrompt:
    request = parse(ChatCompletionRequest, {"messages": ONE_MESSAGE} | fields)
    [prepared] = build_specs(request, TOKENIZER, limits, draw_seed=lambda: 77, now=NOW, chat_text=rendered(request))
    return prepared


def rendered(request: ChatCompletionRequest | TokenizeRequest) -> str:
    messages = conversation(request, TOKENIZER)
    if messages is None:
        return ""
    options = template_options(request, dialect_of(TOKENIZER))
    return chat_template.render(TEMPLATE, messages, now=NOW, special_tokens=TOKENIZER.template_tokens, **options)


def refused(call: Any, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as e:
        call(**fields)
    return e.value


def ids(text: str) -> list[int]:
    return [BOS, *text.encode()]


# --- prompts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", [ids("hello")]),
        ("<s>hello", [ids("hello")]),  # one BOS also where the text has it already
        ("a<e>b", [[BOS, 97, EOS, 98]]),  # special tokens are parsed
        (["a", "b"], [ids("a"), ids("b")]),
        ([1, 2.0], [[1, 2]]),  # ids are taken as they are
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_forms_of_a_prompt(prompt: Any, expected: list[list[int]]) -> None:
    assert [p.ids for p in completion(prompt=prompt)] == expected


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([-1], "prompt[0]"),
        ([VOCAB], "prompt[0]"),
        ([1, 2, 1e10], "prompt[2]"),
        ([True], "prompt[0]"),
        ([1.5], "prompt[0]"),
        ([[1, 2], [3, -1]], "prompt[1][1]"),
        ([[1], "a"], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([None], "prompt[0]"),
        ([{}], "prompt[0]"),
        ([], "prompt"),
        ([[]], "prompt"),
        (None, "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        (["a"] * 9, "prompt"),
    ],
)
def test_degenerate_prompts_name_the_position(prompt: Any, param: str) -> None:
    assert refused(completion, prompt=prompt).param == param


def test_templating_and_tokenising_a_chat_prompt_has_the_template_s_bos_only() -> None:
    prepared = chat()
    assert prepared.ids == ids("hello>")
    assert prepared.text.api == "chat"
    no_template = tiny_tokenizer(ASCII, ["<e>"], eos="<e>")
    request = parse(ChatCompletionRequest, {"messages": ONE_MESSAGE})
    with pytest.raises(BadRequest, match="no chat template"):
        conversation(request, no_template)


# --- lengths ------------------------------------------------------------------------------------------------------


def test_how_many_tokens_may_come() -> None:
    assert completion()[0].sampling.max_tokens == 16
    assert completion(max_tokens=None)[0].sampling.max_tokens == 16
    assert completion(max_tokens=5.0)[0].sampling.max_tokens == 5
    assert completion(max_tokens=500)[0].sampling.max_tokens == 100 - 6
    assert chat().sampling.max_tokens == 100 - 7
    assert chat(max_tokens=9).sampling.max_tokens == 9
    assert chat(max_tokens=9, max_completion_tokens=4).sampling.max_tokens == 4
    assert completion(max_tokens=0, echo=True)[0].sampling.max_tokens == 0


def test_admission_and_limits_what_can_never_fit_is_refused_with_the_real_number() -> None:
    small = Limits(max_model_len=512, pool_tokens=128)
    error = refused(completion, limits=small, prompt=[1] * 200, max_tokens=8)
    assert error.code == "context_length_exceeded" and error.param == "prompt"
    assert "200 tokens" in error.message and "KV cache" in error.message and "128" in error.message
    assert completion(limits=small, prompt=[1] * 120, max_tokens=64)[0].sampling.max_tokens == 8
    assert "context holds 100" in refused(chat, messages=[{"role": "user", "content": "x" * 98}]).message


def test_a_prompt_that_fills_the_context() -> None:
    assert refused(completion, prompt=[1] * 100).code == "context_length_exceeded"
    assert completion(prompt=[1] * 99)[0].sampling.max_tokens == 1
    assert completion(prompt=[1] * 100, max_tokens=0)[0].sampling.max_tokens == 0
    scored = {"echo": True, "logprobs": 1}
    assert refused(completion, prompt=[1] * 100, max_tokens=1, **scored).code == "context_length_exceeded"
    for max_tokens_0 in ({"max_tokens": 0}, {"max_tokens": 0, **scored}, {"max_tokens": 0, "prompt_logprobs": 0}):
        assert completion(prompt=[1] * 100, **max_tokens_0)[0].sampling.max_tokens == 0
        assert refused(completion, prompt=[1] * 101, **max_tokens_0).code == "context_length_exceeded"


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(TOKENIZER), "encode", lambda *a, **k: pytest.fail("tokenized"))
    error = refused(completion, prompt="x" * 1_000_000)
    assert error.code == "context_length_exceeded" and "1000000 characters" in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 100_000, "max_tokens": None},
        {"min_tokens": 8, "max_tokens": 4},
        {"min_tokens": 95, "max_tokens": 500},
    ],
)
def test_parameter_extremes_min_tokens_is_compared_with_the_resolved_maximum(fields: dict[str, Any]) -> None:
    assert refused(completion, **fields).param == "min_tokens"
    assert refused(chat, **fields | {"min_tokens": 100_000}).param == "min_tokens"


# --- sampling -----------------------------------------------------------------------------------------------------


def test_defaults_are_resolved() -> None:
    sampling = completion()[0].sampling
    assert sampling.model_dump() == {
        "max_tokens": 16,
        "min_tokens": 0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": 77,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "constraint": None,
        "stop_token_ids": (EOS,),
        "ignore_eos": False,
        "logprobs": None,
        "prompt_logprobs": None,
        "num_speculative_tokens": None,
        "fleet": True,
    }


@pytest.mark.parametrize(
    ("asked", "most", "fleet"),
    [(None, None, True), ({}, None, True), ({"fleet": None}, None, True), ({"fleet": False}, None, False),
     ({"num_speculative_tokens": 0}, 0, True), ({"num_speculative_tokens": 3, "fleet": False}, 3, False)],
)  # fmt: skip
def test_what_a_request_says_of_speculation(asked: dict[str, object] | None, most: int | None, fleet: bool) -> None:
    sampling = completion(speculative=asked)[0].sampling
    assert (sampling.num_speculative_tokens, sampling.fleet) == (most, fleet)


def test_priority_is_any_small_integer() -> None:
    assert [completion(**fields)[0].priority for fields in ({}, {"priority": None}, {"priority": -3.0})] == [0, 0, -3]
    assert chat(priority=5).priority == 5


def test_a_seed_is_64_bits_and_shared_by_choices() -> None:
    assert completion(seed=-1)[0].sampling.seed == (1 << 64) - 1
    assert completion(seed=0)[0].sampling.seed == 0
    seeds = iter(range(10))
    request = parse(CompletionRequest, {"prompt": ["a", "b"], "n": 3})
    prepared = build_specs(request, TOKENIZER, LIMITS, draw_seed=lambda: next(seeds), now=NOW)
    assert [(p.sampling.seed, p.num_choices) for p in prepared] == [(0, 3), (1, 3)]


@pytest.mark.parametrize(("asked", "resolved"), [(0, 0.0), (1e-300, 0.0), (1e-3, 0.01), (0.7, 0.7), (2, 2.0)])
def test_temperatures_that_would_overflow_are_not_used(asked: float, resolved: float) -> None:
    assert completion(temperature=asked)[0].sampling.temperature == resolved


@pytest.mark.parametrize(("asked", "resolved"), [(-1, 0), (0, 0), (40, 40), (10**9, VOCAB)])
def test_top_k(asked: int, resolved: int) -> None:
    assert completion(top_k=asked)[0].sampling.top_k == resolved


def test_stop_ids_and_eos() -> None:
    assert completion(stop_token_ids=[5, EOS, 5])[0].sampling.stop_token_ids == (5, EOS)
    assert completion(stop_token_ids=[5], ignore_eos=True)[0].sampling.stop_token_ids == (5,)
    assert refused(completion, stop_token_ids=[1, VOCAB]).param == "stop_token_ids[1]"


def test_token_id_validation_of_logit_bias_keys() -> None:
    assert completion(logit_bias={"5": -100, "129": 1.5})[0].sampling.logit_bias == {5: -100.0, 129: 1.5}
    for key in ("999999999", "-1", "abc", "1.5", str(VOCAB), "", " 5", "+5", "05", "٥", "1e1", "9" * 5000):
        error = refused(completion, logit_bias={key: 5})
        assert error.param is not None and error.param.startswith("logit_bias.") and key[:20] in error.message
    assert refused(completion, logit_bias={str(i): 1 for i in range(100_000)}).param == "logit_bias"


def test_logprobs_of_both_shapes() -> None:
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).sampling.logprobs == 3
    assert chat(logprobs=False).sampling.logprobs is None
    for without in ({}, {"logprobs": False}, {"logprobs": None}):  # clients that always send all fields
        assert chat(top_logprobs=0, **without).sampling.logprobs is None
    assert completion(top_logprobs=0)[0].sampling.logprobs is None
    assert completion(logprobs=0)[0].sampling.logprobs == 0
    assert completion(logprobs=5)[0].sampling.logprobs == 5


@pytest.mark.parametrize(
    ("call", "fields", "param"),
    [
        (chat, {"top_logprobs": 3}, "top_logprobs"),
        (chat, {"top_logprobs": 1, "logprobs": False}, "top_logprobs"),
        (chat, {"n": 9}, "n"),
        (completion, {"n": 3, "prompt": ["a", "b", "c"]}, "n"),
        (completion, {"n": 3, "best_of": 2}, "best_of"),
        (completion, {"best_of": 2, "stream": True}, "best_of"),
        (completion, {"n": 2, "best_of": 9}, "best_of"),
        (completion, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (chat, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (chat, {"stream_options": {"include_usage": True}}, "stream_options"),
        (completion, {"allowed_token_ids": [1, VOCAB]}, "allowed_token_ids[1]"),
        (completion, {"bad_words": ["x", " "]}, "bad_words[1]"),
        (completion, {"prompt": ""}, None),
    ],
)
def test_fields_that_do_not_go_together(call: Any, fields: dict[str, Any], param: str | None) -> None:
    if param is None:
        assert call(**fields)[0].ids == [BOS]  # a text may be empty where BOS makes a prompt of it
    else:
        assert refused(call, **fields).param == param


def test_text_parameters() -> None:
    [prepared] = completion(
        stop=["b", "a", "b"],
        echo=True,
        stream=True,
        stream_options={"include_usage": True},
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        best_of=1,
    )
    assert prepared.text.model_dump() == {
        "api": "completions",
        "stop": ("b", "a"),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "echo": True,
        "stream": True,
        "include_usage": True,
        "continuous_usage": False,
        "num_shown": None,
        "hides_logprobs": False,
        "prompt_logprobs": None,
        "return_token_ids": False,
        "return_tokens_as_token_ids": False,
        "created": 1721995200,
        "system_fingerprint": "",
        "tool_format": "",
        "tool_names": (),
        "max_calls": None,
        "reasoning_format": "",
        "reasoning_begun": False,
        "include_reasoning": True,
    }


def test_words_and_tokens_that_limit_an_answer() -> None:
    rules = completion(allowed_token_ids=[65, 66], bad_words=["no", " yes"])[0].sampling.constraint
    assert rules is not None and rules.allowed_ids == (65, 66) and not rules.grammar
    assert rules.bad_words == tuple(tuple(word) for word in (b"no", b" no", b"yes", b" yes"))


def test_more_choices_than_are_shown_are_told_apart_by_log_probabilities() -> None:
    [best] = completion(n=2, best_of=5)
    assert (best.num_choices, best.text.num_shown, best.text.hides_logprobs, best.sampling.logprobs) == (5, 2, True, 0)
    [asked] = completion(best_of=5, logprobs=3)
    assert (asked.text.num_shown, asked.text.hides_logprobs, asked.sampling.logprobs) == (1, False, 3)
    [all_of_them] = completion(n=2, best_of=2)
    assert all_of_them.text.num_shown is None and all_of_them.sampling.logprobs is None


# --- /tokenize and /detokenize ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "hi"}, ids("hi")),
        ({"prompt": "<s>hi"}, ids("hi")),
        ({"prompt": "hi", "add_special_tokens": False}, list(b"hi")),
        ({"messages": ONE_MESSAGE}, ids("hello>")),
        ({"messages": ONE_MESSAGE, "add_generation_prompt": False}, ids("hello")),
        ({"messages": ONE_MESSAGE, "add_special_tokens": True}, [BOS, *ids("hello>")]),
        ({"messages": ONE_MESSAGE, "continue_final_message": True}, ids("hello")),
    ],
)
def test_tokenize(body: dict[str, Any], expected: list[int]) -> None:
    request = parse(TokenizeRequest, body)
    assert tokenize(request, TOKENIZER, rendered(request)) == expected


def test_tokenize_takes_one_of_the_two() -> None:
    for body in ({}, {"prompt": "x", "messages": ONE_MESSAGE}):
        with pytest.raises(BadRequest):
            conversation(parse(TokenizeRequest, body), TOKENIZER)


def test_detokenize() -> None:
    assert detokenize(parse(DetokenizeRequest, {"tokens": [104, 105, EOS]}), TOKENIZER) == "hi<e>"
    assert detokenize(parse(DetokenizeRequest, {"tokens": []}), TOKENIZER) == ""
    with pytest.raises(BadRequest) as e:
        detokenize(parse(DetokenizeRequest, {"tokens": [104, VOCAB]}), TOKENIZER)
    assert e.value.param == "tokens[1]"
