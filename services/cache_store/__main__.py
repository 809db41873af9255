"""Starts a cache store: `python -m services.cache_store`, configured by the environment."""

from __future__ import annotations

import sys

from services.cache_store.service import StoreService
from shared import bootstrap, bus
from shared.runtime import Stop, redis_answers
from shared.settings import CommonSettings


async def serve(stop: Stop, common: CommonSettings) -> int:
    clients = [bus.connect(common.redis_address) for _ in range(3)]
    try:
        if not await redis_answers(clients[0], stop, volatile=common.volatile):
            return 0
        service = StoreService(
            clients[0], common.served_name, incarnation=common.incarnation, blocking=clients[1], heartbeat=clients[2]
        )
        await service.run(stop)
    finally:
        for client in clients:
            await client.aclose()
    return 0


if __name__ == "__main__":
    sys.exit(bootstrap.start("cache_store", serve))
