"""`make bench`: measures every row of README's table and writes it there: `python -m tests.bench.performance --write`.

Starts stacks of Headrace itself; other servers of the same model are given by their addresses and must allow contexts
of 4,200 tokens. What is found goes to tests/bench/performance.json, and README's text between its markers is made from
that. Nothing else should run on the machine: about 4 minutes alone, 8 more for each llama-server, 6 for vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from services import modules
from services.tools import bench, bench_compare, bench_load, bench_stats
from services.tools.bench_load import Load
from shared import model_source
from shared.cores import num_cores
from shared.settings import DEFAULT_MODEL, current_environ, variable
from tests.bench import performance_stack as stacks
from tests.bench.performance_table import PEERS, render, replaced

ROOT = Path(__file__).parents[2]
FOUND = Path(__file__).with_name("performance.json")
SECTIONS = ("loads", "engine", "batching", "step", "start", "idle", "neighbour")
STACK_SECTIONS = {"loads", "start", "idle", "neighbour"}
STARTS = 3
IDLE_S = 20.0
LOADS = {
    "clients_1": Load("", 4, 1),
    "clients_8": Load("", 24, 8),
    "clients_16": Load("", 32, 16),
    "ttft_512": Load("", 3, 1, prompt_tokens=512, max_tokens=(8,)),
    "ttft_4000": Load("", 1, 1, prompt_tokens=4000, max_tokens=(8,)),
    "shared": Load("", 24, 8, prompt_words=400, shared_prefix=0.9, max_tokens=(32,)),
}


def say(line: str) -> None:
    sys.stderr.write(f"{datetime.now(UTC):%H:%M:%S} {line}\n")
    sys.stderr.flush()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(prog="make bench", description=__doc__)
    ap.add_argument("model", nargs="?", default="", help="as for `headrace serve`; the default model if none")
    for key, name in PEERS.items():
        ap.add_argument(f"--{key.replace('_', '-')}", metavar="URL", help=f"address of {name}")
    ap.add_argument("--rounds", type=int, default=5, help="in which servers take turns (default %(default)s)")
    ap.add_argument("--only", default="", metavar="A,B…", help=f"some of {', '.join(SECTIONS)}")
    ap.add_argument("--loads", default="", metavar="A,B…", help=f"some of {', '.join(LOADS)}")
    ap.add_argument("--neighbour", action="store_true", help="also beside a busy process (2 to 4 minutes)")
    ap.add_argument("--port", type=int, default=9310, help="for stacks; the next one too (default %(default)s)")
    ap.add_argument("--write", action="store_true", help="keep the figures and write README's table")
    args = ap.parse_args(argv)
    args.sections = args.only.split(",") if args.only else [s for s in SECTIONS if s != "neighbour"]
    args.sections += ["neighbour"] if args.neighbour else []
    args.keys = args.loads.split(",") if args.loads else list(LOADS)
    args.urls = {key: bench_compare.base_url(url) for key in PEERS if (url := getattr(args, key))}
    if unknown := ({*args.sections} - {*SECTIONS}) | ({*args.keys} - {*LOADS}):
        ap.error(f"unknown: {', '.join(sorted(unknown))}")
    return args


def machine() -> dict[str, Any]:
    cpu = Path("/proc/cpuinfo").read_text()
    names = [line.partition(": ")[2] for line in cpu.splitlines() if line.startswith("model name")]
    flags = next((line.split() for line in cpu.splitlines() if line.startswith("flags")), [])
    isa = next((name for flag, name in (("avx512_vnni", "AVX-512 VNNI"), ("avx_vnni", "AVX-VNNI"), ("avx2", "AVX2"))
                if flag in flags), platform.machine())  # fmt: skip
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": names[0] if names else platform.machine(), "isa": isa, "cores": num_cores(),
        "memory_gib": round(memory / 2**30), "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }  # fmt: skip


def own_version() -> str:
    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    commit, changed = git("rev-parse", "--short", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    return version("headrace") + (f" ({commit}{' with changes' if changed else ''})" if commit else "")


def peer_version(url: str) -> str:
    """As vLLM and llama-server say it; else where they are."""
    for path, name in (("/version", "version"), ("/props", "build_info")):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            return str(stacks.get(url + path)[name])
    return "version unknown"


def measure_loads(args: argparse.Namespace, own: stacks.ServeStack) -> dict[str, Any]:
    return {key: measure_load(args, own.url, LOADS[key], key) for key in args.keys}


def measure_load(args: argparse.Namespace, own_url: str, load: Load, name: str) -> dict[str, Any]:
    say(f"{name}, {args.rounds} rounds")
    seeded = replace(load, seed=time.time_ns() % (1 << 30))
    urls = [own_url, *args.urls.values()]
    result = asyncio.run(bench_compare.compare(urls, [""], seeded, args.rounds, say))
    keys = list(args.urls)
    return {
        "own": result["servers"][0],
        "peers": dict(zip(keys, result["servers"][1:], strict=True)),
        "ratios": dict(zip(keys, result["ratios"], strict=True)),
        "errors": [f"{name}: {error}" for server in result["servers"] for error in server["errors"]],
    }


def measure_shared_prefill(own: stacks.ServeStack) -> dict[str, Any]:
    """How many prompt tokens the worker computed, by its own count, and how many differ from all others."""
    load = replace(LOADS["shared"], seed=time.time_ns() % (1 << 30))
    words = round(load.prompt_words * load.shared_prefix)
    texts = [str(text) for text in bench_load.prompts(load)]
    shared = num_tokens(own, " ".join(texts[0].split(" ")[:words]))
    options = bench.parse(
        [f"--url={own.url}", f"--seed={load.seed}", f"--num-requests={load.num_requests}", "--max-tokens=32",
         f"--concurrency={load.concurrency}", f"--prompt-words={load.prompt_words}", "--shared-prefix=0.9"]
    )  # fmt: skip
    result = asyncio.run(bench.measure(options))
    needed = shared + sum(num_tokens(own, text) - shared for text in texts)
    computed = result["services"]["prefill_tokens"]
    return {"shared_tokens": shared, "shared_prefill": {"computed": computed, "needed": needed}}


def num_tokens(own: stacks.ServeStack, text: str) -> int:
    return int(stacks.post(own.url + "/tokenize", {"model": own.model, "prompt": text})["count"])


def bench_engine(args: argparse.Namespace, *options: str, **settings: str) -> list[dict[str, Any]]:
    """Its lines, in a process of its own."""
    own = {variable(field): value for field, value in settings.items()}
    command = modules.command("services.gpu_worker.commands.bench_engine", *([args.model] if args.model else []))
    done = subprocess.run([*command, *options], stdout=subprocess.PIPE, text=True, check=True,
                          env=modules.environ(current_environ() | own))  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


def measure_engine(args: argparse.Namespace) -> dict[str, Any]:
    rates: dict[str, Any] = {}
    for count, requests in ((1, 8), (8, 48), (16, 64)):
        say(f"the engine alone, {count}")
        lines = bench_engine(args, f"--concurrency={count}", f"--num-requests={requests}", f"--repeat={args.rounds}")
        rates[str(count)] = bench_stats.spread([line["output_tok_s"] for line in lines])
    return {"output_tok_s": rates}


def measure_batching(args: argparse.Namespace) -> dict[str, Any]:
    say("continuous against fixed batches")
    lines = bench_engine(
        args, "--concurrency=32", "--num-requests=64", "--prompt-tokens=32", "--min-tokens=8", "--max-tokens=256",
        "--policy=continuous,fixed,fixed-compact", f"--repeat={min(3, args.rounds)}", speculative_config="none",
    )  # fmt: skip
    rates = {name: [x["output_tok_s"] for x in lines if x["policy"] == name]
             for name in ("continuous", "fixed", "fixed-compact")}  # fmt: skip
    ratios = {name: bench_stats.spread([a / b for a, b in zip(rates["continuous"], rates[name], strict=True)])
              for name in ("fixed", "fixed-compact")}  # fmt: skip
    [one] = bench_engine(args, "--num-requests=16", speculative_config="none")
    return {"ratios": ratios, "output_tok_s": rates, "kv_waste_100": one["kv_waste"]}


def measure_step(args: argparse.Namespace) -> dict[str, Any]:
    say("a step against its bytes")
    path = model_source.resolve(args.model or DEFAULT_MODEL, model_source.default_cache_dir()).path
    command = modules.command("tests.bench.step_floor", str(path), str(num_cores()))
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=modules.environ(current_environ())
    )
    return dict(json.loads(done.stdout))


def measure_idle(own: stacks.ServeStack) -> float:
    say(f"idle for {IDLE_S:.0f} s")
    time.sleep(5.0)  # what the start left to do
    before, began = own.cpu_s(), time.perf_counter()
    time.sleep(IDLE_S)
    return 100 * (own.cpu_s() - before) / (time.perf_counter() - began)


def measure_neighbour(args: argparse.Namespace, own: stacks.ServeStack) -> dict[str, Any]:
    """In each round all servers without the neighbour and with it; one more stack computes on one thread."""
    say("beside a busy process")
    keys = ["own", *args.urls, "one_thread"]
    rates: dict[str, dict[bool, list[float | None]]] = {key: {False: [], True: []} for key in keys}
    errors: list[str] = []
    with stacks.serving(args.model, args.port + 1, "--threads", "1") as one_thread:
        urls = [own.url, *args.urls.values(), one_thread.url]
        for number in range(args.rounds):
            for busy in (False, True) if number % 2 else (True, False):
                load = replace(LOADS["clients_1"], num_requests=2, seed=time.time_ns() % (1 << 30))
                with stacks.busy_neighbour() if busy else contextlib.nullcontext():
                    result = asyncio.run(bench_compare.compare(urls, [""], load, 1, say))
                for key, server in zip(keys, result["servers"], strict=True):
                    errors += [f"neighbour: {error}" for error in server["errors"]]
                    found = server["output_tok_s"]
                    rates[key][busy].append(found["median"] if found else None)
    kept = {key: ratios(rates[key][True], rates[key][False]) for key in keys if key != "one_thread"}
    return {
        "kept": kept, "of_one_thread": ratios(rates["own"][True], rates["one_thread"][False]), "errors": errors,
        "output_tok_s": {key: {"alone": by[False], "beside": by[True]} for key, by in rates.items()},
    }  # fmt: skip


def ratios(above: Sequence[float | None], below: Sequence[float | None]) -> dict[str, float] | None:
    return bench_stats.spread([None if a is None or not b else a / b for a, b in zip(above, below, strict=True)])


def measure_stack(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    starts = []
    for _ in range(STARTS - 1 if "start" in args.sections else 0):
        with stacks.serving(args.model, args.port) as stack:
            starts.append(stack.start_s)
    with stacks.serving(args.model, args.port) as own:
        if "start" in args.sections:
            found["start_s"] = bench_stats.spread([*starts, own.start_s])
        if "idle" in args.sections:
            found["idle_percent"] = measure_idle(own)
        if "loads" in args.sections:
            found["loads"] = measure_loads(args, own)
            if "shared" in args.keys:
                found |= measure_shared_prefill(own)
        if "neighbour" in args.sections:
            found["neighbour"] = measure_neighbour(args, own)
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {
        "machine": machine(), "version": own_version(), "rounds": args.rounds,
        "model": args.model or DEFAULT_MODEL,
        "peers": {key: {"url": url, "version": peer_version(url)} for key, url in args.urls.items()},
    }  # fmt: skip
    if STACK_SECTIONS & {*args.sections}:
        found |= measure_stack(args)
    for name, section in (("engine", measure_engine), ("batching", measure_batching), ("step", measure_step)):
        if name in args.sections:
            found[name] = section(args)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    found = measure(args)
    sys.stdout.write(render(found))
    if args.write:
        readme = ROOT / "README.md"
        text = replaced(readme.read_text("utf-8"), found)
        FOUND.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", "utf-8")
        readme.write_text(text, "utf-8")
    failed = any(load["errors"] for load in found.get("loads", {}).values())
    return 1 if failed or found.get("neighbour", {}).get("errors") else 0


if __name__ == "__main__":
    sys.exit(main())
