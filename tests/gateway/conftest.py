"""A served model on a real Redis: a fake worker, gateways without HTTP that can lose replies, and whole ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from redis.exceptions import ConnectionError, OutOfMemoryError

from services.gateway import byte_tokenizer
from services.gateway.inflight import Inflight
from services.gateway.service import GatewayService
from shared.bus import connect
from shared.records import Records, RequestRecord
from shared.runtime import Stop
from shared.scripts import Scripts
from shared.settings import SCRIPTED_MODEL, CommonSettings, GatewaySettings, LimitSettings
from tests.gateway.fake_worker import FakeWorker
from tests.safe_errors import check_safe

MODEL = "tiny"


class LossyScripts(Scripts):
    """Loses the replies of the scripts named in `lose`, after they have run, once each; then those in `refuse` are
    answered by a server that is full, without running. `calls` counts all; `pause` holds one back, `late` its reply."""

    def __init__(self, redis: Any, model: str) -> None:
        super().__init__(redis, model)
        self.lose: list[str] = []
        self.refuse: list[str] = []
        self.calls: list[str] = []
        self.pause: dict[str, asyncio.Event] = {}
        self.late: dict[str, asyncio.Event] = {}

    async def _run(self, name: str, *args: Any) -> Any:
        self.calls.append(name)
        if name in self.pause:
            await self.pause[name].wait()
        if name in self.refuse and name not in self.lose:
            self.refuse.remove(name)
            raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'")
        reply = await super()._run(name, *args)
        if name in self.late:
            await self.late[name].wait()
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


class Served:
    """A whole gateway on a port of its own, in this process, with a fake worker behind it."""

    def __init__(self, service: GatewayService, worker: FakeWorker, session: aiohttp.ClientSession) -> None:
        self.service = service
        self.worker = worker
        self.session = session
        self.stop = Stop(exit=lambda status: None)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.service.port}"

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any, aiohttp.ClientResponse]:
        async with self.session.post(self.url + path, json=body, **options) as response:
            answer = await response.json(content_type=None)
            if response.status >= 400:
                check_safe(answer)
            return response.status, answer, response

    async def get(self, path: str, **options: Any) -> tuple[int, Any, aiohttp.ClientResponse]:
        async with self.session.get(self.url + path, **options) as response:
            answer = await response.json(content_type=None)
            if response.status >= 400:
                check_safe(answer)
            return response.status, answer, response


@pytest.fixture
async def serve_with(redis_url: str, worker: FakeWorker) -> AsyncIterator[Callable[..., Awaitable[Served]]]:
    """Starts a gateway with these settings; ends it, which must leave nothing open."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**settings: Any) -> Served:
            redis = connect(redis_url)
            stack.push_async_callback(redis.aclose)
            common = CommonSettings(
                redis_url=redis_url, model=SCRIPTED_MODEL, served_model_name=MODEL,
                drain_timeout_s=settings.pop("drain_timeout_s", 0),
            )  # fmt: skip
            limiting = {name: settings.pop(name) for name in list(settings) if name in LimitSettings.model_fields}
            own = GatewaySettings.model_validate({"port": 0} | settings)
            service = GatewayService(redis, byte_tokenizer.byte_tokenizer(), common, own, LimitSettings(**limiting))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            served = Served(service, worker, session)
            running = asyncio.ensure_future(service.run(served.stop))

            async def end() -> None:
                if not served.stop.is_set():
                    served.stop.set()
                await asyncio.wait_for(running, 10)

            listening = asyncio.ensure_future(service.listening.wait())
            await asyncio.wait([running, listening], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                listening.cancel()
                running.result()
            stack.push_async_callback(end)
            return served

        yield start


@pytest.fixture
async def served(serve_with: Callable[..., Awaitable[Served]]) -> Served:
    return await serve_with()


@pytest.fixture
async def answering(worker: FakeWorker) -> AsyncIterator[Callable[..., None]]:
    """Lets the fake worker answer everything in the background: `answering(reply, finish)`."""
    tasks: list[asyncio.Task[None]] = []

    def begin(reply: Callable[[RequestRecord, int], Any], finish: str = "length") -> None:
        tasks.append(asyncio.ensure_future(worker.serve(reply, finish)))

    yield begin
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()  # again: redis-py can lose one on Python 3.11
        await asyncio.wait(running, timeout=0.2)
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
