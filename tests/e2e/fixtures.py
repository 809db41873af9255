"""Stacks of real processes: one for all tests of a session that disturb nothing, and as many of their own as needed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from shared.embedded_redis import find_server
from tests import helpers
from tests.e2e.clients import TIMEOUT_S, Answer, Client
from tests.e2e.load import mixed
from tests.e2e.stack import Stack


@pytest.fixture(scope="session")
def stacks_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """For all stacks of the session, which keep apart by their models' names; nobody empties it."""
    with helpers.running_redis(find_server(), tmp_path_factory.mktemp("stacks-redis")) as url:
        yield url


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_stack(stacks_redis: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Nobody may kill any of it. It answers fast, and its pool is small enough to be filled by a test."""
    env = {"scripted_step_ms": 1, "scripted_num_blocks": 512, "max_model_len": 2048}
    async with Stack(stacks_redis, tmp_path_factory.mktemp("shared"), workers=2, env=env) as stack:
        stack.allowed.append("the engine failed on")  # some requests ask for it
        yield stack


@pytest.fixture
def new_stack(stacks_redis: str, tmp_path: Path) -> Callable[..., Stack]:
    """Makes stacks of a test's own: `async with new_stack(workers=2) as stack`."""
    numbers = itertools.count()

    def make(**options: Any) -> Stack:
        return Stack(options.pop("redis_url", stacks_redis), tmp_path / f"stack-{next(numbers)}", **options)

    return make


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., Client]]:
    """Makes clients of a gateway: `connect(url)`, or with a `timeout_s` of its own."""
    async with contextlib.AsyncExitStack() as clients:

        def make(url: str, timeout_s: float = TIMEOUT_S) -> Client:
            client = Client(url, timeout_s)
            clients.push_async_callback(client.close)
            return client

        yield make


@pytest.fixture
async def client(shared_stack: Stack, connect: Callable[..., Client]) -> Client:
    return connect(shared_stack.url)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def undisturbed(shared_stack: Stack) -> list[Answer]:
    """The answers to `mixed("load")` where nothing happens."""
    client = Client(shared_stack.url)
    answers = await client.ask_all(mixed("load"))
    await client.close()
    for answer in answers:
        answer.check()
    return answers
