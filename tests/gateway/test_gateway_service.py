"""The gateway's process: how it starts and ends, and what outlasts Redis going away."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.gateway.service import CannotListen
from shared.embedded_redis import find_server, server_command, socket_path
from shared.runtime import EXIT_CONFIG
from tests.gateway.conftest import MODEL, Served
from tests.gateway.fake_worker import FakeWorker
from tests.helpers import free_port, wait_until

Serve = Callable[..., Awaitable[Served]]
BODY = {"prompt": "x", "max_tokens": 8, "stream": True}


async def first_line(response: aiohttp.ClientResponse) -> dict[str, Any]:
    async for line in response.content:
        if line.startswith(b"data: {"):
            event: dict[str, Any] = json.loads(line[6:])
            return event
    raise AssertionError("no event")


async def test_an_address_in_use_is_one_sentence(serve_with: Serve) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(CannotListen, match=r"^cannot listen on 127\.0\.0\.1 port \d+: it is in use$"):
            await serve_with(port=taken.getsockname()[1])


async def test_open_responses_may_finish_while_new_work_is_refused(serve_with: Serve) -> None:
    served = await serve_with(drain_timeout_s=10)
    kept = aiohttp.ClientSession()
    async with kept, kept.get(served.url + "/health/ready") as response:
        assert response.status == 200
        await response.read()
        asking = asyncio.ensure_future(served.post("/v1/completions", {"prompt": "x", "max_tokens": 3}))
        [sid] = await wait_until(served.worker.queued)
        served.stop.set()
        await wait_until(lambda: refuses(served.url))
        async with kept.post(served.url + "/v1/completions", json=BODY) as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (503, "shutting_down")
            assert refused.headers["Connection"] == "close" and int(refused.headers["Retry-After"]) >= 1
        await served.worker.place(sid)
        await served.worker.commit(sid, list(b"abc"), "length")
        status, answer, _ = await asking
        assert (status, answer["choices"][0]["text"]) == (200, "abc")
    await wait_until(lambda: left(served))


async def refuses(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as session, session.get(url + "/health/live"):
            return False
    except aiohttp.ClientConnectorError:
        return True


async def left(served: Served) -> bool:
    return served.service.inflight.incarnation not in await served.worker.records.members()


async def test_what_does_not_finish_in_time_breaks_off_without_a_false_ending(serve_with: Serve) -> None:
    served = await serve_with(drain_timeout_s=0)
    responding = asyncio.ensure_future(served.session.post(served.url + "/v1/completions", json=BODY))
    [sid] = await wait_until(served.worker.queued)
    await served.worker.place(sid)
    await served.worker.commit(sid, [97])
    response = await responding
    served.stop.set()
    with pytest.raises(aiohttp.ClientError):
        await response.read()
    await wait_until(lambda: left(served))
    record = await served.worker.records.sequence(sid)
    assert record is not None
    assert (record.state, record.gateway) == ("placed", "")  # its client may go on at another gateway


async def test_a_second_signal_cuts_the_drain_short(serve_with: Serve) -> None:
    served = await serve_with(drain_timeout_s=600)
    responding = asyncio.ensure_future(served.session.post(served.url + "/v1/completions", json=BODY))
    [sid] = await wait_until(served.worker.queued)
    await served.worker.place(sid)
    await served.worker.commit(sid, [97])
    response = await responding
    served.stop.set()
    await wait_until(lambda: refuses(served.url))
    served.stop.set()
    with pytest.raises(aiohttp.ClientError):
        await response.read()
    await wait_until(lambda: left(served))


async def test_a_stream_outlasts_the_loss_of_the_gateways_own_stream(served: Served) -> None:
    responding = asyncio.ensure_future(served.session.post(served.url + "/v1/completions", json=BODY))
    [sid] = await wait_until(served.worker.queued)
    await served.worker.place(sid)
    await served.worker.commit(sid, list(b"ab"))
    async with await responding as response:
        key = served.worker.scripts.key(f"out:{served.service.inflight.incarnation}")
        await served.worker.redis.delete(key)
        await served.worker.commit(sid, list(b"cd"))
        await served.worker.commit(sid, list(b"efgh"), "length")
        lines = (await response.text()).splitlines()
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(c["choices"][0]["text"] for c in chunks) == "abcdefgh"


async def start_redis(folder: Path) -> asyncio.subprocess.Process:
    server = find_server()
    command = server_command(server, folder, socket_path(folder), append_only=True)
    return await asyncio.create_subprocess_exec(*command)


async def test_a_stream_outlasts_a_killed_redis(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    redis, url = await start_redis(folder), f"unix://{socket_path(folder)}"
    await wait_until(lambda: socket_path(folder).exists())
    port = free_port()
    gateway = await start_gateway(url, port)
    worker = FakeWorker(url, MODEL)
    try:
        await wait_until(lambda: answers(worker))
        await worker.join()
        base = f"http://127.0.0.1:{port}"
        await wait_until(lambda: is_ready(base), 20)
        async with aiohttp.ClientSession() as session:
            responding = asyncio.ensure_future(session.post(base + "/v1/completions", json=BODY))
            [sid] = await wait_until(worker.queued)
            await worker.place(sid)
            await worker.commit(sid, list(b"ab"))
            async with await responding as response:
                assert (await first_line(response))["choices"][0]["text"] == "ab"
                redis.kill()
                await redis.wait()
                redis = await start_redis(folder)
                await wait_until(lambda: answers(worker))
                await worker.commit(sid, list(b"cdefgh"), "length")
                text = await response.text()
            assert '"text":"cdefgh"' in text
            assert text.endswith("data: [DONE]\n\n")
            gateway.send_signal(signal.SIGTERM)
            _, stderr = await asyncio.wait_for(gateway.communicate(), 10)
            assert gateway.returncode == 0
            assert b"Traceback" not in stderr, stderr.decode()
    finally:
        await worker.close()
        for process in (gateway, redis):
            if process.returncode is None:
                process.kill()
                await process.wait()


async def answers(worker: FakeWorker) -> bool:
    try:
        return bool(await worker.redis.ping())
    except Exception:
        return False


async def is_ready(base: str) -> bool:
    try:
        async with aiohttp.ClientSession() as session, session.get(base + "/health/ready") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def start_gateway(url: str, port: int, **settings: str) -> asyncio.subprocess.Process:
    environ = {
        "PATH": "/usr/bin:/bin", "HEADRACE_REDIS_URL": url, "HEADRACE_MODEL": "scripted", "HEADRACE_PORT": str(port),
        "HEADRACE_SERVED_MODEL_NAME": MODEL,
    }  # fmt: skip
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gateway", env=environ | settings, stderr=asyncio.subprocess.PIPE
    )


async def test_settings_that_cannot_be_used_are_one_sentence_and_status_78() -> None:
    gateway = await start_gateway("redis://127.0.0.1:1", free_port(), HEADRACE_HOST="0.0.0.0")
    _, stderr = await gateway.communicate()
    assert gateway.returncode == EXIT_CONFIG
    assert b"--no-auth" in stderr
    assert stderr.count(b"\n") == 1


async def test_a_model_that_is_not_there_is_one_sentence_and_status_78() -> None:
    gateway = await start_gateway("redis://127.0.0.1:1", free_port(), HEADRACE_MODEL="/nowhere/model.gguf")
    _, stderr = await gateway.communicate()
    assert gateway.returncode == EXIT_CONFIG
    assert b"there is no model" in stderr
    assert b"Traceback" not in stderr
