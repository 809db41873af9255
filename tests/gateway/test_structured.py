"""What a client asks an answer to be, as a grammar; and what it cannot ask, by name."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway import structured
from services.gateway.errors import BadRequest
from services.gateway.openai_schema import CompletionRequest
from services.gateway.request_parsing import parse
from services.gateway.structured import Wanted


def wanted(**fields: Any) -> Wanted | None:
    return structured.wanted(parse(CompletionRequest, {"prompt": "x"} | fields))


def by_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        wanted(**fields)
    return caught.value


def test_what_is_not_asked_for() -> None:
    assert (
        wanted() is None and wanted(response_format={"type": "text"}) is None and wanted(response_format=None) is None
    )


@pytest.mark.parametrize("keyword", ["contains", "uniqueItems", "minItem", "$dynamicRef", "$recursiveRef", "foo"])
def test_a_keyword_that_cannot_be_kept_is_named_with_its_place(keyword: str) -> None:
    inner: dict[str, Any] = {"type": "array", keyword: {"type": "string"}}
    at = "response_format.json_schema.schema"
    for schema, path in (
        (inner, f"{at}.{keyword}"),
        ({"properties": {"a": inner}}, f"{at}.properties.a.{keyword}"),
        ({"anyOf": [True, {"items": inner}]}, f"{at}.anyOf[1].items.{keyword}"),
        ({"$defs": {"d": inner}}, f"{at}.$defs.d.{keyword}"),
    ):
        error = refused(**by_schema(schema))
        assert (error.param, error.code) == (path, "unsupported_schema") and keyword in error.message
    assert refused(structured_outputs={"json": inner}).param == f"structured_outputs.json.{keyword}"


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    assert wanted(**by_schema({"properties": {"not": {"type": "string"}}, "required": ["not"]}))


def test_annotations_change_nothing() -> None:
    noted = {"type": "integer", "title": "T", "description": "d", "default": 1, "examples": [1], "uniqueItems": False}
    assert wanted(**by_schema(noted))


def test_formats_that_are_known() -> None:
    assert wanted(**by_schema({"type": "string", "format": "date-time"}))
    assert refused(**by_schema({"format": "uri-template"})).param == "response_format.json_schema.schema.format"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "json_schema": {"name": "n"}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        (by_schema(3), "response_format.json_schema.schema"),
        (by_schema(False), "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "%llguidance {}\nstart: A"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"guided_json": {}}, "guided_json"),
    ],
)
def test_what_cannot_be_asked(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_a_schema_has_a_bound() -> None:
    assert refused(**by_schema({"enum": ["x" * 70_000]})).param == "response_format.json_schema.schema"
    assert wanted(**by_schema({"description": "x" * 200_000}))
    assert refused(**by_schema({"description": "x" * 300_000})).param == "response_format.json_schema.schema"
