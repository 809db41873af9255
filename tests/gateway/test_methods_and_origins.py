"""Methods that a route has not, browsers that ask from elsewhere, and what the official client makes of errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import openai
import pytest

from tests.gateway.conftest import MODEL, Served
from tests.helpers import wait_until

Serve = Callable[..., Awaitable[Served]]
ASKS = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}


@pytest.mark.parametrize("path", ["/health", "/health/live", "/v1/models", f"/v1/models/{MODEL}", "/metrics", "/"])
async def test_head_is_get_without_a_body(served: Served, path: str) -> None:
    async with served.session.head(served.url + path) as response:
        assert response.status == 200 and await response.read() == b""
        assert int(response.headers["Content-Length"]) > 0
    async with served.session.head(served.url + "/nowhere") as response:
        assert response.status == 404 and response.content_type == "application/json"


@pytest.mark.parametrize("method", ["OPTIONS", "PUT", "PATCH", "DELETE", "TRACE"])
async def test_other_methods_are_405_and_say_which_are_allowed(served: Served, method: str) -> None:
    async with served.session.request(method, served.url + "/v1/models") as response:
        assert response.status == 405
        assert {m.strip() for m in response.headers["Allow"].split(",")} == {"GET", "HEAD"}
        error = (await response.json())["error"]
        assert error == {
            "message": "the path does not allow this method", "type": "invalid_request_error", "param": None,
            "code": "method_not_allowed",
        }  # fmt: skip


async def test_a_browser_may_ask_from_a_configured_origin_only(serve_with: Serve) -> None:
    served = await serve_with(cors_origins=("https://app.example",), api_keys=("k",))
    url = served.url + "/v1/chat/completions"
    async with served.session.options(url, headers=ASKS) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == "https://app.example"
        assert response.headers["Vary"] == "Origin"
        allowed = response.headers["Access-Control-Allow-Headers"].lower()
        assert all(name in allowed for name in ("authorization", "content-type", "idempotency-key", "last-event-id"))
        assert "POST" in response.headers["Access-Control-Allow-Methods"]
    async with served.session.post(url, headers={"Origin": "https://app.example"}) as response:
        assert response.status == 401, "the question needs no key, the call does"
        assert response.headers["Access-Control-Allow-Origin"] == "https://app.example", "so that it can be read"
    for origin in ("https://evil.example", "https://app.example.evil", "null", ""):
        async with served.session.options(url, headers=ASKS | {"Origin": origin}) as response:
            assert response.status in (401, 405) and "Access-Control-Allow-Origin" not in response.headers


async def test_no_origin_may_by_default_and_any_with_a_star(serve_with: Serve) -> None:
    served = await serve_with()
    async with served.session.options(served.url + "/v1/models", headers=ASKS) as response:
        assert response.status == 405 and "Access-Control-Allow-Origin" not in response.headers
    served = await serve_with(cors_origins=("*",))
    async with served.session.get(served.url + "/v1/models", headers={"Origin": "https://x.example"}) as response:
        assert response.headers["Access-Control-Allow-Origin"] == "*"


async def test_the_official_client_raises_what_people_catch(serve_with: Serve) -> None:
    served = await serve_with(api_keys=("k",), max_queued_requests=1, max_body_bytes=4096)

    async def fails(
        kind: type[openai.APIStatusError], status: int, code: str | None, key: str = "k", **body: object
    ) -> None:
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key=key, max_retries=0) as client:
            with pytest.raises(kind) as caught:
                await client.completions.create(**({"model": MODEL, "prompt": "x"} | body))  # type: ignore[call-overload]
            assert type(caught.value) is kind and caught.value.status_code == status
            assert code is None or caught.value.code == code

    await fails(openai.BadRequestError, 400, None, temperature=3)
    await fails(openai.AuthenticationError, 401, "invalid_api_key", key="other")
    await fails(openai.NotFoundError, 404, "model_not_found", model="other")
    await fails(openai.APIStatusError, 413, "body_too_large", prompt="x" * 5000)
    again = {"Idempotency-Key": "one"}
    first = asyncio.ensure_future(
        served.post(
            "/v1/completions", {"prompt": "x"}, headers=again | {"Authorization": "Bearer k", "X-Headrace-Resume": "0"}
        )
    )
    await wait_until(served.worker.queued)
    await fails(openai.UnprocessableEntityError, 422, "idempotency_key_reused", prompt="y", extra_headers=again)
    await fails(openai.RateLimitError, 429, "queue_full")
    await served.worker.leave()
    await wait_until(lambda: not served.service.fleet.workers)
    await fails(openai.InternalServerError, 503, "no_worker")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
