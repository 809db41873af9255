"""`make chaos MINUTES=30 SEED=1`: faults at random under load, repeatable by the seed; 1 if an invariant broke.

Nine tenths of the faults meet a stack with the scripted engine, then a tenth one with a real model, whose workers take
seconds to load: there faults come more slowly.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.random_run import ENV, RandomRun

REAL_ENV = ENV | {"kv_cache_bytes": "256MiB", "max_model_len": 2048, "threads": 1}
REAL_PACE = 4.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="of all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, help="stop after so many")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="the real one")
    parser.add_argument("--real-share", type=float, default=0.1, help="of the faults that meet the real model")
    parser.add_argument("--quiet", action="store_true", help="do not show each fault")
    args = parser.parse_args()
    logging.basicConfig(level="WARNING" if args.quiet else "INFO", format="%(asctime)s %(message)s", stream=sys.stdout)
    runs, verdicts, started = list(_runs(args)), [], time.monotonic()
    for run, seconds, most in runs:
        verdicts.append(_verdict(run, seconds, most))
        print_lines(*run.report.lines(), verdicts[-1])
    num_faults, broken = sum(run.report.num_faults for run, *_ in runs), [v for v in verdicts if v.startswith("BROKEN")]
    print_lines(
        f"seed {args.seed}: {num_faults} faults in {time.monotonic() - started:.0f} s, "
        f"{'an invariant was BROKEN' if broken else 'no invariant was broken'}"
    )
    return bool(broken)


def _runs(args: argparse.Namespace) -> Iterator[tuple[RandomRun, float, int | None]]:
    """With how long each may take, and how many faults it has at most."""
    share, model = args.real_share, args.model
    parts = [
        (1 - share, 1.0, "scripted", {}),
        (share, REAL_PACE, model, {"model": model, "env": REAL_ENV, "num_tokens": 16}),
    ]
    total = sum(part * pace for part, pace, *_ in parts)
    for part, pace, name, options in parts:
        if part > 0:
            folder = Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
            run = RandomRun(folder, args.seed, name=name, pace=pace, **options)
            yield run, 60 * args.minutes * part * pace / total, args.faults and round(args.faults * part)


def _verdict(run: RandomRun, seconds: float, most: int | None) -> str:
    try:
        asyncio.run(run.run(seconds, most))
    except AssertionError as e:
        return "\n".join([f"BROKEN {e}", *getattr(e, "__notes__", []), f"logs: {run.folder}"])
    return "no invariant was broken"


def print_lines(*lines: str) -> None:
    sys.stdout.write("\n".join([*lines, ""]))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
