"""The HTTP interface as a document: OpenAPI 3.1, made from the table of routes and the models. *Pure.*

A route cannot be served without what is said of it here, since both come from the same row.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

from aiohttp.typedefs import Handler
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from services.gateway import deadlines, resuming
from services.gateway.openai_schema import Request
from services.gateway.response_schema import Error

Json = dict[str, Any]

EVENT_STREAM = "text/event-stream"
GENERATING = (404, 408, 409, 410, 413, 415, 422, 429, 500, 503, 504)
TAKING_UP = (404, 409, 410, 429, 500, 503, 504)
READING = (404, 408, 413, 415, 500)
_REFERENCE = "#/components/schemas/{model}"
_JSON_SCHEMA_NAMES = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}


@dataclass(frozen=True, slots=True)
class Route:
    """A row of the table of routes. The path is aiohttp's, and the name is what `auth.PUBLIC_ROUTES` lists and
    metrics count.

    answer: what a 200 has in its body, a model or the media type of what is no JSON. events: the model of a server-sent
    event where the answer may be streamed. statuses: others that the handler gives. headers, queries: those it reads.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Handler
    name: str
    summary: str
    answer: type[BaseModel] | str
    body: type[Request] | None = None
    events: type[BaseModel] | None = None
    statuses: tuple[int, ...] = ()
    headers: tuple[Header, ...] = ()
    queries: tuple[Header, ...] = ()

    def __post_init__(self) -> None:
        if not self.summary:
            raise ValueError(f"{self.name} has no summary")


@dataclass(frozen=True, slots=True)
class Header:
    """A header that a route reads; one that is not right is ignored or refused as the description says."""

    name: str
    description: str
    schema: Json


RESUME = Header(
    resuming.RESUME, "seconds that generation goes on when the client has left", {"type": "string", "pattern": r"^\d+"}
)
REQUEST_TIMEOUT = Header(
    deadlines.HEADER, "seconds after which the request is ended, as `timeout` in the body",
    {"type": "string", "pattern": r"^(?=.*[1-9])[0-9]{1,6}(\.[0-9]{1,3})?$"},
)  # fmt: skip
IDEMPOTENCY_KEY = Header(
    resuming.IDEMPOTENCY_KEY, "calls with the same key and body have one answer",
    {"type": "string", "minLength": 1, "maxLength": resuming.MAX_KEY_CHARS},
)  # fmt: skip
LAST_EVENT_ID = Header(resuming.LAST_EVENT_ID, "the id of the last event that the client has", {"type": "string"})
AFTER = Header("after", f"as {resuming.LAST_EVENT_ID}, which counts where both are given", {"type": "string"})
CLIENT_ID = Header("X-Request-Id", "the caller's own name for the request, echoed and logged", {"type": "string"})


def document(routes: Sequence[Route], *, version: str, public: Collection[str], secured: bool) -> Json:
    """public: names of the routes that need no key. secured: whether the others do."""
    references, schemas = _schemas(routes)
    paths: Json = {}
    for route in routes:
        needs_key = secured and route.name not in public
        operation = _operation(route, references, needs_key)
        paths.setdefault(re.sub(r":[^}]*}", "}", route.path), {})[route.method.lower()] = operation
    components: Json = {"schemas": schemas, "responses": _error_responses(routes)}
    if secured:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": version, "description": "OpenAI's interface, and what lies around it"},
        "paths": paths,
        "components": components,
    }


class _Generator(GenerateJsonSchema):
    """Without titles, which only repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _schemas(routes: Sequence[Route]) -> tuple[dict[Any, Json], Json]:
    requests: list[type[BaseModel]] = [route.body for route in routes if route.body]
    answers = [model for route in routes for model in (route.answer, route.events) if not isinstance(model, str | None)]
    models: list[Any] = [(model, "validation") for model in requests]
    models += [(model, "serialization") for model in (*answers, Error)]
    references, found = models_json_schema(models, ref_template=_REFERENCE, schema_generator=_Generator)
    return {model: reference for (model, _), reference in references.items()}, _named(found["$defs"])


def _named(value: Any) -> Any:
    """Pydantic leaves a bound around a converted integer under its own name."""
    if isinstance(value, list):
        return [_named(item) for item in value]
    if not isinstance(value, dict):
        return value
    renamed = _JSON_SCHEMA_NAMES if value.get("type") == "integer" else {}
    return {renamed.get(key, key): _named(item) for key, item in value.items()}


def _operation(route: Route, references: dict[Any, Json], needs_key: bool) -> Json:
    operation: Json = {"operationId": route.name, "summary": route.summary, "parameters": _parameters(route)}
    if route.body:
        content = {"application/json": {"schema": references[route.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    responses: Json = {"200": _success(route, references)}
    for status in _statuses(route, needs_key):
        responses[str(status)] = {"$ref": f"#/components/responses/{status}"}
    operation["responses"] = responses
    operation["security"] = [{"key": []}] if needs_key else []
    return operation


def _parameters(route: Route) -> list[Json]:
    names = re.findall(r"{(\w+)", route.path)
    path: list[Json] = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
    headers = (CLIENT_ID, *route.headers)
    given = [("header", h) for h in headers] + [("query", q) for q in route.queries]
    return path + [
        {"name": h.name, "in": where, "description": h.description, "schema": h.schema} for where, h in given
    ]


def _success(route: Route, references: dict[Any, Json]) -> Json:
    if isinstance(route.answer, str):
        content: Json = {route.answer: {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": references[route.answer]}}
    if route.events:
        content[EVENT_STREAM] = {"schema": _event(references[route.events])}
    return {"description": "what was asked for", "content": content, "headers": _HEADERS}


def _event(data: Json) -> Json:
    said = "Each has such a value, the last says [DONE]. One with an Error is the end of a stream that could not go on."
    value = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    return {
        "type": "object",
        "description": said,
        "properties": {"id": {"type": "string"}, "data": {"anyOf": [value, {"const": "[DONE]"}]}},
        "required": ["data"],
    }


def _statuses(route: Route, needs_key: bool) -> list[int]:
    general = [400, *([401] if needs_key else [])]  # 400: what is no HTTP, or has too large a head
    return sorted({*general, *route.statuses})


def _error_responses(routes: Sequence[Route]) -> Json:
    content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model="Error")}}}
    responses: Json = {}
    for status in sorted({401, *(status for route in routes for status in _statuses(route, False))}):
        headers = dict(_HEADERS)
        if status in (429, 503):
            headers["Retry-After"] = {"description": "seconds", "schema": {"type": "integer", "minimum": 1}}
        responses[str(status)] = {"description": HTTPStatus(status).phrase, "content": content, "headers": headers}
    return responses


_HEADERS: Json = {
    "X-Request-Id": {"description": "the caller's own name, or one that was made here", "schema": {"type": "string"}}
}
