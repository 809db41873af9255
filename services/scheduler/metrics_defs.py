"""The scheduler's metrics, all of them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.scheduler.core import SchedulerCore
from shared.metrics import ProcessMetrics

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class SchedulerMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._process = ProcessMetrics(self.registry)
        self._waiting = self._gauge("headrace_num_requests_waiting", "Sequences in the queue of this scheduler")
        self._running = self._gauge("headrace_num_requests_running", "Sequences placed on the workers it leases")
        self._workers = self._gauge("headrace_workers_leased", "Workers it leases")
        self._free = self._gauge("headrace_kv_blocks_free", "Blocks free or evictable in the pools of its workers")
        self._spare = self._gauge("headrace_kv_blocks_spare", "Blocks in the spare grants of its workers")
        self._waits = Histogram(
            "headrace_request_queue_time_seconds", "From admission until a sequence is first placed", buckets=SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self._decisions = Counter(
            "headrace_scheduler_events", "What became of sequences on their way to a worker", ["event"],
            registry=self.registry,
        )  # fmt: skip
        self._redis_cpu = Counter("headrace_redis_cpu_seconds", "CPU time of Redis", registry=self.registry)
        self._redis_cpu_seen = 0.0
        self._seen: dict[str, int] = {}

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    def observe(self, core: SchedulerCore) -> None:
        self._process.observe()
        views = core.workers.values()
        self._waiting.set(len(core.queue))
        self._running.set(sum(len(v.running) for v in views))
        self._workers.set(len(core.workers))
        self._free.set(sum(v.num_free for v in views))
        self._spare.set(sum(len(v.spares) for v in views))
        for ms in core.take_waits_ms():
            self._waits.observe(ms / 1000)
        for event, count in core.counts.items():
            self._decisions.labels(event).inc(max(0, count - self._seen.get(event, 0)))
        self._seen = dict(core.counts)

    def observe_redis(self, cpu: dict[str, float]) -> None:
        """cpu: the section of that name in Redis' INFO."""
        used = float(cpu.get("used_cpu_sys", 0.0)) + float(cpu.get("used_cpu_user", 0.0))
        self._redis_cpu.inc(max(0.0, used - self._redis_cpu_seen))
        self._redis_cpu_seen = used
