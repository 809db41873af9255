"""Connections and streams: what is fixed of redis-py's defaults, and that reading loses and repeats nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, RedisError

from shared import bus
from shared.bus import (
    LOST,
    MAX_BLOCK_MS,
    SOCKET_TIMEOUT_S,
    Entry,
    StreamReader,
    backoff,
    connect,
    id_key,
    wait_for_redis,
)
from tests.helpers import wait_until


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


def test_a_blocking_read_outlasts_no_time_out() -> None:
    client = connect("redis://localhost:1")
    options = client.connection_pool.connection_kwargs
    assert options["socket_timeout"] == SOCKET_TIMEOUT_S > 2 * MAX_BLOCK_MS / 1000
    assert options["socket_connect_timeout"] == bus.CONNECT_TIMEOUT_S
    assert options["protocol"] == 2 and not options["decode_responses"]


async def test_nothing_is_repeated_inside_the_library(redis: Redis, redis_url: str) -> None:
    """After a lost connection a command may have run: only its caller knows whether repeating it is harmless."""
    other = connect(redis_url)
    pausing = await redis.client_id()
    await other.client_pause(60_000, all=False)  # a write is not answered
    writing = asyncio.ensure_future(redis.incr("n"))
    await wait_until(lambda: _blocked_clients(other))
    await other.client_kill_filter(_id=str(pausing))
    await other.client_unpause()
    with pytest.raises(LOST):
        await writing
    assert await redis.incr("n") == 1  # it reconnects for the next command
    await other.aclose()


async def test_each_client_has_a_pool_of_its_own(redis_url: str, redis: Redis) -> None:
    other = connect(redis_url)
    assert other.connection_pool is not redis.connection_pool
    await other.aclose()


def test_ids_are_ordered_as_numbers() -> None:
    ids = ["0-1", "5", "5-1", "9-0", "10-0", "10-2", "10-10"]
    assert ids == sorted({*ids}, key=id_key) and id_key("5") == id_key("5-0")


async def test_a_reader_goes_on_where_it_was(redis: Redis) -> None:
    reader = StreamReader(redis, "p:", {"a": "0-0", "b": "5-0"})
    for stream, id in (("p:a", "1-0"), ("p:a", "2-0"), ("p:b", "4-0"), ("p:b", "6-0")):
        await redis.xadd(stream, {"n": id}, id=id)
    entries = await reader.read(0, count=1)
    assert entries == [Entry("a", "1-0", {b"n": b"1-0"}), Entry("b", "6-0", {b"n": b"6-0"})]
    assert reader.last == {"a": "1-0", "b": "6-0"}
    assert [e.id for e in await reader.read(0)] == ["2-0"]
    assert await reader.read(0) == [] and reader.last == {"a": "2-0", "b": "6-0"}


async def test_a_reader_waits_for_the_first_entry(redis: Redis, redis_url: str) -> None:
    reader = StreamReader(redis, "p:", {"a": "0-0", "b": "0-0"})
    writer = connect(redis_url)
    reading = asyncio.ensure_future(reader.read(3000))
    await wait_until(lambda: _blocked_clients(writer))
    await writer.xadd("p:b", {"n": "1"})
    assert [e.stream for e in await reading] == ["b"]
    await writer.aclose()


async def _blocked_clients(client: Redis) -> bool:
    return bool((await client.info("clients"))["blocked_clients"])


async def test_a_reader_waits_no_longer_than_asked(redis: Redis) -> None:
    started = time.monotonic()
    assert await StreamReader(redis, "p:", {"a": "0-0"}).read(20) == []
    assert 0.015 < time.monotonic() - started < 2


async def test_a_reader_does_not_block_longer_than_the_socket(redis: Redis) -> None:
    with pytest.raises(AssertionError):
        await StreamReader(redis, "p:", {"a": "0-0"}).read(MAX_BLOCK_MS + 1)


async def test_a_read_that_is_cut_off_loses_nothing(redis: Redis, redis_url: str) -> None:
    reader = StreamReader(redis, "p:", {"a": "0-0"})
    other = connect(redis_url)
    reading = asyncio.ensure_future(reader.read(3000))
    await wait_until(lambda: _blocked_clients(other))
    await other.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(LOST):
        await reading
    await other.xadd("p:a", {"n": "1"})
    reading = asyncio.ensure_future(reader.read(3000))
    assert [e.fields for e in await reading] == [{b"n": b"1"}]
    await other.aclose()


async def test_a_cancelled_read_leaves_the_client_usable(redis: Redis, redis_url: str) -> None:
    other = connect(redis_url)
    reader = StreamReader(redis, "p:", {"a": "0-0"})
    reading = asyncio.ensure_future(reader.read(3000))
    await wait_until(lambda: _blocked_clients(other))
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await redis.xadd("p:a", {"n": "1"})
    assert len(await reader.read(0)) == 1
    await other.aclose()


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    delays: list[float] = []

    async def sleep(delay: float) -> None:
        delays.append(delay)

    monkeypatch.setattr(bus.asyncio, "sleep", sleep)
    return delays


async def test_distances_grow_with_jitter_up_to_a_bound(slept: list[float]) -> None:
    async for _ in backoff():
        if len(slept) == 40:
            break
    assert 0.025 <= slept[0] <= 0.075 and slept[0] < slept[4] < slept[9]
    assert all(1.0 <= delay <= 3.0 for delay in slept[10:]) and len(set(slept)) == 40


async def test_waiting_for_redis_ends(redis: Redis, redis_url: str) -> None:
    await wait_for_redis(redis, 5)
    absent = connect("unix:///nowhere/redis.sock")
    with pytest.raises(RedisError, match="does not answer"):
        await wait_for_redis(absent, 0)
    await absent.aclose()


async def test_waiting_for_redis_outlasts_a_late_start(slept: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    client = connect("redis://localhost:1")
    answers = iter([ConnectionError("not yet"), ConnectionError("not yet"), None])

    async def ping() -> None:
        error = next(answers)
        if error:
            raise error

    monkeypatch.setattr(client, "ping", ping)
    await wait_for_redis(client, 60)
    assert len(slept) == 2
