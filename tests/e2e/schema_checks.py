"""What is checked of each of schemathesis' cases besides its own checks; it loads this file by itself."""

from __future__ import annotations

from typing import Any

import schemathesis

from shared import scripted_vocab as vocab
from tests.gateway.bad_fields import FURTHER_RULES

ORDERS = (vocab.CRASH, vocab.HANG, vocab.RAISE, vocab.OOM)  # to the scripted engine: it fails, as it was told to
NUMBERS_AS_TEXT = ("X-Request-Timeout", "X-Headrace-Resume")  # of which a pattern cannot say the greatest


@schemathesis.hook
def filter_body(context: Any, body: Any) -> bool:
    """A generator that draws token ids comes upon these sooner or later."""
    prompt = body.get("prompt") if isinstance(body, dict) else None
    prompts = prompt if isinstance(prompt, list) else []
    return not any(order in (ids if isinstance(ids, list) else [ids]) for ids in prompts for order in ORDERS)


@schemathesis.check
def what_the_schema_allows_is_refused_only_by_further_rules(ctx: Any, response: Any, case: Any) -> None:
    if response.status_code != 400 or case.meta is None or not case.meta.generation.mode.is_positive:
        return
    error = response.json()["error"]
    if error["param"] in NUMBERS_AS_TEXT:
        return
    field = (error["param"] or "").split(".")[0].split("[")[0]
    if field not in FURTHER_RULES.get(case.operation.path, ()):
        raise AssertionError(f"valid by the schema, and refused: {error}")


@schemathesis.check
def a_refusal_names_a_field_of_the_request(ctx: Any, response: Any, case: Any) -> None:
    """Or none, where the body as such is wrong."""
    if response.status_code != 400 or not isinstance(case.body, dict):
        return
    error = response.json()["error"]
    field = (error["param"] or "").split(".")[0].split("[")[0]
    headers = case.headers or {}
    required = {"prompt", "messages", "tokens"} & FURTHER_RULES.get(case.operation.path, set())
    if field and field not in case.body and field not in required and (error["param"] not in headers):
        raise AssertionError(f"{error} names a field that was not sent")
