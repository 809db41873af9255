"""Metrics of all services in one place: each publishes its own as a snapshot in Redis, any gateway renders them all.

So one scrape of one gateway shows the whole pipeline, and services without an HTTP port need none. A snapshot expires
soon after its service. Knows nothing of what is measured: services declare their metrics on a registry of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import msgpack
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from redis.exceptions import OutOfMemoryError

SNAPSHOT_TTL_MS = 15_000
PUBLISH_EVERY_S = 2.0
MAX_SNAPSHOT_BYTES = 1 << 20


def snapshot(registry: CollectorRegistry) -> bytes:
    """All samples of a registry; time stamps and exemplars are left out."""
    rows = []
    for metric in registry.collect():
        samples = [(s.name, s.labels, s.value) for s in metric.samples]
        rows.append((metric.name, metric.documentation, metric.type, samples))
    data: bytes = msgpack.packb(rows)
    return data


class _Snapshots:
    def __init__(self, snapshots: Iterable[tuple[str, str, bytes]]) -> None:
        self._snapshots = list(snapshots)

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for service, instance, data in self._snapshots:
            if len(data) > MAX_SNAPSHOT_BYTES:
                continue
            for name, documentation, kind, samples in msgpack.unpackb(data):
                metric = merged.setdefault(name, Metric(name, documentation, kind))
                for sample_name, labels, value in samples:
                    metric.add_sample(sample_name, labels | {"service": service, "instance": instance}, value)
        return merged.values()


def render(snapshots: Iterable[tuple[str, str, bytes]]) -> bytes:
    """(service, instance, snapshot) rows as Prometheus text, with labels `service` and `instance` on each sample."""
    registry: Any = _Snapshots(snapshots)
    return generate_latest(registry)


async def publish(redis: Any, prefix: str, kind: str, incarnation: str, registry: CollectorRegistry) -> None:
    """Leaves it out while Redis is full: others need the room."""
    with contextlib.suppress(OutOfMemoryError):
        await redis.set(f"{prefix}metrics:{kind}:{incarnation}", snapshot(registry), px=SNAPSHOT_TTL_MS)


async def collect(redis: Any, prefix: str, members: Iterable[tuple[str, str]]) -> list[tuple[str, str, bytes]]:
    """The snapshots of these (kind, incarnation) members that are there."""
    rows = list(members)
    if not rows:
        return []
    values = await redis.mget([f"{prefix}metrics:{kind}:{incarnation}" for kind, incarnation in rows])
    return [(kind, incarnation, data) for (kind, incarnation), data in zip(rows, values, strict=True) if data]
