"""Clients that stop reading are cut and cancelled, cost a bounded amount of memory, and delay nobody."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time

import psutil

from tests.e2e.clients import Connect
from tests.e2e.load import plain, words
from tests.e2e.stack import NewStack, Stack
from tests.figures import note
from tests.helpers import wait_until

NUM_SLOW = 50
SEND_TIMEOUT_S = 2
MAX_MIB = 64  # of 50 clients: of each 64 KiB to be sent, one piece of events, and 256 KiB of tokens
MAX_GAP_S = 0.5


async def never_reads(stack: Stack, number: int, sockets: contextlib.ExitStack) -> None:
    """A client with a small window that has asked for a megabyte of events."""
    body = json.dumps(plain(f"slow {number}", 1500, logprobs=5)).encode()
    sock = sockets.enter_context(socket.socket())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 13)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", stack.process("gateway").port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    await loop.sock_sendall(sock, head.encode() + body)


async def test_request_lifecycle_fifty_clients_that_stop_reading(new_stack: NewStack, connect: Connect) -> None:
    env = {
        "scripted_step_ms": 40, "max_num_seqs": 64, "scripted_num_blocks": 8192, "max_model_len": 2048,
        "send_timeout_s": SEND_TIMEOUT_S,
    }  # fmt: skip
    async with new_stack(env=env) as stack, contextlib.AsyncExitStack() as cleanup:
        sockets = cleanup.enter_context(contextlib.ExitStack())
        gateway = psutil.Process(stack.process("gateway").pid)
        client = connect(stack.url)
        (await client.ask(plain("warm", 50))).check()
        before = gateway.memory_info().rss
        for i in range(NUM_SLOW):
            await never_reads(stack, i, sockets)
        neighbour = client.begin(plain("neighbour", 400))
        most = 0

        def all_cut() -> bool:
            nonlocal most
            most = max(most, gateway.memory_info().rss - before)
            cut = stack.state.gauges("gateway", stack.process("gateway").incarnation)
            return cut.get("headrace_slow_clients_cut_total") == NUM_SLOW

        began = time.perf_counter()
        await wait_until(all_cut, 40)
        note(all_50_cut_s=time.perf_counter() - began, memory_MiB=most / (1 << 20))
        assert most < MAX_MIB << 20
        answer = await neighbour
        answer.check()
        assert answer.text == words("neighbour", 400)
        gap_s = answer.longest_pause_s(since=answer.event_times[0])
        note(neighbours_pause_s=gap_s)
        assert gap_s < MAX_GAP_S
        outcomes = [s.outcome.reason for s in stack.state.sequences() if s.outcome]
        assert outcomes.count("cancelled") == NUM_SLOW
