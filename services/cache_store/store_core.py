"""What a cache store does with a message, without any I/O: the pools it leases, by worker. *Pure.*

The shell around it takes and loses leases (`open_pool`, `close_pool`), asks workers for their inventory, feeds decoded
messages to `handle` and sends the answers. Calls for a pool that is not leased here are answered with pool term 0: the
caller then looks up who leases it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType

from services.cache_store.block_manager import BlockManager
from services.cache_store.pool import Pool, refuse
from shared.store_calls import Inventory, StoreCall
from shared.wire import Message, ProtocolError

log = logging.getLogger(__name__)

Reply = tuple[str, Message]  # the caller's stream, the answer


class StoreCore:
    """All pools of one store; each message touches one of them."""

    def __init__(self, store_id: str) -> None:
        self.store_id = store_id
        self._pools: dict[str, Pool] = {}

    @property
    def pools(self) -> Mapping[str, Pool]:
        """By worker; for reading (metrics, readiness)."""
        return MappingProxyType(self._pools)

    def open_pool(
        self, worker: str, pool_term: int, num_blocks: int, block_size: int, variant: str, min_run_term: int = 0
    ) -> bool:
        """The pool's lease was taken with this term; True if the worker must now be asked for its inventory.

        min_run_term: the worker's term as Redis has it now, so that a scheduler that was replaced before this store
        came cannot reconcile.
        """
        known = self._pools.get(worker)
        if known is not None and known.term >= pool_term:
            return known.term == pool_term and known.state == "inventory"
        self._pools[worker] = Pool(pool_term, BlockManager(num_blocks, block_size, variant), min_run_term)
        log.info("%s: pool of %s opened under term %d: %d blocks", self.store_id, worker, pool_term, num_blocks)
        return True

    def close_pool(self, worker: str) -> None:
        """The lease is lost or the worker is gone: all its blocks are forgotten in one step."""
        if self._pools.pop(worker, None) is not None:
            log.info("%s: pool of %s closed", self.store_id, worker)

    def handle(self, message: Message) -> list[Reply]:
        """The answers to send. ProtocolError, with nothing changed, for a message that makes no sense here."""
        if isinstance(message, Inventory):
            pool = self._pools.get(message.worker)
            if pool is not None:
                pool.add_inventory(message)
            return []
        if not isinstance(message, StoreCall):
            raise ProtocolError(f"{message.TAG} is not for a cache store")
        pool = self._pools.get(message.worker)
        answer = refuse(message, "not_ready", 0) if pool is None else pool.handle(message)
        return [(message.reply_to, answer)]

    def check_invariants(self) -> None:
        """AssertionError when a pool contradicts itself; O(blocks), for tests and idle times."""
        for pool in self._pools.values():
            pool.manager.check_invariants()
