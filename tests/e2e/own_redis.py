"""A Redis of a test's own, to be killed and brought back with what its append-only file holds."""

from __future__ import annotations

import resource
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import redis

from shared.embedded_redis import find_server, server_command, socket_path
from tests.helpers import refused_by, wait_until_sync, write_users


class OwnRedis:
    """volatile: without an append-only file, so that it comes back empty."""

    def __init__(self, folder: Path, volatile: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._volatile = volatile
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{socket_path(folder)}"

    def __enter__(self) -> OwnRedis:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if error is None and self._process is not None and self._process.poll() is None:
                assert refused_by(self.url) == []
        finally:
            self.kill()

    def start(self) -> None:
        """Returns when it answers."""
        command = server_command(
            find_server(),
            self._folder,
            socket_path(self._folder),
            append_only=not self._volatile,
            acl_file=write_users(self._folder),
        )
        # SIGXFSZ stays ignored, as Python has it: a write beyond the limit of `fill_disk` fails as on a full disk
        self._process = subprocess.Popen(command, restore_signals=False)
        wait_until_sync(self._answers)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)

    def signal(self, sig: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(sig)

    def limit_memory(self, num_bytes: int) -> None:
        with redis.Redis.from_url(self.url) as client:
            client.config_set("maxmemory", num_bytes)

    def fill_disk(self) -> None:
        """No file may grow from here on."""
        files = [path for path in self._folder.rglob("*") if path.is_file() and not path.name.endswith(".sock")]
        self._limit_files(max(path.stat().st_size for path in files))

    def free_disk(self) -> None:
        self._limit_files(resource.RLIM_INFINITY)

    def _limit_files(self, num_bytes: int) -> None:
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

    def can_write(self) -> bool:
        """What Redis itself says of its append-only file."""
        with redis.Redis.from_url(self.url) as client:
            info: Any = client.info("persistence")
            return bool(info["aof_last_write_status"] == "ok")

    def _answers(self) -> bool:
        with redis.Redis.from_url(self.url) as client:
            try:
                return bool(client.ping())
            except (redis.ConnectionError, redis.BusyLoadingError):
                return False
