"""Every field of every route with every kind of value, as the handlers read it, and nothing else of the gateway."""

from __future__ import annotations

import collections
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from unittest.mock import MagicMock

import pytest

from services.gateway import app, byte_tokenizer, chat_template, json_reader, openapi, preparation
from services.gateway import openai_schema as ask
from services.gateway.dialect import dialect_of
from services.gateway.errors import ApiError, error_body
from services.gateway.forms import form_of, template_options
from services.gateway.request_parsing import parse
from tests.gateway.bad_fields import Case, cases, check_verdict

LIMITS = preparation.Limits(max_model_len=2048, pool_tokens=8192)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
TOKENIZER = byte_tokenizer.byte_tokenizer()
DIALECT = dialect_of(TOKENIZER)
ROUTES = app.route_table(MagicMock(), MagicMock(), MagicMock())


def generate(cls: type[ask.Request]) -> Callable[[Any], Any]:
    def prepare(body: Any) -> Any:
        request = parse(cls, body)
        assert isinstance(request, ask.ChatCompletionRequest | ask.CompletionRequest)
        text = rendered(request)
        form = form_of(request, DIALECT)
        return preparation.build_specs(
            request, TOKENIZER, LIMITS, draw_seed=lambda: 1, now=NOW, chat_text=text, form=form
        )

    return prepare


def rendered(request: ask.Request) -> str:
    messages = preparation.conversation(request, TOKENIZER)
    template = TOKENIZER.chat_template
    if messages is None or template is None:
        return ""
    assert isinstance(request, ask.ChatCompletionRequest | ask.TokenizeRequest)
    options = template_options(request, DIALECT)
    return chat_template.render(template, messages, now=NOW, special_tokens=TOKENIZER.template_tokens, **options)


def tokenize(body: Any) -> Any:
    request = parse(ask.TokenizeRequest, body)
    return preparation.tokenize(request, TOKENIZER, rendered(request))


READERS: dict[str, Callable[[Any], Any]] = {
    "chat": generate(ask.ChatCompletionRequest),
    "completions": generate(ask.CompletionRequest),
    "tokenize": tokenize,
    "detokenize": lambda body: preparation.detokenize(parse(ask.DetokenizeRequest, body), TOKENIZER),
}


def read(route: openapi.Route, case: Case) -> tuple[int, Any]:
    try:
        READERS[route.name](json_reader.loads(case.body))
    except ApiError as e:
        return e.status, error_body(e)["error"]
    return 200, None


@pytest.mark.parametrize("route", [r for r in ROUTES if r.body], ids=lambda route: route.name)
def test_every_field_with_every_kind_of_value(route: openapi.Route) -> None:
    """A route with a body needs a reader above, and is covered by that."""
    document = openapi.document([route], version="1", public=(), secured=False)
    counts: collections.Counter[int] = collections.Counter()
    wrong = []
    for case in cases(document):
        status, error = read(route, case)
        counts[status] += 1
        try:
            check_verdict(case, status, error)
        except AssertionError as e:
            wrong.append(str(e))
    assert not wrong, (len(wrong), wrong[:20])
    assert counts[200] > 10 and counts[400] > 50, counts
    assert {case.field for case in cases(document)} >= set(route.body.model_fields if route.body else ())
