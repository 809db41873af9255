"""What tests share besides fixtures: waiting for conditions, free ports, real Redis processes."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis

from shared.embedded_redis import Server, server_command, socket_path


async def wait_until(predicate: Callable[[], Any], timeout: float = 10.0, every: float = 0.01) -> Any:
    """The first true result of the predicate, which may be async; TimeoutError with its source after timeout."""
    deadline = time.monotonic() + timeout
    while True:
        result = predicate()
        if inspect.isawaitable(result):
            result = await result
        if result:
            return result
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout} s: {_source(predicate)}")
        await asyncio.sleep(every)


def wait_until_sync(predicate: Callable[[], Any], timeout: float = 10.0, every: float = 0.01) -> Any:
    deadline = time.monotonic() + timeout
    while not (result := predicate()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout} s: {_source(predicate)}")
        time.sleep(every)
    return result


def _source(predicate: Callable[[], Any]) -> str:
    try:
        return " ".join(inspect.getsource(predicate).split())
    except (OSError, TypeError):
        return repr(predicate)


def free_port() -> int:
    """A TCP port of loopback that was free just now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@contextlib.contextmanager
def running_redis(server: Server, folder: Path, append_only: bool = False) -> Iterator[str]:
    """A real server of its own in the folder, for the time of the block; its URL."""
    folder.mkdir(parents=True, exist_ok=True)
    path = socket_path(folder)
    process = subprocess.Popen(server_command(server, folder, path, append_only=append_only))
    url = f"unix://{path}"
    try:
        with redis.Redis.from_url(url) as client:
            wait_until_sync(lambda: process.poll() is not None or _answers(client))
        assert process.poll() is None, (folder / "redis.log").read_text()
        yield url
    finally:
        process.terminate()
        process.wait(10)


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except (redis.ConnectionError, redis.BusyLoadingError):
        return False
