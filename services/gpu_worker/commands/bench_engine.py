"""`headrace bench engine`: the load of `headrace bench` on the engine alone, in one process.

What the services cost is the ratio of the two. Prompts are random token ids, as `headrace bench --prompt-tokens` sends.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from services.gpu_worker.commands.bench_load import EngineBench, Result, requests
from services.gpu_worker.composer import Budget
from services.gpu_worker.device import DeviceOptions, choose_device
from services.gpu_worker.drafters import drafter_of
from services.gpu_worker.engines import load_engine
from services.gpu_worker.gpu_engine import StepLimits
from services.gpu_worker.guesser_loading import guesser_of
from shared import model_source, settings
from shared.cores import leaves_one_free, num_cores
from shared.settings import CommonSettings, DeviceSettings, WorkerSettings

POLICIES = ("continuous", "fixed", "fixed-compact")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(prog="headrace bench engine", description=__doc__)
    ap.add_argument("model", nargs="?", help="as for `headrace serve`")
    ap.add_argument("--concurrency", type=int, default=8)
    ap.add_argument("--num-requests", type=int, default=32)
    ap.add_argument("--prompt-tokens", type=int, default=100)
    ap.add_argument("--max-tokens", type=int, default=64)
    ap.add_argument("--min-tokens", type=int, default=0, help="lengths log-uniform from here to --max-tokens")
    ap.add_argument("--policy", default="continuous", help=f"one or more of {', '.join(POLICIES)}, comma-separated")
    ap.add_argument("--repeat", type=int, default=1, help="rounds; policies alternate within each")
    ap.add_argument("--engine", choices=("auto", "native", "torch"), help="as for `headrace serve`")
    ap.add_argument("--threads", type=int, default=0)
    ap.add_argument("--overlap", action=argparse.BooleanOptionalAction, help="steps; as a worker does by default")
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args(argv)
    if unknown := set(args.policy.split(",")) - set(POLICIES):
        ap.error(f"unknown policy: {', '.join(sorted(unknown))}")
    if min(args.concurrency, args.num_requests, args.prompt_tokens, args.max_tokens, args.repeat) < 1:
        ap.error("counts must be positive")
    return args


def figures(policy: str, result: Result) -> dict[str, Any]:
    ttft = sorted(result.ttft_s)
    return {
        "policy": policy,
        "output_tok_s": round(result.num_output_tokens / result.wall_s, 1),
        "total_tok_s": round((result.num_output_tokens + result.num_prompt_tokens) / result.wall_s, 1),
        "wall_s": round(result.wall_s, 3),
        "steps": result.num_steps,
        "gaps": result.num_gaps,
        "ttft_ms_p50": round(1e3 * ttft[len(ttft) // 2], 1),
        "kv_waste": round(result.kv_waste, 4),
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    own, common, asked = settings.load(WorkerSettings), settings.load(CommonSettings), settings.load(DeviceSettings)
    own = own.model_copy(update={"engine": args.engine or own.engine})
    threads = args.threads or own.threads or num_cores()
    device = choose_device(asked.device, own.engine)
    source = model_source.resolve(args.model or common.model, common.cache_dir)
    guesser = guesser_of(own, source, threads, common.cache_dir)
    limits = StepLimits(*own.most_in_a_step(device is not None), asked.gpu_memory_utilization)
    options = DeviceOptions(asked.dtype, asked.enforce_eager, asked.deterministic)
    engine = load_engine(
        own.engine, source.path, common.cache_dir,
        kv_cache_bytes=own.kv_cache_bytes or None, block_size=own.block_size,
        kv_cache_dtype=own.kv_cache_dtype, quantization=own.quantization, num_threads=threads,
        device=device, needs_device=asked.device == "cuda", limits=limits, options=options,
        model_impl=own.model_impl, aside=guesser.aside,
    )  # fmt: skip
    lengths = [args.max_tokens]
    if args.min_tokens:
        rng = random.Random(args.seed)
        low, high = math.log(args.min_tokens), math.log(args.max_tokens)
        lengths = [round(math.exp(rng.uniform(low, high))) for _ in range(args.num_requests)]
    num_tokens, num_seqs = own.most_in_a_step(engine.info.on_card)
    budget = Budget(num_tokens, max(args.concurrency, num_seqs), num_tokens)
    overlap = device is not None or leaves_one_free(threads) if args.overlap is None else args.overlap
    max_step_s = own.max_step_ms / 1000
    drafter = drafter_of(own, engine, guesser.load(engine, device, limits, options))
    bench = EngineBench(engine, budget, max_step_s, overlap=overlap, drafter=drafter)
    bench.run(requests(2, 16, [4], engine.info.vocab_size, args.seed), 2, "continuous")  # warm-up
    for round_number in range(args.repeat):
        todo = requests(
            args.num_requests, args.prompt_tokens, lengths, engine.info.vocab_size, args.seed + round_number
        )
        for policy in args.policy.split(","):
            cpu = time.process_time()
            row = figures(policy, bench.run(todo, args.concurrency, policy))
            row["cpu_s"] = round(time.process_time() - cpu, 3)
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
