"""Starts a scheduler: `python -m services.scheduler`, configured by the environment."""

from __future__ import annotations

import sys

from services.scheduler.service import SchedulerService
from shared import bootstrap, bus
from shared.runtime import Stop, redis_answers
from shared.settings import CommonSettings, SchedulerSettings


async def serve(stop: Stop, common: CommonSettings, own: SchedulerSettings) -> int:
    clients = [bus.connect(common.redis_address) for _ in range(3)]
    try:
        if not await redis_answers(clients[0], stop, volatile=common.volatile):
            return 0
        service = SchedulerService(
            clients[0], common.served_name, incarnation=common.incarnation, blocking=clients[1], heartbeat=clients[2],
            prefix_caching=own.enable_prefix_caching, max_strikes=own.max_strikes, min_priority=own.min_priority,
        )  # fmt: skip
        await service.run(stop)
    finally:
        for client in clients:
            await client.aclose()
    return 0


if __name__ == "__main__":
    sys.exit(bootstrap.start("scheduler", serve))
