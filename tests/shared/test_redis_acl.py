"""The rights of each service in Redis: what the server makes of the file, on every version that is supported."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.exceptions import NoPermissionError, ResponseError

from shared import redis_acl
from shared.embedded_redis import find_server, server_command
from shared.scripts import prefix_of
from tests import helpers

P = prefix_of("m")
# user → what others do and it may not
OTHERS = {
    "gateway": [f"XADD {P}plan:w * m x", f"HINCRBY {P}term run:w 1", f"XADD {P}dead * m x", f"XADD {P}inbox:s * m x"],
    "scheduler": [f"GET {P}secret", f"RPUSH {P}s:r.0:log x", f"SET {P}metrics:gateway:g x"],
    "cache-store": [f"HGETALL {P}r:r", f"HGETALL {P}s:r.0", f"XADD {P}out:g * m x", f"GET {P}secret"],
    "worker": [f"HINCRBY {P}term run:w 1", f"GET {P}secret", f"SET {P}lease:run:w s", f"XADD {P}dead * m x"],
    "admin": ["GET somebody", f"RPUSH {P}s:r.0:log x", f"SET {P}secret x"],
}
NOBODY = ["KEYS *", "CONFIG GET dir", "CONFIG SET dir /", "DEBUG SLEEP 0", "FLUSHALL", "CLIENT LIST", "ACL LIST",
          "SCRIPT FLUSH", "SHUTDOWN NOSAVE", "SAVE", "REPLICAOF NO ONE", "PUBLISH c x", "GET foreign",
          "MONITOR"]  # fmt: skip


@pytest.fixture(params=[user.name for user in redis_acl.USERS])
def user(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(user: str, any_redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(helpers.url_as(any_redis_url, user), driver_info=None) as client:
        yield client
    with redis.Redis.from_url(any_redis_url) as everything:
        everything.acl_log_reset()


def test_what_is_not_its_business_is_refused(user: str, client: redis.Redis) -> None:
    for command in [*NOBODY, *OTHERS[user]]:
        if command.startswith("DEBUG"):  # a server since 7 says first that it does not do it for anybody
            with pytest.raises(ResponseError, match="DEBUG|no permissions"):
                client.execute_command(*command.split())
            continue
        with pytest.raises(NoPermissionError):
            client.execute_command(*command.split())


@pytest.mark.parametrize("command", ["KEYS', '*'", "CONFIG', 'GET', 'dir'", "GET', 'foreign'", "FLUSHALL'"])
def test_a_script_may_do_no_more_than_its_caller(client: redis.Redis, command: str) -> None:
    text = f"return redis.call('{command})" if command.endswith("'") else command
    with pytest.raises(ResponseError, match="can't (run|access)|not allowed"):
        client.eval(text, 1, P)


def test_a_connection_without_a_name_is_nobody(tmp_path: Path) -> None:
    (tmp_path / "users.acl").write_text(redis_acl.acl_file({user.name: "x" for user in redis_acl.USERS}))
    socket = tmp_path / "s"
    command = server_command(find_server(), tmp_path, socket, acl_file=tmp_path / "users.acl")
    with subprocess.Popen(command) as process:
        try:
            helpers.wait_until_sync(socket.exists)
            with redis.Redis.from_url(f"unix://{socket}") as client, pytest.raises(redis.AuthenticationError):
                client.ping()
            with redis.Redis.from_url(f"unix://worker:x@{socket}") as client:
                assert client.ping()
        finally:
            process.terminate()


def test_a_file_without_passwords_is_refused(tmp_path: Path) -> None:
    (tmp_path / "users.acl").write_text(redis_acl.acl_file())
    command = server_command(find_server(), tmp_path, tmp_path / "s", acl_file=tmp_path / "users.acl")
    assert subprocess.run(command, timeout=10).returncode != 0
    assert "users.acl" in (tmp_path / "redis.log").read_text()


def test_rights_of_scripts_are_read_from_their_text() -> None:
    touched = redis_acl.touched_by("finish")
    assert {"hmget", "xadd", "xdel", "xack", "srem", "pexpire", "hincrby"} <= touched.commands  # of what it calls
    assert {"s:*", "r:*", "out:*", "on:*", "requests", "queue", "absent"} <= touched.keys
    assert "rpush" not in touched.commands and "rpush" in redis_acl.touched_by("commit").commands
    assert "xgroup|create" in redis_acl.touched_by("open_queue").commands
