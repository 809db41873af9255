"""Processes that a measurement needs: a stack of `headrace serve`, and a neighbour that keeps one core busy."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services import modules
from shared.settings import current_environ

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
TICKS = os.sysconf("SC_CLK_TCK")


def post(url: str, body: dict[str, Any], timeout_s: float = 60.0) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return json.load(response)


def get(url: str, timeout_s: float = 10.0) -> Any:
    with urllib.request.urlopen(url, timeout=timeout_s) as response:
        return json.load(response)


class ServeStack:
    """start_s: from the command to the first answer."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, start_s: float, model: str) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.start_s = start_s
        self.model = model

    def cpu_s(self) -> float:
        """Of the process and all below it."""
        return sum(map(_cpu_s, _tree(self.process.pid)))


@contextlib.contextmanager
def serving(model: str, port: int, *options: str) -> Iterator[ServeStack]:
    """A stack that has answered once. Its log lies in a temporary folder and is shown where it does not start."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        log = Path(folder) / "log"
        command = modules.command("services.cli", "serve", *([model] if model else []), "--port", str(port),
                                  "--state-dir", f"{folder}/state", *options)  # fmt: skip
        started = time.perf_counter()
        with log.open("wb") as out:
            environ = modules.environ(current_environ())
            process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environ)
        try:
            name = _first_answer(process, f"http://127.0.0.1:{port}", log)
            yield ServeStack(process, port, time.perf_counter() - started, name)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _first_answer(process: subprocess.Popen[bytes], url: str, log: Path) -> str:
    """The model's name, once it has answered."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            name = str(get(url + "/v1/models")["data"][0]["id"])
            post(url + "/v1/completions", {"model": name, "prompt": "A", "max_tokens": 1})
            return name
        except (OSError, ValueError, LookupError):  # not listening yet, or nobody computes yet
            if process.poll() is not None or time.monotonic() > deadline:
                sys.stderr.write(log.read_text("utf-8", "replace"))
                raise SystemExit(f"headrace serve has not answered at {url}") from None
            time.sleep(0.02)


@contextlib.contextmanager
def busy_neighbour() -> Iterator[None]:
    """One process that computes without end, bound to the first core that this process may use."""
    core = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it runs
        yield
    finally:
        process.kill()
        process.communicate()


def _tree(pid: int) -> list[int]:
    found = [pid]
    for parent in found:  # grows while it is read
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS
