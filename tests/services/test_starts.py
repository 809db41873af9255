"""Redis may be lost at any moment while a service starts: it waits and goes on, as it does later."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.exceptions import ConnectionError

from shared import bus
from shared.leases import new_incarnation
from shared.protocol import MemberKind
from shared.records import Records
from shared.runtime import Stop
from shared.scripts import prefix_of
from shared.settings import (
    CommonSettings,
    DeviceSettings,
    GatewaySettings,
    LimitSettings,
    SchedulerSettings,
    ScriptedSettings,
    WorkerSettings,
)
from tests.e2e.stack import SERVICES
from tests.helpers import wait_until

OWN = {
    "gateway": (GatewaySettings(port=0), LimitSettings()), "scheduler": (SchedulerSettings(),), "cache_store": (),
    "gpu_worker": (WorkerSettings(engine="scripted"), DeviceSettings(), ScriptedSettings()),
}  # fmt: skip
MIN_COMMANDS = 4  # of a start: ping, two looks at the server, and the join


class Losing(bus._Client):
    """Loses its connection once, at the command of that number: it has been carried out, and its reply is lost."""

    num_left = 0

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        reply = await super().execute_command(*args, **options)
        Losing.num_left -= 1
        if Losing.num_left == 0:
            raise ConnectionError("lost")
        return reply


@contextlib.asynccontextmanager
async def running(kind: MemberKind, incarnation: str, url: str) -> AsyncIterator[None]:
    """A service in this process; it must end in order."""
    module = importlib.import_module(f"services.{SERVICES[kind]}.__main__")
    common = CommonSettings(redis_url=url, model="scripted", served_model_name="m", incarnation=incarnation)
    stop = Stop()
    service = asyncio.ensure_future(module.serve(stop, common, *OWN[SERVICES[kind]]))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait([service])
        assert service.result() == 0


@pytest.mark.parametrize("kind", SERVICES)
async def test_a_lost_reply_while_it_starts_ends_no_service(
    kind: MemberKind, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = bus.connect(redis_url)
    records = Records(client, prefix_of("m"))
    monkeypatch.setattr(bus, "_Client", Losing)

    async def is_alive(incarnation: str) -> bool:
        return (await records.members()).get(incarnation, (None, False))[1]

    for number in itertools.count(1):
        incarnation = new_incarnation(kind)
        Losing.num_left = number
        async with running(kind, incarnation, redis_url):
            await wait_until(functools.partial(is_alive, incarnation))
            was_lost = Losing.num_left <= 0
        if not was_lost:
            break
    await client.aclose()
    assert number > MIN_COMMANDS
