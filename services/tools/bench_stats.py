"""Figures of a load run: percentiles, rates, and what the services spent. *Pure.*"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Sample:
    """One request that ended well. Seconds from sending (open loop: from the planned arrival)."""

    ttft: float
    e2e: float
    gaps: list[float]  # between chunks with text
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


@dataclass
class Run:
    samples: list[Sample] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    wall_s: float = 0.0


def percentile(values: Sequence[float], p: float) -> float | None:
    """Nearest rank; None where there is nothing to rank."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(p * len(values)) - 1)]


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Of what was measured: median, smallest and largest; None where nothing was."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    return {"median": round(statistics.median(known), 4), "min": round(known[0], 4), "max": round(known[-1], 4)}


def _ms(values: Sequence[float]) -> dict[str, float | None]:
    ranks = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: None if (v := percentile(values, p)) is None else round(v * 1e3, 2) for name, p in ranks.items()}


def summary(run: Run) -> dict[str, Any]:
    """The run as one JSON-able object; times in ms, rates per second of wall time."""
    out = sum(s.num_output_tokens for s in run.samples)
    prompt = sum(s.num_prompt_tokens for s in run.samples)
    wall = max(run.wall_s, 1e-9)
    return {
        "requests": len(run.samples),
        "errors": sum(run.errors.values()),
        "error_kinds": dict(run.errors.most_common(5)),
        "wall_s": round(run.wall_s, 3),
        "requests_per_s": round(len(run.samples) / wall, 3),
        "output_tokens": out,
        "prompt_tokens": prompt,
        "cached_tokens": sum(s.num_cached_tokens for s in run.samples),
        # of a shared prefix somebody computes the beginning; what the worst of all others found
        "cached_tokens_of_others": min(sorted(s.num_cached_tokens for s in run.samples)[1:], default=0),
        "output_tok_s": round(out / wall, 1),
        "total_tok_s": round((out + prompt) / wall, 1),
        "ttft_ms": _ms([s.ttft for s in run.samples]),
        "itl_ms": _ms([g for s in run.samples for g in s.gaps]),
        "e2e_ms": _ms([s.e2e for s in run.samples]),
    }


Metrics = Mapping[tuple[str, str], float]  # (sample name, service) -> value, summed over instances


def parse_metrics(text: str) -> dict[tuple[str, str], float]:
    """Prometheus text as a gateway renders it; samples of one name and service are added up over the other labels."""
    values: dict[tuple[str, str], float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name, _, rest = line.partition("{")
        if not rest:
            continue
        labels, _, value = rest.rpartition("} ")
        service = labels.partition('service="')[2].partition('"')[0]
        key = (name, service)
        number = float(value.split()[0])
        # every scheduler reports the one Redis
        values[key] = max(values.get(key, 0.0), number) if "_redis_" in name else values.get(key, 0.0) + number
    return values


def service_costs(before: Metrics, after: Metrics) -> dict[str, Any]:
    """CPU of each service between two scrapes, per output token and per flush (a commit of the worker)."""

    def grown(name: str, service: str) -> float:
        return after.get((name, service), 0.0) - before.get((name, service), 0.0)

    cpu = {
        service: grown(name, service)
        for name, service in after
        if name == "headrace_process_cpu_seconds_total" and service
    }
    redis = grown("headrace_redis_cpu_seconds_total", "scheduler")
    tokens = grown("headrace_generation_tokens_total", "worker")
    flushes = grown("headrace_commit_seconds_count", "worker")
    pipeline = redis + sum(seconds for service, seconds in cpu.items() if service != "worker")
    return {
        "cpu_s": {service: round(seconds, 3) for service, seconds in sorted(cpu.items())} | {"redis": round(redis, 3)},
        "tokens": int(tokens),
        "flushes": int(flushes),
        "prefill_tokens": int(grown("headrace_prefill_tokens_total", "worker")),
        "pipeline_cpu_ms_per_token": round(1e3 * pipeline / tokens, 4) if tokens else None,
        "pipeline_cpu_ms_per_flush": round(1e3 * pipeline / flushes, 4) if flushes else None,
        "budget_s": round(1.3e-3 * flushes + 0.13e-3 * tokens, 3),
        "pipeline_cpu_s": round(pipeline, 3),
    }


def table(rows: Mapping[str, Any]) -> str:
    """Two columns for people; nested objects are flattened."""
    flat: list[tuple[str, str]] = []

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                walk(f"{prefix} {key}".strip(), inner)
        else:
            flat.append((prefix.replace("_", " "), "-" if value is None else str(value)))

    walk("", rows)
    width = max(len(name) for name, _ in flat)
    return "\n".join(f"{name:<{width}}  {value:>12}" for name, value in flat)
