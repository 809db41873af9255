"""The cache store's metrics, all of them."""

from __future__ import annotations

from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.cache_store.fleet_store import FleetStore
from services.cache_store.store_core import StoreCore
from shared.metrics import ProcessMetrics


class StoreMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._process = ProcessMetrics(self.registry)
        self._pools = Gauge("headrace_pools_leased", "Pools whose blocks this store owns", registry=self.registry)
        self._blocks = Gauge("headrace_kv_blocks", "Blocks of its pools", ["state"], registry=self.registry)
        self._events = Counter(
            "headrace_prefix_cache", "What the prefix index did, in tokens, blocks or calls", ["count"],
            registry=self.registry,
        )  # fmt: skip
        self._fleet = {
            name: Gauge(f"headrace_fleet_{name}", text, registry=self.registry)
            for name, text in (
                ("tenants", "Tenants whose answers it has statistics of"),
                ("entries", "Entries of those: what has followed which tokens"),
                ("bytes", "Memory of those"),
            )
        }
        self._fleet_events = Counter(
            "headrace_fleet", "What became of answers that workers told, and what workers were told, in bytes",
            ["count"], registry=self.registry,
        )  # fmt: skip
        self._fleet_seen: dict[str, int] = {}
        self._seen: dict[str, dict[str, int]] = {}

    def observe(self, core: StoreCore, fleet: FleetStore) -> None:
        self._process.observe()
        self._observe_fleet(fleet)
        managers = {worker: pool.manager for worker, pool in core.pools.items()}
        self._pools.set(len(managers))
        total, free = sum(m.num_blocks for m in managers.values()), sum(m.num_free for m in managers.values())
        self._blocks.labels("free").set(free)
        self._blocks.labels("used").set(total - free)
        for worker, manager in managers.items():
            counts, seen = asdict(manager.counts), self._seen.get(worker, {})
            for name, value in counts.items():
                self._events.labels(name).inc(max(0, value - seen.get(name, 0)))
            self._seen[worker] = counts
        self._seen = {w: c for w, c in self._seen.items() if w in managers}

    def _observe_fleet(self, fleet: FleetStore) -> None:
        self._fleet["tenants"].set(fleet.num_tenants)
        self._fleet["entries"].set(fleet.num_entries)
        self._fleet["bytes"].set(fleet.num_bytes)
        for name, value in fleet.counts.items():
            self._fleet_events.labels(name).inc(value - self._fleet_seen.get(name, 0))
            self._fleet_seen[name] = value
