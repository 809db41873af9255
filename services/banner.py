"""What `serve` shows once it can answer: the model, the device, the address and a line to copy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
from importlib.metadata import version

READY_TIMEOUT_S = 5.0
READY_POLL_S = 0.1
MAX_STATUS_LINE_BYTES = 1024


def reachable(host: str) -> str:
    """An address to call for one that is listened on."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


def url_of(host: str, port: int) -> str:
    host = reachable(host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def is_ready(host: str, port: int) -> bool:
    """Whether the gateway says that requests are answered; False also while nothing listens."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(READY_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(reachable(host), port, limit=MAX_STATUS_LINE_BYTES)
            try:
                writer.write(b"GET /health/ready HTTP/1.0\r\nHost: localhost\r\n\r\n")
                return (await reader.read(MAX_STATUS_LINE_BYTES)).split(b" ", 2)[1:2] == [b"200"]
            finally:
                writer.close()
    return False


async def until_ready(host: str, port: int) -> None:
    while True:
        if await is_ready(host, port):
            return
        await asyncio.sleep(READY_POLL_S)


def banner(model: str, device: str, host: str, ports: list[int], needs_key: bool) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "Tell me a joke."}], "stream": True}
    key = ' -H "Authorization: Bearer $HEADRACE_API_KEY"' if needs_key else ""
    command = f"curl -N {url_of(host, ports[0])}/v1/chat/completions -H 'Content-Type: application/json'{key}"
    return "\n".join([
        "",
        f"  Headrace {version('headrace')} serves {model} on {device}",
        f"  {'   '.join(url_of(host, port) for port in ports)}",
        "",
        f"  {command} -d {shlex.quote(json.dumps(body))}",
        "",
    ])  # fmt: skip
