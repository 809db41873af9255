"""The lean client: many tasks on one connection, and what becomes of commands when it is lost, slow or given up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    NoScriptError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from shared import bus
from shared.bus import LOST, connect
from tests.helpers import wait_until

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


@contextlib.asynccontextmanager
async def server(serve: Serve) -> AsyncIterator[Redis]:
    """A client of something else than a Redis."""
    ended = asyncio.Event()

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(reader, writer)
        writer.close()
        ended.set()

    listening = await asyncio.start_server(serve_one, "127.0.0.1", 0)
    client = connect(f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    yield client
    await client.aclose()
    listening.close()
    await ended.wait()


async def test_commands_of_many_tasks_share_a_connection_and_get_their_own_replies(redis: Redis) -> None:
    assert await asyncio.gather(*(redis.incr("n", i) for i in range(50))) == [i * (i + 1) // 2 for i in range(50)]
    await wait_until(lambda: _has_connections(redis, 1))


async def test_a_reply_is_what_redis_py_makes_of_it(redis: Redis) -> None:
    assert await redis.hset("h", mapping={"a": 1}) == 1 and await redis.hgetall("h") == {b"a": b"1"}
    assert await redis.set("k", b"\x00\r\n") is True and await redis.get("k") == b"\x00\r\n"
    assert isinstance(await redis.config_get("maxmemory"), dict)  # two words


async def test_an_error_is_that_of_its_command_alone(redis: Redis) -> None:
    replies = await asyncio.gather(
        redis.set("k", 1), redis.lpush("k", 1), redis.evalsha("0" * 40, 0), redis.get("k"), return_exceptions=True
    )
    assert replies[0] is True and replies[3] == b"1"
    assert isinstance(replies[1], ResponseError) and isinstance(replies[2], NoScriptError)


@pytest.mark.parametrize("value", [None, object(), "\ud800"], ids=["none", "an object", "half a character"])
async def test_a_command_that_cannot_be_written_takes_nobodys_reply(redis: Redis, value: Any) -> None:
    with pytest.raises((TypeError, ValueError, RedisError)):
        await redis.execute_command("ECHO", value)
    assert await asyncio.wait_for(asyncio.gather(*(redis.echo(str(i)) for i in range(3))), 2) == [b"0", b"1", b"2"]


async def test_a_reply_that_nobody_waits_for_is_dropped(redis: Redis) -> None:
    await redis.ping()
    given_up = asyncio.ensure_future(redis.incr("n"))
    await asyncio.sleep(0)
    given_up.cancel()
    assert await asyncio.gather(redis.incr("n"), redis.echo("a")) == [2, b"a"]
    assert given_up.cancelled()
    await wait_until(lambda: _has_connections(redis, 1))


async def test_a_read_that_blocks_holds_up_nobody(redis: Redis) -> None:
    reads = [asyncio.ensure_future(redis.xread({f"s{i}": "$"}, block=4000)) for i in range(2)]
    await wait_until(lambda: _num_blocked(redis, 2))
    for i in range(2):
        await redis.xadd(f"s{i}", {"i": i})
    assert [reply[0][0] for reply in await asyncio.gather(*reads)] == [b"s0", b"s1"]
    await redis.xread({"s0": "0-0"}, block=4000)
    await wait_until(lambda: _has_connections(redis, 2))  # one for reads that block is kept


async def test_a_read_that_is_given_up_takes_its_connection_along(redis: Redis) -> None:
    read = asyncio.ensure_future(redis.xread({"s": "$"}, block=4000))
    await wait_until(lambda: _num_blocked(redis, 1))
    read.cancel()
    await wait_until(lambda: _has_connections(redis, 1))
    assert await redis.xread({"s": "$"}, block=1) == []


async def _num_blocked(redis: Redis, number: int) -> bool:
    return bool((await redis.info("clients"))["blocked_clients"] == number)


async def _has_connections(redis: Redis, number: int) -> bool:
    return len(await redis.client_list()) == number


async def test_the_database_and_password_of_the_address_are_used(redis_url: str, redis: Redis) -> None:
    other = connect(f"{redis_url}?db=99")
    with pytest.raises(ResponseError, match="DB index"):
        await other.ping()
    known, unknown = connect(f"{redis_url}?password=secret"), connect(redis_url)
    await redis.config_set("requirepass", "secret")
    try:
        assert await known.ping()
        with pytest.raises(AuthenticationError):
            await unknown.ping()
    finally:
        await redis.config_set("requirepass", "")
    for client in (other, known, unknown):
        await client.aclose()


async def test_all_that_is_under_way_fails_when_the_connection_is_lost() -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)

    async with server(close) as client:
        for error in await asyncio.gather(*(client.ping() for _ in range(3)), return_exceptions=True):
            assert isinstance(error, ConnectionError) and isinstance(error, LOST)


async def test_nothing_is_sent_on_a_connection_that_has_just_been_lost(redis: Redis) -> None:
    """It would wait for an answer until its time is over."""
    await redis.ping()
    link = redis._shared  # type: ignore[attr-defined]
    link.close(ConnectionError("lost"))
    with pytest.raises(ConnectionError, match="lost"):
        await asyncio.wait_for(link.call("PING"), 1)


async def test_what_is_not_answered_in_time_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus, "SOCKET_TIMEOUT_S", 0.05)

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"+PONG\r\n")
        await reader.read()

    async with server(answer_once) as client:
        answered, lost, late = await asyncio.gather(*(client.ping() for _ in range(3)), return_exceptions=True)
        assert answered is True
        assert isinstance(lost, TimeoutError) and isinstance(late, TimeoutError) and isinstance(lost, LOST)


async def test_what_is_no_reply_ends_the_connection() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()

    async with server(babble) as client:
        with pytest.raises(ConnectionError, match="no reply"):
            await client.ping()


async def test_one_connection_is_made_for_all_who_wait_for_it(redis: Redis) -> None:
    waits = [asyncio.ensure_future(redis.ping()) for _ in range(3)]
    await asyncio.sleep(0)
    waits[0].cancel()
    assert await asyncio.gather(*waits[1:]) == [True, True]
    await wait_until(lambda: _has_connections(redis, 1))


async def test_after_a_failed_connect_the_next_command_tries_again(redis_url: str, tmp_path: object) -> None:
    absent = connect(f"unix://{tmp_path}/redis.sock")
    for _ in range(2):
        with pytest.raises(LOST):
            await absent.ping()
    await absent.aclose()
