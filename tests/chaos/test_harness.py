"""The harness itself: every cut fits the product, and a link does what it is told."""

from __future__ import annotations

import ast
import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import redis

from tests.chaos import cuts
from tests.chaos.faults import Faults
from tests.chaos.link import DOWN, UP, Link, Mode
from tests.chaos.play import ChaosStack
from tests.chaos.sabotage import Cut, sabotaged_tree
from tests.chaos.schedule import ON_REDIS, Fault
from tests.e2e.own_redis import OwnRedis
from tests.helpers import wait_until

Connected = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


def all_cuts() -> Iterator[Cut]:
    for value in vars(cuts).values():
        if isinstance(value, Cut):
            yield value
        elif isinstance(value, tuple):
            yield from value


def test_every_cut_fits_the_product(tmp_path: Path) -> None:
    found = tuple(all_cuts())
    tree = sabotaged_tree(tmp_path, found)
    assert len(found) > 5
    for cut in found:
        if cut.path.endswith(".py"):
            ast.parse((tree / cut.path).read_text())


def test_a_cut_that_fits_nothing_is_noticed(tmp_path: Path) -> None:
    for wrong in (Cut("shared/bus.py", old="nothing like this", body=""), Cut("shared/bus.py", "", function="no_such")):
        with pytest.raises(AssertionError, match="0 times"):
            sabotaged_tree(tmp_path / wrong.function, (wrong,))


@pytest.mark.parametrize("what", list(ON_REDIS))
async def test_a_fault_of_redis_is_carried_out_and_ends(what: str, tmp_path: Path) -> None:
    with OwnRedis(tmp_path) as server:
        faults = Faults(cast(ChaosStack, None), server)
        await faults.carry_out(Fault(0, what, "redis", 0, 0.1))
        with redis.Redis.from_url(server.url) as client:
            assert client.set("key", "value")


@pytest.fixture
async def echo() -> AsyncIterator[Link]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(100):
                writer.write(data)
            writer.close()
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with Link(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0") as link:
        yield link
    server.close()
    await server.wait_closed()


@pytest.fixture
async def connected(echo: Link) -> AsyncIterator[Connected]:
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = echo.url.removeprefix("redis://").removesuffix("/0").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writers.append(writer)
        return reader, writer

    yield connect
    for writer in writers:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, word: bytes) -> bool:
    writer.write(word)
    try:
        return await asyncio.wait_for(reader.readexactly(len(word)), 0.3) == word
    except TimeoutError:
        return False


@pytest.mark.parametrize("directions", [(UP, DOWN), (UP,), (DOWN,)])
async def test_a_link_that_swallows_breaks_those_that_lost_something(
    directions: tuple[str, ...], echo: Link, connected: Connected
) -> None:
    (reader, writer), (other_reader, other_writer) = await connected(), await connected()
    assert await answers(reader, writer, b"one") and await answers(other_reader, other_writer, b"eins")
    async with echo.broken(Mode.SWALLOW, directions):
        assert not await answers(reader, writer, b"two")
        assert echo.num_swallowed == 3
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    assert await answers(other_reader, other_writer, b"zwei"), "it has lost nothing"
    assert await answers(*await connected(), b"three")


@pytest.mark.parametrize("directions", [(UP, DOWN), (UP,), (DOWN,)])
async def test_a_link_that_holds_back_delivers_late(
    directions: tuple[str, ...], echo: Link, connected: Connected
) -> None:
    reader, writer = await connected()
    async with echo.broken(Mode.HOLD, directions):
        assert not await answers(reader, writer, b"late")
    assert await reader.readexactly(4) == b"late"
    assert await answers(reader, writer, b"soon")


async def test_an_end_is_not_heard_through_a_broken_link(echo: Link, connected: Connected) -> None:
    reader, writer = await connected()
    async with echo.broken(Mode.SWALLOW):
        writer.close()
        await asyncio.sleep(0.1)
        assert len(echo._connections) == 1
    await wait_until(lambda: not echo._connections)


async def test_a_reset_is_heard(echo: Link, connected: Connected) -> None:
    reader, _ = await connected()
    await wait_until(lambda: echo._connections)
    echo.reset()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
