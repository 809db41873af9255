"""A gateway that runs out of file descriptors, or of connections, goes on with its streams and recovers."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from services import modules
from tests.e2e.clients import Connect
from tests.e2e.load import plain, words
from tests.e2e.stack import NewStack, Stack
from tests.figures import note
from tests.helpers import wait_until

NUM_CONNECTIONS = 200
NUM_FILES = 64


async def flood(stack: Stack, sockets: contextlib.ExitStack) -> None:
    """Connections that say nothing; the kernel takes them, whether the gateway does or not."""
    for _ in range(NUM_CONNECTIONS):
        sock = sockets.enter_context(socket.socket())
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", stack.process("gateway").port))


@pytest.mark.parametrize("bound", ["descriptors", "connections"])
async def test_streams_go_on_while_no_connection_can_be_accepted(
    bound: str, new_stack: NewStack, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bound == "descriptors":
        command = modules.command
        limited = ["sh", "-c", f'ulimit -n {NUM_FILES}; exec "$0" "$@"']

        def with_few(module: str, *args: str) -> list[str]:
            return [*(limited if module == "services.gateway" else []), *command(module, *args)]

        monkeypatch.setattr(modules, "command", with_few)
    env = {"scripted_step_ms": 10} | ({"max_connections": 20} if bound == "connections" else {})
    async with new_stack(env=env) as stack, contextlib.AsyncExitStack() as cleanup:
        sockets = cleanup.enter_context(contextlib.ExitStack())
        client = connect(stack.url)
        stream = client.begin(plain("goes on", 500))
        await wait_until(lambda: any(s.num_tokens for s in stack.state.running()))
        await flood(stack, sockets)
        refused = await client.ask(plain("one too many", 4), timeout=1)
        assert refused.broken or (refused.error and refused.error["code"] == "too_many_connections"), refused
        answer = await stream
        answer.check()
        assert answer.text == words("goes on", 500)
        note(pause_s=answer.longest_pause_s())
        sockets.close()

        async def recovered() -> bool:
            with contextlib.suppress(AssertionError):
                again = await client.ask(plain("again", 4))
                again.check()
                return again.text == words("again", 4)
            return False

        await wait_until(recovered, 15)
