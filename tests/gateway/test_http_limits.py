"""What a client may send: each bound of size, time and form, and answers that tell nothing of the inside."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from services.gateway import body, http_server
from shared.wire import pack_ids
from tests.gateway.conftest import MODEL, Served
from tests.gateway.fake_worker import PROMPT, spec
from tests.gateway.raw_client import RawClient
from tests.helpers import wait_until

Serve = Callable[..., Awaitable[Served]]
ORDINARY = {"prompt": "ok", "max_tokens": 2}
INSIDE = ("Error", "Exception", "Traceback", "aiohttp", "redis", "pydantic", "python", ".py", "0x", "services")


def check_error(status: int, answer: Any, expected_status: int, param: str | None = None) -> None:
    assert status == expected_status, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["message"]
    assert not [word for word in INSIDE if word in json.dumps(answer)]
    if param is not None:
        assert answer["error"]["param"] == param


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/models/nobody", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/version", 405),
        ("GET", "//v1/models", 404),
        ("POST", "/v1/completions/", 404),
    ],
)
async def test_paths_and_methods_that_do_not_exist(served: Served, method: str, path: str, status: int) -> None:
    async with served.session.request(method, served.url + path) as response:
        check_error(response.status, await response.json(), status)
        assert response.headers["Server"] == "headrace"
        assert (status != 405) or response.headers["Allow"]


BAD_BODIES: list[tuple[bytes, str | None]] = [
    (b"", None),
    (b"{", None),
    (b"[1]", None),
    (b"\xff\xfe", None),
    (b'{"prompt": NaN}', None),
    (b'{"prompt": "x", "prompt": "y"}', "prompt"),
    (b'{"prompt": "x \\ud83d y"}', "prompt"),
    (b'{"prompt": ' + b"[" * 200_000, None),
    (b'{"prompt": "x", "max_tokens": -1}', "max_tokens"),
    (b'{"prompt": "x", "n": 1000}', "n"),
    (b'{"prompt": [-1]}', "prompt[0]"),
    (b'{"prompt": [1, 99999]}', "prompt[1]"),
    (b'{"prompt": "x", "min_tokens": 100000000, "max_tokens": null}', "min_tokens"),
    (b'{"prompt": "x", "logit_bias": {"999999": 1}}', "logit_bias.999999"),
    (b'{"prompt": "x", "temperature": 1e999}', None),
    (b'{"prompt": "' + b"x" * 2000 + b'"}', "prompt"),
    (b'{"prompt": "x", "stream": 1}', "stream"),
    (b'{"prompt": "x", "top_logprobs_typo": 1, "user": 7}', "user"),
]


@pytest.mark.parametrize(("data", "param"), BAD_BODIES, ids=lambda value: str(value)[:40])
async def test_a_bad_body_is_one_400_and_harms_nobody(
    served: Served, answering: Callable[..., None], data: bytes, param: str | None
) -> None:
    answering(lambda request, choice: list(b"yes"))
    async with served.session.post(served.url + "/v1/completions", data=data) as response:
        check_error(response.status, await response.json(), 400, param)
    status, answer, _ = await served.post("/v1/completions", ORDINARY)
    assert (status, answer["choices"][0]["text"]) == (200, "ye")


async def test_a_prompt_that_can_never_fit_is_refused_with_the_real_number(serve_with: Serve) -> None:
    served = await serve_with()
    served.worker.member = served.worker.member.model_copy(update={"num_blocks": 8, "max_model_len": 512})
    await served.worker.join()
    await wait_until(lambda: served.service.fleet.limits(1).max_tokens == 128)
    status, answer, _ = await served.post("/v1/completions", {"prompt": [1] * 200, "max_tokens": 8})
    check_error(status, answer, 400, "prompt")
    assert "128" in answer["error"]["message"]
    assert await served.worker.queued() == []


async def endless(num_parts: int) -> AsyncIterator[bytes]:
    for _ in range(num_parts):
        yield b"x" * 1024


@pytest.mark.parametrize("says_length", [True, False])
async def test_a_body_too_large_is_refused_with_or_without_a_length(serve_with: Serve, says_length: bool) -> None:
    served = await serve_with(max_body_bytes=4096)
    data = b"x" * 8192 if says_length else endless(64)
    async with served.session.post(served.url + "/v1/completions", data=data) as response:
        check_error(response.status, await response.json(), 413)
    async with served.session.post(served.url + "/tokenize", data=b'{"prompt": "' + b"x" * 4000 + b'"}') as response:
        assert response.status == 200


async def test_a_compressed_body_is_not_unpacked(served: Served) -> None:
    data = gzip.compress(json.dumps(ORDINARY).encode())
    async with served.session.post(
        served.url + "/v1/completions", data=data, headers={"Content-Encoding": "gzip"}
    ) as response:
        check_error(response.status, await response.json(), 415)


async def test_a_slow_body_is_given_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.05)
    client = await RawClient.connect(served)
    client.writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert (await client.reader.readline()).startswith(b"HTTP/1.1 408")
    client.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Big: " + b"x" * 20_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
    ids=["big header", "big path", "many headers", "tls", "two lengths"],
)
async def test_what_is_no_http_is_one_400_without_a_traceback(
    served: Served, head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    client = await RawClient.connect(served)
    client.writer.write(head)
    answer = await asyncio.wait_for(client.reader.read(1 << 14), 5)
    assert answer.split(b" ", 2)[1] == b"400", answer
    check_error(400, json.loads(answer.partition(b"\r\n\r\n")[2]), 400)
    assert b"aiohttp" not in answer
    assert not [record for record in caplog.records if record.exc_info]
    client.close()


async def test_a_head_that_does_not_end_is_given_up(serve_with: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.1)
    served = await serve_with()
    client = await RawClient.connect(served)
    client.writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: ")
    assert await asyncio.wait_for(client.reader.read(), 5) == b""
    client.close()


async def test_no_worker_is_503_with_a_time_to_come_back(served: Served) -> None:
    await served.worker.leave()
    await wait_until(lambda: not served.service.fleet.workers)
    status, answer, response = await served.post("/v1/completions", ORDINARY)
    check_error(status, answer, 503)
    assert int(response.headers["Retry-After"]) >= 1
    status, answer, _ = await served.get("/health/ready")
    assert (status, answer) == (503, {"status": "no worker is alive"})
    status, _, _ = await served.get("/health/live")
    assert status == 200
    await served.worker.join()
    await wait_until(lambda: served.service.fleet.is_ready())
    status, answer, _ = await served.get("/health/ready")
    assert (status, answer) == (200, {"status": "ready"})


async def test_a_full_queue_is_429_with_a_time_to_come_back(serve_with: Serve) -> None:
    served = await serve_with(max_queued_requests=1)
    waiting = await served.worker.scripts.admit(
        [(spec(), pack_ids(PROMPT))], gateway="g-other", owner="", priority=0, max_requests=9, max_tokens=99,
        retention_ms=999,
    )  # fmt: skip
    assert waiting.status == "ok"
    status, answer, response = await served.post("/v1/completions", ORDINARY | {"stream": True})
    check_error(status, answer, 429)
    assert int(response.headers["Retry-After"]) >= 1
    assert served.service.inflight.requests == []


async def test_one_refused_prompt_takes_the_others_back(serve_with: Serve) -> None:
    served = await serve_with(max_queued_requests=2)
    status, answer, _ = await served.post("/v1/completions", {"prompt": ["a", "b", "c"]})
    check_error(status, answer, 429)
    await wait_until(lambda: nothing_queued(served))


async def nothing_queued(served: Served) -> bool:
    return await served.worker.queued() == []


async def test_a_request_that_takes_too_long_ends(serve_with: Serve) -> None:
    served = await serve_with(request_timeout_s=1)
    status, answer, _ = await served.post("/v1/completions", ORDINARY)
    check_error(status, answer, 504)
    assert answer["error"]["code"] == "timeout"
    await wait_until(lambda: nothing_queued(served))


async def test_a_failing_handler_is_one_500_that_tells_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("/secret/path")

    monkeypatch.setattr(served.service.fleet, "fingerprint", broken)
    status, answer, _ = await served.get("/version")
    check_error(status, answer, 500)
    assert "secret" not in json.dumps(answer)
    assert [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [("my-id-7", "my-id-7"), ("a b\tc\x7f", "abc"), ("x" * 200, "x" * 64), ("ünï", "n")],
)
async def test_a_clients_own_id_is_echoed_cleaned_and_cut(served: Served, sent: str, echoed: str) -> None:
    client = await RawClient.connect(served)
    client.writer.write(f"GET /health/live HTTP/1.1\r\nHost: x\r\nX-Request-Id: {sent}\r\n\r\n".encode())
    head = await client.reader.readuntil(b"\r\n\r\n")
    if b" 200 " in head:  # a control character may also be refused as bad HTTP
        assert f"X-Request-Id: {echoed}\r\n".encode() in head
    else:
        assert "\x7f" in sent
    client.close()


async def test_the_model_may_be_named_or_left_out(served: Served, answering: Callable[..., None]) -> None:
    answering(lambda request, choice: list(b"yes"))
    for extra in ({}, {"model": MODEL}, {"model": ""}, {"model": None}):
        status, _, _ = await served.post("/v1/completions", ORDINARY | extra)
        assert status == 200
    status, answer, _ = await served.post("/v1/completions", ORDINARY | {"model": "gpt-9"})
    check_error(status, answer, 404, "model")
