"""How long the parts of a request may take: who may say it, and what the client is told when they take longer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from services.gateway.deadlines import HEADER, time_limits
from services.gateway.errors import BadRequest
from services.gateway.openai_schema import CompletionRequest
from services.gateway.request_parsing import parse
from shared.protocol import TimeLimits
from shared.settings import GatewaySettings, LimitSettings
from tests.gateway.conftest import Served
from tests.helpers import wait_until

Serve = Callable[..., Awaitable[Served]]
SERVER = GatewaySettings(request_timeout_s=60)
LIMITS = LimitSettings(queue_timeout_s=5, inter_token_timeout_s=2)
BODY = {"prompt": "hello", "max_tokens": 4}


def limits_of(timeout: Any = None, header: str | None = None) -> TimeLimits:
    request = parse(CompletionRequest, {"prompt": "x", "timeout": timeout})
    return time_limits(SERVER, LIMITS, {} if header is None else {HEADER: header}, request.timeout)


def test_the_server_s_hold_where_nothing_is_asked() -> None:
    assert limits_of() == TimeLimits(queue_ms=5000, first_token_ms=0, inter_token_ms=2000, total_ms=60_000)


def test_a_client_can_shorten_each_and_lengthen_none() -> None:
    asked = {"queue": 1, "first_token": 3.5, "inter_token": 20, "total": 10}
    assert limits_of(asked) == TimeLimits(queue_ms=1000, first_token_ms=3500, inter_token_ms=2000, total_ms=10_000)
    assert limits_of(7).total_ms == 7000 and limits_of(70).total_ms == 60_000
    assert limits_of(header="0.25").total_ms == 250 and limits_of(7, header="9").total_ms == 7000


def test_a_time_below_a_millisecond_is_not_taken_for_none() -> None:
    limits = limits_of({"queue": 1e-9, "first_token": 0.0004, "inter_token": 0.0001, "total": 0.0004})
    assert limits == TimeLimits(queue_ms=1, first_token_ms=1, inter_token_ms=1, total_ms=1)


@pytest.mark.parametrize("header", ["", "0", "-1", "1s", "nan", "inf", "1e3", " 1", "86401", "1" * 400])
def test_a_header_that_is_no_time_is_refused_by_name(header: str) -> None:
    with pytest.raises(BadRequest) as refused:
        limits_of(header=header)
    assert refused.value.param == HEADER


@pytest.mark.parametrize("timeout", [0, -1, True, "1", [1], {"total": 0}, {"queue": "1"}, 86401])
def test_a_field_that_is_no_time_is_refused_by_name(timeout: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        limits_of(timeout)
    assert refused.value.param and refused.value.param.startswith("timeout")


async def ask(served: Served, **fields: Any) -> tuple[int, str, float]:
    began = asyncio.get_running_loop().time()
    status, body, _ = await served.post("/v1/completions", BODY | fields)
    return status, body["error"]["code"], asyncio.get_running_loop().time() - began


@pytest.mark.parametrize(
    ("timeout", "code"),
    [(0.2, "timeout"), ({"first_token": 0.2}, "first_token_timeout"), ({"queue": 0.2}, "queue_timeout")],
    ids=["total", "first token", "queue"],
)
async def test_without_a_first_token_in_time_the_request_ends(served: Served, timeout: Any, code: str) -> None:
    status, said, took_s = await ask(served, timeout=timeout)
    assert (status, said) == (504, code) and took_s >= 0.2
    await wait_until(lambda: nothing_queued(served))


async def nothing_queued(served: Served) -> bool:
    return await served.worker.queued() == []


async def test_a_pause_between_tokens_ends_a_stream_with_one_error_event(served: Served) -> None:
    body = BODY | {"stream": True, "timeout": {"inter_token": 0.3, "first_token": 5}}
    asking = asyncio.ensure_future(read_all(served, body))
    [sid] = await wait_until(served.worker.queued)
    await served.worker.place(sid)
    for token in b"ab":
        await asyncio.sleep(0.2)  # each within the limit, together beyond it
        await served.worker.commit(sid, [token])
    text = await asking
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert [e["choices"][0]["text"] for e in events[:-1]] == ["a", "b"]
    assert events[-1]["error"]["code"] == "inter_token_timeout" and "[DONE]" not in text
    record = await wait_until(lambda: ended(served, sid))
    assert b"inter_token_timeout" in record


async def read_all(served: Served, body: dict[str, Any]) -> str:
    async with served.session.post(served.url + "/v1/completions", json=body) as response:
        return (await response.read()).decode()


async def ended(served: Served, sid: str) -> bytes:
    record = await served.worker.records.sequence(sid)
    assert record is not None
    return record.outcome if record.state == "done" else b""


async def test_deadlines_are_in_the_record_in_redis_time(served: Served) -> None:
    asking = asyncio.ensure_future(ask(served, timeout={"first_token": 30, "queue": 20}))
    [sid] = await wait_until(served.worker.queued)
    seconds, _ = await served.worker.redis.time()
    deadlines = await served.worker.records.deadlines(sid.rpartition(".")[0])
    assert 28 <= deadlines.first_by_ms / 1000 - seconds <= 31 and 598 <= deadlines.end_by_ms / 1000 - seconds <= 601
    await served.worker.fail(sid, "queue_timeout", "said by a scheduler")
    status, code, _ = await asking
    assert (status, code) == (504, "queue_timeout")


async def test_a_grammar_that_fails_on_the_way_is_the_clients_fault(served: Served) -> None:
    asking = asyncio.ensure_future(ask(served))
    [sid] = await wait_until(served.worker.queued)
    await served.worker.fail(sid, "grammar_too_complex", "structured output: the grammar is too complex")
    status, code, _ = await asking
    assert (status, code) == (400, "grammar_too_complex")
