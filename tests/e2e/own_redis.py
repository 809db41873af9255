"""A Redis of a test's own, to be killed and brought back with what its append-only file holds."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType

import redis

from shared.embedded_redis import find_server, server_command, socket_path
from tests.helpers import refused_by, wait_until_sync, write_users


class OwnRedis:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
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
            find_server(), self._folder, socket_path(self._folder), acl_file=write_users(self._folder)
        )
        self._process = subprocess.Popen(command)
        wait_until_sync(self._answers)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)

    def _answers(self) -> bool:
        with redis.Redis.from_url(self.url) as client:
            try:
                return bool(client.ping())
            except (redis.ConnectionError, redis.BusyLoadingError):
                return False
