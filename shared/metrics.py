"""Metrics of all services in one place: each publishes its own as a snapshot in Redis, any gateway renders them all.

So one scrape of one gateway shows the whole pipeline, and services without an HTTP port need none. A snapshot expires
soon after its service. Knows nothing of what is measured: services declare their metrics on a registry of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Iterable
from typing import Any

import msgpack
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest

from shared import loop_watch
from shared.bus import CannotWrite

log = logging.getLogger(__name__)

SNAPSHOT_TTL_MS = 15_000
PUBLISH_EVERY_S = 2.0
MAX_SNAPSHOT_BYTES = 1 << 20
LAG_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class ProcessMetrics:
    """What every service measures of its own process: its CPU time, how long the event loop was not free, and how much
    Python holds, which tells a leak from an allocator that keeps what was freed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lag_s = Histogram(
            "headrace_event_loop_lag_seconds", "Longest turn of the event loop between two looks", buckets=LAG_SECONDS,
            registry=registry,
        )  # fmt: skip
        self._stalls = Counter(
            "headrace_event_loop_stalls", "Turns whose stack was logged, since they took too long", registry=registry
        )
        self._cpu = Counter("headrace_process_cpu_seconds", "CPU time of the process", registry=registry)
        self._blocks = Gauge(
            "headrace_python_memory_blocks", "Pieces of memory that Python's allocator has given out", registry=registry
        )
        self._num_seen = 0
        self._cpu_seen = 0.0

    def observe(self) -> None:
        """To be called now and then, in the loop."""
        lag_s, num_stalls = loop_watch.lag_s()
        self._lag_s.observe(lag_s)
        self._stalls.inc(num_stalls - self._num_seen)
        self._num_seen = num_stalls
        self._blocks.set(sys.getallocatedblocks())
        cpu = time.process_time()
        self._cpu.inc(cpu - self._cpu_seen)
        self._cpu_seen = cpu


def snapshot(registry: CollectorRegistry) -> bytes:
    """All samples of a registry, and how many tasks this loop has; time stamps and exemplars are left out."""
    name = "headrace_asyncio_tasks"
    tasks: list[Any] = [(name, {}, _num_tasks())]
    rows = [(name, "Tasks of the event loop", "gauge", tasks)]
    for metric in registry.collect():
        samples = [(s.name, s.labels, s.value) for s in metric.samples]
        rows.append((metric.name, metric.documentation, metric.type, samples))
    data: bytes = msgpack.packb(rows)
    return data


def _num_tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0  # no loop


class _Snapshots:
    """Rows of several services as a registry. What is no snapshot is left out, and spoils nobody else's."""

    def __init__(self, snapshots: Iterable[tuple[str, str, bytes]]) -> None:
        self._snapshots = list(snapshots)

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for service, instance, data in self._snapshots:
            try:
                rows = _unpack(data)
            except (ValueError, TypeError, msgpack.UnpackException):
                log.warning("the metrics of %s %s are unreadable", service, instance)
                continue
            for name, documentation, kind, samples in rows:
                metric = merged.setdefault(name, Metric(name, documentation, kind))
                if metric.type != kind:
                    continue  # another version's
                for sample_name, labels, value in samples:
                    metric.add_sample(sample_name, labels | {"service": service, "instance": instance}, value)
        return merged.values()


def _unpack(data: bytes) -> list[tuple[str, str, str, list[tuple[str, dict[str, str], float]]]]:
    """ValueError or TypeError for anything else than a snapshot."""
    if len(data) > MAX_SNAPSHOT_BYTES:
        raise ValueError("too large")
    rows = []
    for name, documentation, kind, samples in msgpack.unpackb(data):
        Metric(name, str(documentation), kind)
        for sample_name, labels, value in samples:
            Metric(sample_name, "", "untyped")
            float(value)
            if type(labels) is not dict or any(type(text) is not str for pair in labels.items() for text in pair):
                raise TypeError("a label is no text")
        rows.append((name, documentation, kind, samples))
    return rows


def render(snapshots: Iterable[tuple[str, str, bytes]]) -> bytes:
    """(service, instance, snapshot) rows as Prometheus text, with labels `service` and `instance` on each sample."""
    registry: Any = _Snapshots(snapshots)
    return generate_latest(registry)


async def publish(redis: Any, prefix: str, kind: str, incarnation: str, registry: CollectorRegistry) -> None:
    """Leaves it out while Redis is full: others need the room."""
    with contextlib.suppress(CannotWrite):
        await redis.set(f"{prefix}metrics:{kind}:{incarnation}", snapshot(registry), px=SNAPSHOT_TTL_MS)


async def collect(redis: Any, prefix: str, members: Iterable[tuple[str, str]]) -> list[tuple[str, str, bytes]]:
    """The snapshots of these (kind, incarnation) members that are there."""
    rows = list(members)
    if not rows:
        return []
    values = await redis.mget([f"{prefix}metrics:{kind}:{incarnation}" for kind, incarnation in rows])
    return [(kind, incarnation, data) for (kind, incarnation), data in zip(rows, values, strict=True) if data]
