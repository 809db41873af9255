"""What holds up a gateway's event loop: nothing that a client can send; and what does is named, and ends with it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services import modules
from tests.e2e.clients import Client, Connect
from tests.e2e.load import plain, words
from tests.e2e.stack import NewStack, Stack
from tests.figures import note
from tests.helpers import wait_until

log = logging.getLogger(__name__)

MIB = 1 << 20
BLOCK_S = 2.0
BLOCKED_GATEWAY = f"""
import runpy, sys, time
from services.gateway.pages import PageRoutes
def a_blocking_handler():
    time.sleep({BLOCK_S})
version = PageRoutes.version
async def block(self, request):
    a_blocking_handler()
    return await version(self, request)
PageRoutes.version = block
sys.argv = ["gateway"]
runpy.run_module("services.gateway", run_name="__main__")
"""


def gauge(stack: Stack, name: str) -> float:
    return stack.state.gauges("gateway", stack.process("gateway").incarnation).get(name, 0.0)


async def test_a_blocked_loop_is_named_and_its_streams_go_on(
    new_stack: NewStack, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = modules.command

    def with_hook(module: str, *args: str) -> list[str]:
        return [sys.executable, "-c", BLOCKED_GATEWAY] if module == "services.gateway" else command(module, *args)

    monkeypatch.setattr(modules, "command", with_hook)
    async with new_stack(env={"scripted_step_ms": 10}) as stack:
        client = connect(stack.url)
        stream = client.begin(plain("goes on", 600))
        await wait_until(lambda: any(s.num_tokens > 20 for s in stack.state.running()))
        status, _ = await client.get("/version")
        assert status == 200
        answer = await stream
        answer.check()
        assert answer.text == words("goes on", 600)
        note(pause_s=answer.longest_pause_s())
        assert BLOCK_S * 0.9 < answer.longest_pause_s() < BLOCK_S + 1.5
        await wait_until(lambda: gauge(stack, "headrace_event_loop_stalls_total") == 1)
        assert gauge(stack, "headrace_event_loop_lag_seconds_sum") > BLOCK_S * 0.9
        lines = [line for line in stack.process("gateway").text().splitlines() if "event loop has been blocked" in line]
        assert len(lines) == 1 and "by a_blocking_handler (" in lines[0] and "< block (" in lines[0], lines


async def pieces(head: bytes, piece: bytes, number: int, tail: bytes = b"") -> AsyncIterator[bytes]:
    """A body of no stated length."""
    yield head
    for _ in range(number):
        yield piece
    yield tail


def in_parts(fields: dict[str, Any]) -> AsyncIterator[bytes]:
    return pieces(json.dumps(fields).encode(), b"", 0)


HUGE: dict[str, tuple[AsyncIterator[bytes], str]] = {
    "1 GiB, of no stated length": (pieces(b'{"prompt":"', b"x" * MIB, 1024), "/v1/completions"),
    "a text of 50 MB": (pieces(b'{"prompt":"', b"x" * MIB, 50, b'"}'), "/v1/completions"),
    "one letter 200,000 times": (in_parts({"prompt": "a" * 200_000}), "/v1/completions"),
    "a million messages": (
        pieces(b'{"messages":[', b'{"role":"user","content":"x"},' * 1000, 1000, b"{}]}"), "/v1/chat/completions",
    ),
    "7 MB of messages": (
        pieces(b'{"messages":[', b'{"role":"user","content":"x"},' * 1000, 230, b"{}]}"), "/v1/chat/completions",
    ),
    "100,000 stop strings": (in_parts({"prompt": "x", "stop": ["y"] * 100_000}), "/v1/completions"),
}  # fmt: skip


async def test_nothing_huge_holds_up_a_neighbour(new_stack: NewStack, connect: Connect) -> None:
    async with new_stack(env={"scripted_step_ms": 10}) as stack:
        client = connect(stack.url)
        stream = client.begin(plain("neighbour", 1500))
        await wait_until(lambda: any(s.num_tokens > 20 for s in stack.state.running()))
        for name, (body, path) in HUGE.items():
            status = await status_of(client, path, body)
            assert status in (400, 413), (name, status)
        answer = await stream
        answer.check()
        assert answer.text == words("neighbour", 1500)
        note(neighbours_pause_s=answer.longest_pause_s())
        looks = gauge(stack, "headrace_event_loop_lag_seconds_count")
        await wait_until(lambda: gauge(stack, "headrace_event_loop_lag_seconds_count") > looks)
        gauges = stack.state.gauges("gateway", stack.process("gateway").incarnation)
        lags = {k: v for k, v in gauges.items() if k.startswith("headrace_event_loop_lag_seconds_bucket")}
        log.info("turns of the loop, by their length: %s", lags)
        assert gauges["headrace_event_loop_stalls_total"] == 0
        assert gauges["headrace_event_loop_lag_seconds_bucket{0.5}"] == gauges["headrace_event_loop_lag_seconds_count"]


async def status_of(client: Client, path: str, body: AsyncIterator[bytes]) -> int:
    """0 when the connection ended before the answer could be read, since most of the body had not been."""
    headers = {"Content-Type": "application/json"}
    try:
        async with client.session.post(client.url + path, data=body, headers=headers) as response:
            return response.status
    except ConnectionError:
        return 413
