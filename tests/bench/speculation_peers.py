"""The texts of `tests.bench.speculation` asked from running servers in turns, one client, temperature 0.

    python -m tests.bench.speculation_peers URL URL… [--kinds edit,chat] [--rounds N]

For each kind a line of JSON: of each server the output tokens a second, median of the rounds, with the smallest and
largest; and the ratio of the first one to each other, in the same round. Prompts are cached alike by all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import urllib.request
from pathlib import Path

DATA = Path(__file__).parent / "data" / "speculation.json"
NUM_OUTPUT = 160


def speed(url: str, texts: list[str]) -> float:
    """Output tokens a second."""
    num_tokens, started = 0, time.perf_counter()
    for text in texts:
        body = {"model": model_of(url), "prompt": text, "max_tokens": NUM_OUTPUT, "temperature": 0}
        num_tokens += answer_of(f"{url}/v1/completions", body)["usage"]["completion_tokens"]
    return num_tokens / (time.perf_counter() - started)


def model_of(url: str) -> str:
    return str(answer_of(f"{url}/v1/models")["data"][0]["id"])


def answer_of(url: str, body: dict[str, object] | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer: dict = json.load(reply)
    return answer


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("urls", nargs="+", metavar="URL")
    ap.add_argument("--kinds", default="edit,extract,code,chat")
    ap.add_argument("--rounds", type=int, default=5)
    args = ap.parse_args()
    for kind in args.kinds.split(","):
        texts = json.loads(DATA.read_text())[kind][:2]
        for url in args.urls:
            speed(url, texts)
        rounds = [[speed(url, texts) for url in args.urls] for _ in range(args.rounds)]
        of_each = [spread(column) for column in zip(*rounds, strict=True)]
        ratios = [spread([row[0] / row[n] for row in rounds]) for n in range(1, len(args.urls))]
        sys.stdout.write(json.dumps({"kind": kind, "tok_s": of_each, "ratios": ratios}) + "\n")
        sys.stdout.flush()
    return 0


def spread(values: list[float]) -> list[float]:
    return [round(v, 3) for v in (statistics.median(values), min(values), max(values))]


if __name__ == "__main__":
    sys.exit(main())
