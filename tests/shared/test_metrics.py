"""One scrape shows the whole pipeline: snapshots of all services, merged and labelled."""

from __future__ import annotations

import msgpack
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from shared.metrics import MAX_SNAPSHOT_BYTES, SNAPSHOT_TTL_MS, collect, publish, render, snapshot
from tests.shared.script_world import world_at


def registry(running: float) -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("headrace_running", "Sequences", registry=registry).set(running)
    Counter("headrace_events", "Things", ["event"], registry=registry).labels('a"\n').inc(2)
    Histogram("headrace_seconds", "Durations", buckets=[0.1, 1], registry=registry).observe(0.5)
    return registry


def samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (s.name, frozenset(s.labels.items())): s.value
        for family in text_string_to_metric_families(text.decode())
        for s in family.samples
        if not s.name.endswith("_created")
    }


def where(instance: str, **labels: str) -> frozenset[tuple[str, str]]:
    return frozenset((labels | {"service": "worker", "instance": instance}).items())


def test_snapshots_of_several_instances_are_one_text() -> None:
    text = render([("worker", name, snapshot(registry(n))) for name, n in (("w1", 1), ("w2", 2))])
    found = samples(text)
    assert (found["headrace_running", where("w1")], found["headrace_running", where("w2")]) == (1, 2)
    assert found["headrace_events_total", where("w1", event='a"\n')] == 2
    assert found["headrace_seconds_bucket", where("w2", le="1.0")] == 1
    assert text.count(b"# TYPE headrace_running gauge") == 1
    assert b"# TYPE headrace_seconds histogram" in text


def test_no_snapshot_is_no_text() -> None:
    assert render([]) == b""


@pytest.mark.parametrize(
    "data",
    [
        5, [1], [["x", "doc", "no such kind", []]], [["x", "doc", "gauge", [["x", {}, "not a number"]]]],
        [["x", "doc", "gauge", [[]]]], [["x", "doc", "gauge", [["x", 5, 1.0]]]], [["x", "doc", "gauge", 5]],
        [["x", "doc", "gauge", [["x", {"label": 5}, 1.0]]]],
        ["x" * MAX_SNAPSHOT_BYTES], [["headrace_running", "doc", "counter", [["headrace_running", {}, 1.0]]]],
    ],
    ids=lambda data: str(data)[:60],
)  # fmt: skip
def test_a_broken_snapshot_spoils_only_itself(data: object) -> None:
    whole = ("worker", "w1", snapshot(registry(1)))
    assert samples(render([whole, ("worker", "w0", msgpack.packb(data))])) == samples(render([whole]))


@pytest.mark.parametrize("data", [b"", b"garbage", b"\xdd\xff\xff\xff\xff"])
def test_bytes_that_are_no_snapshot_spoil_nothing(data: bytes) -> None:
    text = render([("worker", "w0", data), ("worker", "w1", snapshot(registry(1)))])
    assert samples(text) == samples(render([("worker", "w1", snapshot(registry(1)))]))


async def test_what_is_published_is_collected_until_it_expires(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        prefix = w.scripts.prefix
        await publish(w.redis, prefix, "worker", "w1", registry(1))
        assert 0 < await w.redis.pttl(f"{prefix}metrics:worker:w1") <= SNAPSHOT_TTL_MS
        rows = await collect(w.redis, prefix, [("worker", "w1"), ("store", "c1")])
        assert [(kind, name) for kind, name, _ in rows] == [("worker", "w1")]
        assert samples(render(rows))["headrace_running", where("w1")] == 1
        assert await collect(w.redis, prefix, []) == []


async def test_a_full_server_gets_no_metrics(any_redis_url: str) -> None:
    async with world_at(any_redis_url) as w:
        async with w.full_server():
            await publish(w.redis, w.scripts.prefix, "worker", "w1", registry(1))
        assert await w.everything() == {}
