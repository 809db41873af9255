"""A replica takes over for a Redis that dies: what only the old one had is redone by those who still have it."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from shared.protocol import MemberKind
from tests.chaos.link import Link, Mode
from tests.e2e.clients import Answer, Connect, check_same, longest_pause_s
from tests.e2e.load import SLOW, USAGE, mixed, plain, words
from tests.e2e.own_redis import OwnRedis
from tests.e2e.stack import Stack
from tests.e2e.state import State
from tests.figures import note
from tests.helpers import wait_until


@dataclass
class Pair:
    """way: of the services, to whoever is the primary. replication: from the primary to its replica."""

    primary: OwnRedis
    replica: OwnRedis
    way: Link
    replication: Link

    def fail_over(self) -> None:
        with redis.Redis.from_url(self.replica.url) as client:
            client.replicaof("NO", "ONE")
        self.way.point_at(self.replica.url)
        self.way.reset()

    def in_sync(self) -> bool:
        with redis.Redis.from_url(self.replica.url) as client:
            info: Any = client.info("replication")
            return bool(info["master_link_status"] == "up")


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with contextlib.AsyncExitStack() as stack:
        primary = stack.enter_context(OwnRedis(tmp_path / "primary"))
        replica = stack.enter_context(OwnRedis(tmp_path / "replica"))
        replication = await stack.enter_async_context(Link(primary.url))
        way = await stack.enter_async_context(Link(primary.url))
        with redis.Redis.from_url(replica.url) as client:
            client.replicaof("127.0.0.1", str(urlsplit(replication.url).port))
        pair = Pair(primary, replica, way, replication)
        await wait_until(pair.in_sync)
        yield pair


def num_committed(url: str, model: str) -> int:
    state = State(url, model)
    try:
        return sum(s.num_tokens for s in state.sequences())
    finally:
        state.close()


class OneWayStack(Stack):
    """Its services go by the pair's way; its bystander asks whoever is the primary."""

    def __init__(self, pair: Pair, folder: Path) -> None:
        super().__init__(pair.primary.url, folder, workers=2, env=SLOW)
        self.pair = pair

    def own_settings(self, kind: MemberKind, index: int) -> dict[str, object]:
        return super().own_settings(kind, index) | {"redis_url": self.pair.way.url}

    def fail_over(self) -> None:
        self.pair.fail_over()
        self.state.close()
        self.redis_url = self.pair.replica.url
        self.state = State(self.redis_url, self.served_name)


@pytest.mark.parametrize("old", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "wakes up"])
async def test_tokens_that_only_the_old_primary_had_are_written_again(
    old: signal.Signals, pair: Pair, connect: Connect, undisturbed: list[Answer], tmp_path: Path
) -> None:
    async with OneWayStack(pair, tmp_path / "stack") as stack:
        client = connect(stack.url)
        answering = client.begin_all([*mixed("load"), plain("long", 150, **USAGE)])
        await wait_until(lambda: sum(s.num_tokens > 3 for s in stack.state.running()) > 15)
        pair.replication.set(Mode.SWALLOW)
        ahead = num_committed(pair.replica.url, stack.served_name) + 60
        await wait_until(lambda: num_committed(pair.primary.url, stack.served_name) > ahead)
        failed_at = time.perf_counter()
        pair.primary.signal(old)
        try:
            stack.fail_over()
            *answers, long = await answering
        finally:
            pair.primary.signal(signal.SIGCONT)  # to nobody, where it has died
        check_same(answers, undisturbed)
        note(pause_s=longest_pause_s([*answers, long], failed_at))
        long.check()
        assert long.text == words("long", 150)
        answer = await client.ask(plain("afterwards", 10))
        answer.check()
        assert answer.text == words("afterwards", 10)
