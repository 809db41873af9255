"""Mixed load for a long time, and what grows meanwhile: memory, descriptors, tasks of each process, and Redis. Memory
twice: as the system sees it, and in pieces (blocks) that Python has given out, which no fragmentation blurs.

MINUTES=30 python -m tests.bench.soak

Real processes with the scripted engine on a Redis of their own: requests of every kind, wrong ones, clients that
leave, and such that come back. Prints a line fitted to the second half of each series, and fails where one climbs, or
where blocks, records and keys are not back to their start at the end. Two things grow by design, up to a bound: the
tokenizer keeps 10,000 texts (35 MB here, filled before the clock starts), a store the last 16,384 endings of a pool
(5 MB, over half an hour of this load).
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import math
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from shared.embedded_redis import find_server
from tests import helpers
from tests.e2e.clients import Client, path_of
from tests.e2e.load import mixed, plain
from tests.e2e.stack import Stack
from tests.helpers import wait_until

MINUTES = float(os.environ.get("MINUTES", "30"))
NUM_CLIENTS = int(os.environ.get("CLIENTS", "6"))
SETTINGS = {
    "scripted_step_ms": 2, "scripted_num_blocks": 1024, "max_model_len": 2048, "retention_s": 20,
    "request_timeout_s": 60,
}  # fmt: skip
SAMPLES = 240
# Of the second half: what is no leak but the noise of allocators, buffers and a load that is never twice the same.
MOST_PER_HOUR = {"rss_kib": 12_000, "fds": 12, "tasks": 12, "blocks": 10_000}
MOST_OF_A_STORE = {"rss_kib": 25_000, "blocks": 400_000}  # until it remembers as many endings as it may
NUM_CACHED_TEXTS = 10_500
WRONG: list[dict[str, Any]] = [
    {"prompt": 7}, {"prompt": "x", "n": 99}, {"prompt": [1 << 40]}, {"prompt": "x", "temperature": -1}, {},
    {"messages": [{"role": "user", "content": 1}]}, {"prompt": "x" * 100_000}, {"prompt": "x", "model": "another"},
]  # fmt: skip


@dataclass
class Series:
    """(minutes, value) of one thing that is watched."""

    points: list[tuple[float, float]] = field(default_factory=list)

    def slope_per_hour(self) -> float:
        """By least squares, over the second half: before it caches and pools fill."""
        half = self.points[len(self.points) // 2 :]
        mean_t = sum(t for t, _ in half) / len(half)
        mean_v = sum(v for _, v in half) / len(half)
        spread = sum((t - mean_t) ** 2 for t, _ in half)
        return 60 * sum((t - mean_t) * (v - mean_v) for t, v in half) / spread if spread else 0.0

    def growth(self) -> float:
        """Of the last quarter over the third."""
        quarter = max(1, len(self.points) // 4)
        values = [v for _, v in self.points]
        return sum(values[-quarter:]) / quarter - sum(values[-2 * quarter : -quarter]) / quarter


class Load:
    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.counts: collections.Counter[str] = collections.Counter()
        self._numbers = itertools.count()
        self._random = random.Random(1)

    async def run(self, until: float) -> None:
        client = Client(self.stack.url, timeout_s=60)
        try:
            while time.monotonic() < until:
                await self._one(client)
        finally:
            await client.close()

    async def _one(self, client: Client) -> None:
        kind = self._random.choices(["mixed", "wrong", "leaves", "returns"], [6, 2, 2, 1])[0]
        name = f"soak {next(self._numbers)}"
        if kind == "wrong":
            body = self._random.choice(WRONG)
            async with client.session.post(client.url + path_of(body), json=body) as response:
                assert response.status in (400, 404), response.status
        elif kind == "leaves":
            await self._leave(client, plain(name, 200))
        elif kind == "returns":
            await self._return(client, plain(name, 60))
        else:
            body = self._random.choice(mixed(name))
            answer = await client.ask(body)
            answer.check()
        self.counts[kind] += 1

    async def _leave(self, client: Client, body: dict[str, Any]) -> None:
        async with client.session.post(client.url + path_of(body), json=body) as response:
            await response.content.readline()

    async def _return(self, client: Client, body: dict[str, Any]) -> None:
        """Goes away after an event, and takes the answer up where it was."""
        headers = {"X-Headrace-Resume": "10"}
        async with client.session.post(client.url + path_of(body), json=body, headers=headers) as response:
            place = (await response.content.readline()).decode().removeprefix("id: ").strip()
        rid = place.partition(":")[0]
        url = f"{client.url}/v1/streams/{rid}"
        async with client.session.get(url, headers={"Last-Event-ID": place}) as response:
            assert response.status == 200, await response.text()
            assert (await response.text()).endswith("data: [DONE]\n\n")


async def watch(stack: Stack, started: float, until: float, series: dict[tuple[str, str], Series]) -> None:
    while time.monotonic() < until:
        minutes = (time.monotonic() - started) / 60
        for process in stack.processes():
            seen = psutil.Process(process.pid)
            gauges = stack.state.gauges(process.kind, process.incarnation)
            values = {"rss_kib": seen.memory_info().rss / 1024, "fds": seen.num_fds()}
            if gauges:  # a worker whose lease ran out on a busy machine has another name by now
                values["tasks"] = gauges["headrace_asyncio_tasks"]
                values["blocks"] = gauges.get("headrace_python_memory_blocks", 0)
            for what, value in values.items():
                series[process.name, what].points.append((minutes, value))
        memory = stack.state.redis.info("memory")["used_memory"] / 1024
        series["redis", "redis_kib"].points.append((minutes, memory))
        series["redis", "redis_keys"].points.append((minutes, stack.state.redis.dbsize()))
        await asyncio.sleep(MINUTES * 60 / SAMPLES)


def report(series: dict[tuple[str, str], Series]) -> bool:
    """Prints the table; whether nothing climbs."""
    fine = True
    print(f"{'process':12} {'what':10} {'first':>10} {'last':>10} {'per hour':>10} {'growth':>8}")  # noqa: T201
    for (name, what), one in sorted(series.items()):
        slope = one.slope_per_hour()
        most = MOST_PER_HOUR.get(what, math.inf)  # what is in Redis expires, so that it follows the load
        if name.startswith("store"):
            most = MOST_OF_A_STORE.get(what, most)
        climbs = slope > most and one.growth() > most / 60
        fine = fine and not climbs
        mark = "  CLIMBS" if climbs else ""
        first, last = one.points[0][1], one.points[-1][1]
        print(f"{name:12} {what:10} {first:10.0f} {last:10.0f} {slope:10.1f} {one.growth():8.1f}{mark}")  # noqa: T201
    return fine


async def warm_up(stack: Stack) -> None:
    async with aiohttp.ClientSession() as session:
        for number in range(NUM_CACHED_TEXTS):
            async with session.post(
                stack.url + "/tokenize", json={"prompt": f"soak warm-up {number} " + "x" * 50}
            ) as r:
                assert r.status == 200


async def soak(redis_url: str, folder: Path) -> bool:
    async with Stack(redis_url, folder, workers=2, gateways=1, env=SETTINGS) as stack:
        await warm_up(stack)
        num_keys = stack.state.redis.dbsize()
        free = {worker: stack.state.num_free(worker) for worker in stack.state.alive("worker")}
        series: dict[tuple[str, str], Series] = collections.defaultdict(Series)
        load, started = Load(stack), time.monotonic()
        until = started + MINUTES * 60
        async with asyncio.TaskGroup() as group:
            group.create_task(watch(stack, started, until, series))
            for _ in range(NUM_CLIENTS):
                group.create_task(load.run(until))
        print(f"{MINUTES:g} minutes, {NUM_CLIENTS} clients, {dict(load.counts)}")  # noqa: T201
        fine = report(series)
        await stack.check_at_rest()
        await wait_until(
            lambda: stack.state.redis.dbsize() <= num_keys + 5, 2 * float(SETTINGS["retention_s"]), every=1
        )
        left = {worker: stack.state.num_free(worker) for worker in stack.state.alive("worker")}
        spares = {w: stack.state.gauges("worker", w).get("headrace_worker_kv_blocks{spare}", 0) for w in left}
        print(f"free blocks: {free} before, {left} after, of which given out as spares: {spares}")  # noqa: T201
    return fine


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, helpers.running_redis(find_server(), Path(folder)) as url:
        fine = asyncio.run(soak(url, Path(folder) / "stack"))
    return 0 if fine else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except aiohttp.ClientError as e:
        sys.exit(f"the load failed: {e}")
