"""What one API key may use, as its clients see it, at any gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from services.gateway.admission import rate_limit_headers
from shared.records import RequestRecord
from shared.scripts import Admission, KeyLimits
from tests.gateway.conftest import Served
from tests.helpers import wait_until

Serve = Callable[..., Awaitable[Served]]
BODY = {"prompt": "12345", "max_tokens": 3}
ALICE, BOB = ({"Authorization": f"Bearer {name}"} for name in ("alice", "bob"))
KEYS = {"api_keys": ["alice", "bob"]}


def abc(_: RequestRecord, __: int) -> bytes:
    return b"abc"


async def ask(served: Served, headers: dict[str, str], **fields: Any) -> tuple[int, str, aiohttp.ClientResponse]:
    status, body, response = await served.post("/v1/completions", BODY | fields, headers=headers)
    return status, body.get("error", {}).get("code", ""), response


async def test_headers_say_what_is_left_as_openai_s_do(serve_with: Serve, answering: Callable[..., None]) -> None:
    answering(abc)
    served = await serve_with(requests_per_minute_per_key=3, tokens_per_minute_per_key=60, **KEYS)
    _, _, response = await ask(served, ALICE)
    head = {k.lower(): v for k, v in response.headers.items() if k.lower().startswith("x-ratelimit")}
    assert head == {
        "x-ratelimit-limit-requests": "3", "x-ratelimit-remaining-requests": "2", "x-ratelimit-reset-requests": "20s",
        "x-ratelimit-limit-tokens": "60", "x-ratelimit-remaining-tokens": "54", "x-ratelimit-reset-tokens": "6s",
    }  # fmt: skip
    _, _, response = await ask(served, ALICE, stream=False)
    left = int(response.headers["x-ratelimit-remaining-tokens"])
    assert 45 <= left <= 47, "prompts of 6 tokens, the 3 that were drawn, and what a moment has brought"


async def test_over_the_rate_a_key_waits_as_long_as_it_is_told(
    serve_with: Serve, answering: Callable[..., None]
) -> None:
    answering(abc)
    served = await serve_with(requests_per_minute_per_key=2, **KEYS)
    other_gateway = await serve_with(requests_per_minute_per_key=2, **KEYS)
    assert [(await ask(g, ALICE))[0] for g in (served, other_gateway)] == [200, 200]
    status, code, response = await ask(served, ALICE)
    assert (status, code) == (429, "rate_limit_exceeded")
    assert 25 <= int(response.headers["Retry-After"]) <= 30
    assert response.headers["x-ratelimit-remaining-requests"] == "0"
    assert (await ask(other_gateway, BOB))[0] == 200


async def test_open_requests_of_a_key_are_counted_over_gateways(serve_with: Serve) -> None:
    gateways = [await serve_with(max_concurrency_per_key=2, **KEYS) for _ in range(2)]
    open_ones = [asyncio.ensure_future(ask(g, ALICE)) for g in gateways]
    sids = await wait_until(lambda: two_queued(gateways[0]))
    status, code, response = await ask(gateways[0], ALICE)
    assert (status, code, response.headers["Retry-After"]) == (429, "concurrency_limit_exceeded", "1")
    bob = asyncio.ensure_future(ask(gateways[1], BOB))
    await wait_until(lambda: queued(gateways[0], 3))
    await gateways[0].worker.place(sids[0])
    await gateways[0].worker.commit(sids[0], b"abc", "length")
    again = asyncio.ensure_future(ask(gateways[1], ALICE))
    await wait_until(lambda: queued(gateways[0], 3))
    for task in (*open_ones, bob, again):
        task.cancel()
    await asyncio.gather(*open_ones, bob, again, return_exceptions=True)


async def two_queued(served: Served) -> list[str]:
    found = await served.worker.queued()
    return found if len(found) == 2 else []


async def queued(served: Served, number: int) -> bool:
    return len(await served.worker.queued()) == number


@pytest.mark.parametrize(
    ("ms", "text"), [(0, "0ms"), (20, "20ms"), (1000, "1s"), (1500, "1.5s"), (60_000, "1m0s"), (360_250, "6m0.25s")]
)
def test_times_are_written_as_openai_writes_them(ms: int, text: str) -> None:
    admission = Admission("ok", 1, requests_reset_ms=ms, key_limits=KeyLimits(requests_per_minute=1))
    assert rate_limit_headers(admission)["x-ratelimit-reset-requests"] == text


def test_a_limit_that_is_not_set_is_not_spoken_of() -> None:
    assert rate_limit_headers(Admission("ok", 1)) == {}
