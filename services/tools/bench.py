"""`headrace bench`: load on a running server, as a table for people and one JSON line for programs.

Closed loop (`--concurrency`) or Poisson arrivals (`--rate`). Where the server is Headrace, the CPU time that each
service spent is read from its /metrics before and after: per token and per flush. With --compare the load goes to
several servers of any make in turns (see `bench_compare.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import urllib.parse
from collections.abc import Sequence
from typing import Any

import aiohttp

from services.tools import bench_compare, bench_load, bench_stats
from services.tools.bench_compare import NoServer, base_url, served_model
from services.tools.bench_load import Load
from shared.metrics import PUBLISH_EVERY_S


def log_uniform(low: int, high: int, count: int, seed: int) -> tuple[int, ...]:
    """count lengths, log-uniform in [low, high]."""
    rng = random.Random(seed)
    return tuple(round(math.exp(rng.uniform(math.log(low), math.log(high)))) for _ in range(count))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(prog="headrace bench", description=__doc__)
    ap.add_argument(
        "--url", "--base-url", default="http://127.0.0.1:8000", help="address of the server (default %(default)s)"
    )
    ap.add_argument(
        "--compare", default="", metavar="URL,URL…", help="load these in turns, and compare the first with each other"
    )
    ap.add_argument("--rounds", type=int, default=5, help="of --compare (default %(default)s)")
    ap.add_argument(
        "--model", default="", help="model name; asked from the server when empty; with --compare one or one each"
    )
    ap.add_argument("--api-key", default="")
    ap.add_argument(
        "--concurrency",
        "--max-concurrency",
        type=int,
        default=8,
        help="clients of the closed loop (default %(default)s)",
    )
    ap.add_argument(
        "--rate", "--request-rate", type=float, default=0.0, help="Poisson arrivals a second, instead of a closed loop"
    )
    ap.add_argument("--num-requests", "--num-prompts", type=int, default=32)
    ap.add_argument("--prompt-words", type=int, default=100)
    ap.add_argument(
        "--prompt-tokens", "--random-input-len", type=int, default=0,
        help="instead: random token ids, as `bench engine` computes",
    )  # fmt: skip
    ap.add_argument("--shared-prefix", type=float, default=0.0, help="fraction of the words that all prompts share")
    ap.add_argument("--max-tokens", "--random-output-len", type=int, default=64)
    ap.add_argument("--min-tokens", type=int, default=0, help="lengths log-uniform from here to --max-tokens")
    ap.add_argument("--temperature", type=float, default=0.0)
    ap.add_argument("--seed", type=int, default=None, help="of the prompts; drawn when absent")
    ap.add_argument("--chat", action="store_true", help="chat completions instead of completions")
    ap.add_argument("--json", action="store_true", help="only the JSON line")
    args = ap.parse_args(argv)
    if args.concurrency < 1 or args.num_requests < 1 or args.max_tokens < 1 or not 0 <= args.shared_prefix <= 1:
        ap.error("concurrency, num-requests and max-tokens must be positive, shared-prefix between 0 and 1")
    args.urls = [url for url in args.compare.split(",") if url]
    args.models = args.model.split(",") if args.urls else [args.model]
    for url in args.urls or [args.url]:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            ap.error(f"not an address: {url}")
    if args.urls and len(args.models) not in (1, len(args.urls)):
        ap.error(f"--model names {len(args.models)} models for {len(args.urls)} servers")
    if args.rounds < 1:
        ap.error("rounds must be positive")
    return args


async def _scrape(url: str, headers: dict[str, str]) -> bench_stats.Metrics:
    """{} where the server has no such page. Services publish every few seconds: waits until the newest is out."""
    await asyncio.sleep(PUBLISH_EVERY_S + 0.5)
    async with aiohttp.ClientSession(headers=headers) as session, session.get(url + "/metrics") as response:
        text = await response.text()
    return bench_stats.parse_metrics(text) if "headrace_" in text else {}


def load_of(args: argparse.Namespace, url: str, model: str, seed: int) -> Load:
    lengths: tuple[int, ...] = (args.max_tokens,)
    if args.min_tokens:
        lengths = log_uniform(args.min_tokens, args.max_tokens, args.num_requests, seed)
    return Load(
        url=url, num_requests=args.num_requests, concurrency=args.concurrency, rate=args.rate,
        prompt_words=args.prompt_words, prompt_tokens=args.prompt_tokens, shared_prefix=args.shared_prefix,
        max_tokens=lengths, temperature=args.temperature, seed=seed, chat=args.chat, model=model,
        api_key=args.api_key,
    )  # fmt: skip


def _seed(args: argparse.Namespace) -> int:
    return random.SystemRandom().randrange(1 << 30) if args.seed is None else args.seed


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run, after a short warm-up."""
    seed = _seed(args)
    url = base_url(args.url)
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    model = args.model or await served_model(url, headers)
    load = load_of(args, url, model, seed)
    warm_up = Load(url=url, num_requests=1, prompt_words=4, max_tokens=(4,), model=model, api_key=args.api_key)
    await bench_load.run(warm_up)
    before = await _scrape(url, headers)
    run = await bench_load.run(load)
    after = await _scrape(url, headers)
    result: dict[str, Any] = {"model": model, "seed": seed, "concurrency": args.concurrency, "rate": args.rate}
    result |= bench_stats.summary(run)
    if after:
        result["services"] = bench_stats.service_costs(before, after)
    return result


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _compare(args: argparse.Namespace) -> int:
    seed = _seed(args)
    load = load_of(args, "", "", seed)
    say = (lambda line: None) if args.json else _say
    result = asyncio.run(bench_compare.compare(args.urls, args.models, load, args.rounds, say))
    result |= {"seed": seed, "concurrency": args.concurrency, "num_requests": args.num_requests}
    if not args.json:
        sys.stdout.write(bench_compare.table(result) + "\n")
    sys.stdout.write(json.dumps(result) + "\n")
    return 1 if result["failed"] else 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.urls:
        return _compare(args)
    try:
        result = asyncio.run(measure(args))
    except (NoServer, aiohttp.ClientError, OSError) as e:
        sys.stderr.write(f"headrace bench: {args.url} does not answer as expected: {e}\n")
        return 1
    if not args.json:
        sys.stdout.write(bench_stats.table(result) + "\n")
    sys.stdout.write(json.dumps(result) + "\n")
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
