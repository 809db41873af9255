"""`make chaos MINUTES=20 SEED=1`: faults at random under load, repeatable by the seed; 1 if an invariant broke."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
from pathlib import Path

from tests.chaos.random_run import ENV, RandomRun

REAL_ENV = ENV | {"kv_cache_bytes": "256MiB", "max_model_len": 2048, "threads": 1}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, help="stop after so many")
    parser.add_argument("--model", default="scripted", help="a model to serve instead of the scripted one")
    parser.add_argument("--quiet", action="store_true", help="do not show each fault")
    args = parser.parse_args()
    logging.basicConfig(level="WARNING" if args.quiet else "INFO", format="%(asctime)s %(message)s", stream=sys.stdout)
    options = {} if args.model == "scripted" else {"model": args.model, "env": REAL_ENV, "num_tokens": 16}
    folder = Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    run = RandomRun(folder, args.seed, **options)
    try:
        asyncio.run(run.run(60 * args.minutes, args.faults))
        verdict = "no invariant was broken"
    except AssertionError as e:
        verdict = "\n".join([f"BROKEN {e}", *getattr(e, "__notes__", [])])
    sys.stdout.write("\n".join([*run.report.lines(), verdict, f"logs: {folder}", ""]))
    return verdict.startswith("BROKEN")


if __name__ == "__main__":
    sys.exit(main())
