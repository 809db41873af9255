"""What tests share besides fixtures: waiting for conditions, free ports, real Redis processes."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import redis

from shared import redis_acl
from shared.embedded_redis import Server, server_command, socket_path

FAST_ROUNDS_S = 0.005


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


@contextlib.contextmanager
def bounded_work(seconds: float) -> Iterator[None]:
    """Takes at most so much of the processor, where a million empty rounds take FAST_ROUNDS_S; as much longer as those
    take here. For what else grows out of all bounds: it is no measure of speed."""
    began = time.process_time()
    yield
    ended = time.process_time()
    for _ in range(1_000_000):
        pass
    rounds_s = time.process_time() - ended
    took_s, most_s = ended - began, seconds * max(1.0, rounds_s / FAST_ROUNDS_S)
    assert took_s < most_s, f"{took_s:.2f} s of at most {most_s:.2f}"


def command_line(process: psutil.Process) -> str:
    """Empty for one that has just ended, also where nobody has waited for it yet."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


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
def running_redis(server: Server, folder: Path, append_only: bool = True) -> Iterator[str]:
    """A real server of its own in the folder, for the time of the block; its URL, for a user who may do anything."""
    folder.mkdir(parents=True, exist_ok=True)
    path = socket_path(folder)
    users = write_users(folder)
    process = subprocess.Popen(server_command(server, folder, path, append_only=append_only, acl_file=users))
    url = f"unix://{path}"
    try:
        with redis.Redis.from_url(url) as client:
            wait_until_sync(lambda: process.poll() is not None or _answers(client))
        assert process.poll() is None, (folder / "redis.log").read_text()
        yield url
        assert refused_by(url) == []
    finally:
        process.terminate()
        process.wait(10)


def write_users(folder: Path) -> Path:
    """An ACL file with the users of a deployment, whose passwords are their names; `default` is for the test itself."""
    path = folder / "users.acl"
    text = redis_acl.acl_file({user.name: user.name for user in redis_acl.USERS})
    path.write_text(re.sub("^user default off .*", "user default on nopass ~* &* +@all", text))
    return path


def url_as(url: str, user: str) -> str:
    """The same server for a user of the ACL file."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{user}:{user}@{rest}"


def refused_by(url: str) -> list[str]:
    """What the users of the ACL file were refused lately; empty while services keep to what is theirs."""
    with redis.Redis.from_url(url) as client:
        found: Any = client.acl_log()
    return [f"{e['username']}: {e['object']} ({e['reason']})" for e in found
            if e["username"] in redis_acl.BY_NAME and e["reason"] != "auth"]  # fmt: skip


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except (redis.ConnectionError, redis.BusyLoadingError):
        return False


def counting(most: dict[str, int], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call; `most` has how many of it were under way together."""
    num_now = 0

    async def counted(*args: Any) -> Any:
        nonlocal num_now
        num_now += 1
        most[name] = max(most.get(name, 0), num_now)
        try:
            return await call(*args)
        finally:
            num_now -= 1

    return counted
