"""What holding answers to a JSON schema costs: tok/s of the same load with and without one, in turns, on one stack.

    python -m tests.bench.grammar_overhead [--model M] [--clients 8] [--rounds N] [--max-tokens N] [-- OPTION…]

The schema is a list that goes on beyond the last token, so that both draw as many. A line of JSON for each round with
both rates, their ratio, and that of processor time, which other work on the machine changes less; then the medians.
Nothing is guessed, which would gain on what JSON repeats. Everything behind `--` is an option of `headrace serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from typing import Any

import aiohttp

from services.tools.bench_load import WORDS
from tests.bench.performance_stack import ServeStack, serving

REQUESTS_A_CLIENT = 4
PROMPT_WORDS = 60
PERSON = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"},
                                     "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4}},
    "required": ["name", "age", "tags"], "additionalProperties": False,
}  # fmt: skip
SCHEMA = {"type": "array", "items": PERSON, "minItems": 1000}


def bodies(args: argparse.Namespace, seed: int, *, held: bool) -> list[dict[str, Any]]:
    """Prompts are new in each run, so that none is found in the cache."""
    chance = random.Random(f"{seed} {held}")
    asked: list[dict[str, Any]] = []
    for number in range(args.clients * REQUESTS_A_CLIENT):
        prompt = "List people as JSON. " + " ".join(chance.choices(WORDS, k=PROMPT_WORDS))
        body = {"prompt": prompt, "max_tokens": args.max_tokens, "temperature": 1, "seed": number}
        asked.append(body | ({"structured_outputs": {"json": SCHEMA}} if held else {"ignore_eos": True}))
    return asked


async def send(url: str, asked: list[dict[str, Any]], clients: int) -> int:
    """Tokens that were drawn."""
    waiting, num_tokens = iter(asked), 0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def client() -> None:
            nonlocal num_tokens
            for body in waiting:
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    answer = await response.json()
                    if response.status != 200:
                        raise SystemExit(f"{response.status}: {answer}")
                num_tokens += answer["usage"]["completion_tokens"]

        await asyncio.gather(*(client() for _ in range(clients)))
    return num_tokens


def measure(stack: ServeStack, args: argparse.Namespace, seed: int, *, held: bool) -> tuple[float, float]:
    """Tokens a second, and seconds of processors a token."""
    asked = bodies(args, seed, held=held)
    cpu_s, began = stack.cpu_s(), time.perf_counter()
    num_tokens = asyncio.run(send(stack.url, asked, args.clients))
    took_s = time.perf_counter() - began
    if num_tokens != len(asked) * args.max_tokens:
        raise SystemExit(f"{num_tokens} tokens instead of {len(asked) * args.max_tokens}: an answer has ended early")
    return num_tokens / took_s, (stack.cpu_s() - cpu_s) / num_tokens


def one_round(stack: ServeStack, args: argparse.Namespace, number: int) -> dict[str, float]:
    """Which comes first changes from round to round."""
    order = [False, True] if number % 2 else [True, False]
    found = {held: measure(stack, args, number, held=held) for held in order}
    (plain, plain_cpu), (by_schema, schema_cpu) = found[False], found[True]
    return {
        "plain_tok_s": round(plain, 1), "schema_tok_s": round(by_schema, 1), "ratio": round(by_schema / plain, 4),
        "cpu_ratio": round(schema_cpu / plain_cpu, 4),
    }  # fmt: skip


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", default="")
    ap.add_argument("--clients", type=int, default=8)
    ap.add_argument("--rounds", type=int, default=7)
    ap.add_argument("--max-tokens", type=int, default=96)
    ap.add_argument("--port", type=int, default=8795)
    ap.add_argument("options", nargs="*")
    args = ap.parse_args()
    with serving(args.model, args.port, "--speculative-config", "none", *args.options) as stack:
        for held in (False, True):
            measure(stack, args, -1, held=held)  # what is read and compiled once
        rows = []
        for number in range(args.rounds):
            rows.append(one_round(stack, args, number))
            sys.stdout.write(json.dumps(rows[-1]) + "\n")
            sys.stdout.flush()
        medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        sys.stdout.write(json.dumps({"medians of": len(rows)} | medians) + "\n")


if __name__ == "__main__":
    main()
