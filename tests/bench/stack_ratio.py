"""What the services cost: output tok/s through the whole stack against the engine alone, in turns.

PYTHONPATH=. python -m tests.bench.stack_ratio [--clients 1,8,32] [--rounds 3] [--threads N]

Both compute the same load. Beside the ratio: the CPU time that each takes, which other work on the machine changes
less, by thread of the worker; and the share of the stack's time in which its engine was stepping.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from statistics import median
from typing import Any

import psutil

REQUESTS_A_CLIENT = {1: 8, 8: 6, 32: 4}
START_S = 120.0


def headrace(*args: str) -> list[str]:
    return [sys.executable, "-m", "services.cli", *args]


def last_json(args: list[str]) -> dict[str, Any]:
    run = subprocess.run(args, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return result


def kind_of(process: psutil.Process) -> str:
    words = process.cmdline()
    module = next((w for w in words if w.startswith("services.")), words[0])
    return module.rpartition(".")[2].rpartition("/")[2]


def cpu_s(server: psutil.Process) -> Counter[str]:
    """Of every process; of the worker also by thread: its event loop's is the main one."""
    seconds: Counter[str] = Counter()
    for process in [server, *server.children(recursive=True)]:
        kind, times = kind_of(process), process.cpu_times()
        seconds[kind] += times.user + times.system
        if kind == "gpu_worker":
            for thread in process.threads():
                name = "event loop" if thread.id == process.pid else "other threads"
                seconds[f"worker's {name}"] += thread.user_time + thread.system_time
    return seconds


def step_seconds(url: str) -> float:
    with urllib.request.urlopen(url + "/metrics") as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("headrace_step_seconds_sum"))


def start(port: int, threads: int, state: str) -> tuple[subprocess.Popen[bytes], str]:
    args = headrace("serve", "--port", str(port), "--state-dir", state, "--kv-cache-bytes", str(1 << 30))
    server = subprocess.Popen([*args, *_threads(threads)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(url + "/health/ready")
            return server, url
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the stack does not start")


def _threads(number: int) -> list[str]:
    return ["--threads", str(number)] if number else []


def one_round(clients: int, args: argparse.Namespace, server: subprocess.Popen[bytes], url: str) -> dict[str, Any]:
    load = ["--prompt-tokens", "100", "--max-tokens", "64", "--concurrency", str(clients)]
    load += ["--num-requests", str(args.requests or clients * REQUESTS_A_CLIENT.get(clients, 4))]
    engine = last_json([*headrace("bench", "engine"), *load, *_threads(args.threads)])
    process = psutil.Process(server.pid)
    before, computed = cpu_s(process), step_seconds(url)
    stack = last_json([*headrace("bench", "--json", "--url", url), *load])
    spent = cpu_s(process) - before
    return {
        "engine_tok_s": engine["output_tok_s"],
        "stack_tok_s": stack["output_tok_s"],
        "ratio": round(stack["output_tok_s"] / engine["output_tok_s"], 3),
        "stepping": round((step_seconds(url) - computed) / stack["wall_s"], 3),
        "engine_cpu_s": engine["cpu_s"],
        "flushes": stack["services"]["flushes"],
        "itl_ms": stack["itl_ms"]["p50"],
        "ttft_ms": stack["ttft_ms"]["p50"],
        "stack_cpu_s": {name: round(seconds, 2) for name, seconds in sorted(spent.items())},
    }


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--clients", default="1,8,32")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--requests", type=int, default=0)
    ap.add_argument("--threads", type=int, default=0)
    ap.add_argument("--port", type=int, default=8765)
    args = ap.parse_args()
    with tempfile.TemporaryDirectory() as state:
        server, url = start(args.port, args.threads, state)
        try:
            for clients in map(int, args.clients.split(",")):
                rounds = [one_round(clients, args, server, url) for _ in range(args.rounds)]
                for row in rounds:
                    sys.stdout.write(f"{clients} {json.dumps(row)}\n")
                middle = median(row["ratio"] for row in rounds)
                sys.stdout.write(f"{clients} clients: ratio {middle} (median of {args.rounds})\n")
                sys.stdout.flush()
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()


if __name__ == "__main__":
    main()
