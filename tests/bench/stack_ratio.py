"""What the services cost: output tok/s through the whole stack against the engine alone, in turns.

PYTHONPATH=. python -m tests.bench.stack_ratio [--clients 1,8,32] [--rounds 3] [--threads N] [TREE …]

Both compute the same load on the default model, without guesses. Beside the ratio: the CPU time that each takes, which
other work on the machine changes less, by thread of the worker; the share of the stack's time in which its engine was
stepping; and the share of steps that an engine stood still before, though there was work.
TREE: other checkouts of this repository, measured in the same turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Any

import psutil

from shared import speculative_config
from shared.settings import current_environ, variable

REQUESTS_A_CLIENT = {1: 8, 8: 6, 32: 4}
START_S = 120.0
WITHOUT = {variable("speculative_config"): speculative_config.OFF}


class Tree:
    """A checkout, and the stack that runs from it."""

    def __init__(self, folder: str, url: str, server: psutil.Process, threads: list[str]) -> None:
        self.folder = folder
        self._url = url
        self._server = server
        self._threads = threads

    def measure(self, load: list[str]) -> dict[str, Any]:
        engine = self._last_json("bench", "engine", *load, *self._threads)
        before, stepped = self._cpu_s(), self._steps()
        stack = self._last_json("bench", "--json", "--url", self._url, *load)
        spent, steps = self._cpu_s() - before, self._steps() - stepped
        return {
            "engine_tok_s": engine["output_tok_s"],
            "stack_tok_s": stack["output_tok_s"],
            "ratio": round(stack["output_tok_s"] / engine["output_tok_s"], 3),
            "engine_gaps": round(engine["gaps"] / engine["steps"], 3) if "gaps" in engine else None,
            "stack_gaps": round(steps["step_gaps_total"] / steps["steps_total"], 3),
            "stepping": round(steps["step_seconds_sum"] / stack["wall_s"], 3),
            "engine_cpu_s": engine["cpu_s"],
            "flushes": stack["services"]["flushes"],
            "itl_ms": stack["itl_ms"]["p50"],
            "ttft_ms": stack["ttft_ms"]["p50"],
            "stack_cpu_s": {name: round(seconds, 2) for name, seconds in sorted(spent.items())},
        }

    def _last_json(self, *args: str) -> dict[str, Any]:
        environ = current_environ() | WITHOUT
        run = subprocess.run(headrace(*args), cwd=self.folder, check=True, capture_output=True, text=True, env=environ)
        result: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
        return result

    def _cpu_s(self) -> Counter[str]:
        """Of every process; of the worker also by thread: its event loop's is the main one."""
        seconds: Counter[str] = Counter()
        for process in [self._server, *self._server.children(recursive=True)]:
            kind, times = kind_of(process), process.cpu_times()
            seconds[kind] += times.user + times.system
            for thread in process.threads() if kind == "gpu_worker" else ():
                name = "event loop" if thread.id == process.pid else "other threads"
                seconds[f"worker's {name}"] += thread.user_time + thread.system_time
        return seconds

    def _steps(self) -> Counter[str]:
        with urllib.request.urlopen(self._url + "/metrics") as page:
            lines = page.read().decode().splitlines()
        found: Counter[str] = Counter()
        for name, value in (line.rsplit(" ", 1) for line in lines if line.startswith("headrace_step")):
            found[name.partition("{")[0].removeprefix("headrace_")] += float(value)
        return found


def headrace(*args: str) -> list[str]:
    return [sys.executable, "-m", "services.cli", *args]


def kind_of(process: psutil.Process) -> str:
    words = process.cmdline()
    module = next((w for w in words if w.startswith("services.")), None)
    return module.rpartition(".")[2] if module else "redis" if any("redis" in w for w in words) else "other"


@contextlib.contextmanager
def running(folder: str, port: int, threads: list[str]) -> Iterator[Tree]:
    with tempfile.TemporaryDirectory() as state:
        args = headrace("serve", "--port", str(port), "--state-dir", state, "--kv-cache-bytes", str(1 << 30), *threads)
        server = subprocess.Popen(args, cwd=folder, env=current_environ() | WITHOUT, stderr=subprocess.DEVNULL,
                                  stdout=subprocess.DEVNULL)  # fmt: skip
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        try:
            while not answers(f"{url}/health/ready"):
                if time.monotonic() > until or server.poll() is not None:
                    raise SystemExit(f"the stack of {folder} does not start")
                time.sleep(0.2)
            yield Tree(folder, url, psutil.Process(server.pid), threads)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url):
            return True
    except OSError:
        return False


def compare(trees: list[Tree], clients: int, args: argparse.Namespace) -> None:
    load = ["--prompt-tokens", "100", "--max-tokens", "64", "--concurrency", str(clients)]
    load += ["--num-requests", str(args.requests or clients * REQUESTS_A_CLIENT.get(clients, 4))]
    ratios: dict[str, list[float]] = {tree.folder: [] for tree in trees}
    for _ in range(args.rounds):
        for tree in trees:
            row = tree.measure(load)
            ratios[tree.folder].append(row["ratio"])
            say(f"{clients} {tree.folder} {json.dumps(row)}")
    for folder, found in ratios.items():
        say(f"{clients} clients, {folder}: ratio {median(found)} (median of {found})")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("trees", nargs="*", metavar="TREE")
    ap.add_argument("--clients", default="1,8,32")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--requests", type=int, default=0, help="a run; by the number of clients when 0")
    ap.add_argument("--threads", type=int, default=0, help="of each engine")
    ap.add_argument("--port", type=int, default=8765, help="the first of one for each tree")
    args = ap.parse_args()
    threads = ["--threads", str(args.threads)] if args.threads else []
    with contextlib.ExitStack() as stack:
        folders = [".", *args.trees]
        trees = [stack.enter_context(running(f, args.port + i, threads)) for i, f in enumerate(folders)]
        for clients in map(int, args.clients.split(",")):
            compare(trees, clients, args)


if __name__ == "__main__":
    main()
