"""A served model on a real Redis: a fake worker, and gateways without HTTP that can lose replies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from redis.exceptions import ConnectionError

from services.gateway.inflight import Inflight
from shared.bus import connect
from shared.records import Records
from shared.scripts import Scripts
from tests.gateway.fake_worker import FakeWorker

MODEL = "tiny"


class LossyScripts(Scripts):
    """Loses the replies of the scripts named in `lose`, after they have run, once each; `calls` counts all."""

    def __init__(self, redis: Any, model: str) -> None:
        super().__init__(redis, model)
        self.lose: list[str] = []
        self.calls: list[str] = []
        self.pause: dict[str, asyncio.Event] = {}

    async def _run(self, name: str, *args: Any) -> Any:
        self.calls.append(name)
        if name in self.pause:
            await self.pause[name].wait()
        reply = await super()._run(name, *args)
        if name in self.lose:
            self.lose.remove(name)
            raise ConnectionError("the reply was lost")
        return reply


class Gateway:
    """An `Inflight` and what it is made of."""

    def __init__(self, url: str, clock: Callable[[], float] | None = None, **limits: int) -> None:
        self.redis = connect(url)
        self.scripts = LossyScripts(self.redis, MODEL)
        self.records = Records(self.redis, self.scripts.prefix)
        bounds = {"max_requests": 8, "max_tokens": 1000, "retention_ms": 60_000} | limits
        clocks = {} if clock is None else {"clock": clock}
        self.inflight = Inflight(self.redis, self.scripts, self.records, **bounds, **clocks)  # type: ignore[arg-type]


GatewayMaker = Callable[..., Awaitable[Gateway]]


@pytest.fixture
async def worker(redis_url: str) -> AsyncIterator[FakeWorker]:
    worker = FakeWorker(redis_url, MODEL)
    yield await worker.join()
    await worker.close()


@pytest.fixture
async def new_gateway(redis_url: str) -> AsyncIterator[GatewayMaker]:
    made: list[Gateway] = []

    async def make(**limits: Any) -> Gateway:
        gateway = Gateway(redis_url, **limits)
        made.append(gateway)
        await gateway.inflight.refresh()
        return gateway

    yield make
    for gateway in made:
        await gateway.redis.aclose()


@pytest.fixture
async def gateway(new_gateway: GatewayMaker) -> Gateway:
    return await new_gateway()
