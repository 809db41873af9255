"""`/openapi.json`: complete, valid, and what answers really look like."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import jsonschema_rs
import pytest

from services.gateway import openapi
from services.gateway.response_schema import Status
from tests.gateway.conftest import MODEL, Served

Serve = Callable[..., Awaitable[Served]]
Json = dict[str, Any]
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
COMPLETION = {"prompt": "x", "max_tokens": 4}


@pytest.fixture
async def document(served: Served) -> Json:
    status, document, _ = await served.get("/openapi.json")
    assert status == 200
    return document  # type: ignore[no-any-return]


def validator(document: Json, schema: Json) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(schema | {"components": document["components"]})


def check(document: Json, schema: Json, value: Any) -> None:
    errors = [f"{e.instance_path}: {e.message}" for e in validator(document, schema).iter_errors(value)]
    assert not errors, (errors, value)


def answer_schema(document: Json, path: str, method: str, media_type: str = "application/json") -> Json:
    schema: Json = document["paths"][path][method]["responses"]["200"]["content"][media_type]["schema"]
    return schema if media_type == "application/json" else schema["properties"]["data"]["anyOf"][0]["contentSchema"]


async def test_every_path_that_is_served_is_described(served: Served, document: Json) -> None:
    served_paths = {
        (resource.canonical, route.method.lower())
        for resource in served.service.app.router.resources()
        for route in resource
        if route.method != "HEAD"
    }
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert served_paths == described | {("/openapi.json", "get")}
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    assert all(operation["summary"].endswith(".") for operation in operations)
    assert len({operation["operationId"] for operation in operations}) == len(operations)


def test_a_route_that_is_not_described_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="summary"):
        openapi.Route("GET", "/new", lambda _: None, "new", "", Status)  # type: ignore[arg-type]


async def test_the_document_is_valid_and_small(document: Json) -> None:
    assert document["openapi"] == "3.1.0"
    for schema in document["components"]["schemas"].values():
        jsonschema_rs.meta.validate(schema)

    def resolve(value: Any) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                node: Any = document
                for part in value["$ref"].removeprefix("#/").split("/"):
                    node = node[part]
            for item in value.values():
                resolve(item)
        elif isinstance(value, list):
            for item in value:
                resolve(item)

    resolve(document)
    assert len(json.dumps(document)) < 60_000


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/health/live", "/health/ready", "/version", "/"])
async def test_what_pages_say_is_what_is_described(served: Served, document: Json, path: str) -> None:
    status, answer, _ = await served.get(path)
    assert status == 200
    check(document, answer_schema(document, path, "get"), answer)


async def test_a_model_and_tokens_are_what_is_described(served: Served, document: Json) -> None:
    _, answer, _ = await served.get(f"/v1/models/{MODEL}")
    check(document, answer_schema(document, "/v1/models/{model}", "get"), answer)
    for body in ({"prompt": "x"}, {"messages": CHAT["messages"], "return_token_strs": True}):
        _, answer, _ = await served.post("/tokenize", body)
        check(document, answer_schema(document, "/tokenize", "post"), answer)
    _, answer, _ = await served.post("/detokenize", {"tokens": [1, 2]})
    check(document, answer_schema(document, "/detokenize", "post"), answer)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "n": 2}),
        ("/v1/completions", COMPLETION),
        ("/v1/completions", COMPLETION | {"logprobs": 0, "echo": False}),
        ("/v1/completions", COMPLETION | {"prompt": ["a", [1]][:1], "n": 2}),
    ],
)
async def test_answers_are_what_is_described(
    served: Served, document: Json, answering: Callable[..., None], path: str, body: Json
) -> None:
    answering(lambda request, choice: list(b"abcd"))
    status, answer, _ = await served.post(path, body)
    assert status == 200, answer
    check(document, answer_schema(document, path, "post"), answer)
    schema = answer_schema(document, path, "post", openapi.EVENT_STREAM)
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with served.session.post(served.url + path, json=body) as response:
        events = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: ")]
    assert len(events) > 4 and events[-1] == "[DONE]"
    for event in events[:-1]:
        check(document, schema, json.loads(event))


async def test_errors_are_what_is_described(served: Served, document: Json) -> None:
    schema = document["components"]["responses"]["400"]["content"]["application/json"]["schema"]
    for path, body in (("/v1/completions", {}), ("/tokenize", []), ("/nowhere", {}), ("/version", {})):
        status, answer, _ = await served.post(path, body)
        assert status >= 400
        check(document, schema, answer)


async def test_keys_are_asked_for_where_they_are(serve_with: Serve) -> None:
    served = await serve_with(api_keys=("k",))
    status, _, _ = await served.get("/openapi.json")
    assert status == 401
    _, document, _ = await served.get("/openapi.json", headers={"Authorization": "Bearer k"})
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            async with served.session.request(method, served.url + path) as response:
                assert (response.status == 401) == ("401" in operation["responses"]) == bool(operation["security"])
