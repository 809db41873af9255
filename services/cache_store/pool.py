"""One leased pool as its callers see it: terms, readiness, and calls turned into block operations. *Pure.*

A pool comes to life in three states: *inventory* (the worker lists its sealed blocks), *reconcile* (its scheduler says
what runs there), *ready*. A call under another pool term, or a higher run term than was reconciled, is answered
`not_ready`: its sender must reconcile first. One under a lower run term is `stale`: another scheduler has the worker.

Knows messages and terms, and nothing of how blocks are kept (see `block_manager`).
"""

from __future__ import annotations

import logging
from typing import Literal

from services.cache_store.block_manager import BlockManager
from shared.store_calls import (
    Ensure,
    Grant,
    Granted,
    Inventory,
    InventoryEntry,
    Match,
    Matched,
    Reconcile,
    Reconciled,
    StoreCall,
    Table,
    Update,
    Updated,
)
from shared.wire import Message, ProtocolError

log = logging.getLogger(__name__)

State = Literal["inventory", "reconcile", "ready"]
Refusal = Literal["stale", "not_ready"]


def refuse(call: StoreCall, status: Refusal, pool_term: int) -> Message:
    """The answer of this call's kind that says no; pool_term is the current one, 0 where the pool is not leased."""
    match call:
        case Ensure(call=n, worker=worker, sid=sid, epoch=epoch):
            return Table(call=n, worker=worker, pool_term=pool_term, sid=sid, epoch=epoch, status=status)
        case Grant(call=n, worker=worker):
            return Granted(call=n, worker=worker, pool_term=pool_term, status=status)
        case Update(call=n, worker=worker):
            return Updated(call=n, worker=worker, pool_term=pool_term, status=status)
        case Reconcile(call=n, worker=worker):
            return Reconciled(call=n, worker=worker, pool_term=pool_term, status=status)
        case Match(call=n, worker=worker):
            return Matched(call=n, worker=worker, pool_term=pool_term, cached_length=0)
    raise ProtocolError(f"{call.TAG} is not a call of a cache store")


class Pool:
    """One life of a pool, between taking its lease and losing it."""

    def __init__(self, term: int, manager: BlockManager, min_run_term: int) -> None:
        self.term = term
        self.manager = manager
        self.state: State = "inventory"
        self.run_term = min_run_term  # lower ones are refused
        self._newest_call = self._reconciled_by = -1  # numbers of calls of the present run term
        self._inventory: list[InventoryEntry] = []

    def add_inventory(self, page: Inventory) -> None:
        """Pages of an older term, or after the last one, come from a repeated question: they change nothing."""
        if page.pool_term != self.term or self.state != "inventory":
            return
        self._inventory += page.blocks
        if page.last:
            num_wrong = self.manager.rebuild(self._inventory)
            if num_wrong:
                log.error(
                    "%d of %d blocks in the inventory of %s are wrong", num_wrong, len(self._inventory), page.worker
                )
            self._inventory = []
            self.state = "reconcile"

    def handle(self, call: StoreCall) -> Message:
        """The answer. ProtocolError, with nothing changed, for a call that makes no sense."""
        if isinstance(call, Match):
            return self._match(call)
        refusal = self._refusal(call)
        if refusal is not None:
            return refuse(call, refusal, self.term)
        answer = self._answer(call)
        self._newest_call = max(self._newest_call, call.call)
        return answer

    def _answer(self, call: StoreCall) -> Message:
        match call:
            case Ensure():
                return self._ensure(call)
            case Grant():
                return self._grant(call)
            case Update():
                return self._update(call)
            case Reconcile():
                return self._reconcile(call)
        raise ProtocolError(f"{call.TAG} is not a call of a cache store")

    def _refusal(self, call: StoreCall) -> Refusal | None:
        if call.pool_term != self.term:
            return "not_ready"
        if call.run_term < self.run_term:
            return "stale"
        if isinstance(call, Reconcile):
            return "not_ready" if self.state == "inventory" else None
        return None if self.state == "ready" and call.run_term == self.run_term else "not_ready"

    def _ensure(self, m: Ensure) -> Table:
        _check_ids(m.ids)
        result = self.manager.ensure(
            m.sid, m.epoch, m.salt, m.ids, m.call,
            wait_for_leader=m.wait_for_leader, use_cached=m.use_cached, keep_free=m.keep_free,
        )  # fmt: skip
        return Table(
            call=m.call, worker=m.worker, pool_term=self.term, sid=m.sid, epoch=m.epoch, num_free=self.manager.num_free,
            **result._asdict(),
        )  # fmt: skip

    def _grant(self, m: Grant) -> Granted:
        spares = self.manager.grant(m.num_blocks, m.call)
        return Granted(
            call=m.call, worker=m.worker, pool_term=self.term, status="ok", spare_block_ids=spares,
            num_free=self.manager.num_free,
        )  # fmt: skip

    def _update(self, m: Update) -> Updated:
        manager, remaps = self.manager, []
        for t in m.taken:
            manager.take(t.sid, t.epoch, t.index, t.block_id, m.call)
        for s in m.seals:
            twin = manager.seal(s.sid, s.epoch, s.index, s.block_id, s.ids, m.call).twin
            if twin >= 0:
                remaps.append((s.sid, s.epoch, s.index, s.block_id, twin))
        for sid, epoch, block_id in m.dropped:
            manager.drop(sid, epoch, block_id, m.call)
        for sid, epoch in m.released:
            manager.release(sid, epoch, m.call)
        manager.reclaim(m.reclaimed, m.call)
        held = tuple(r for r in remaps if manager.table(r[0], r[1]))
        return Updated(
            call=m.call, worker=m.worker, pool_term=self.term, status="ok", remaps=held, num_free=manager.num_free
        )

    def _reconcile(self, m: Reconcile) -> Message:
        """A scheduler may reconcile again under its term. What a later call of its own overtook is out of date: the
        answer is `not_ready`, unless it has been applied in its time."""
        if self.state != "ready" or m.run_term > self.run_term or m.call > self._newest_call:
            try:
                self.manager.reconcile(m.running, m.spare_block_ids, m.call)
            except ValueError as e:
                raise ProtocolError(f"reconcile of {m.worker}: {e}") from e
            self.state, self.run_term, self._newest_call, self._reconciled_by = "ready", m.run_term, m.call, m.call
        elif m.call != self._reconciled_by:
            return refuse(m, "not_ready", self.term)
        return Reconciled(
            call=m.call, worker=m.worker, pool_term=self.term, status="ok", num_free=self.manager.num_free,
            num_blocks=self.manager.num_blocks,
        )  # fmt: skip

    def _match(self, m: Match) -> Matched:
        """For placement: a hint, so any scheduler may ask, under any term."""
        _check_ids(m.ids)
        cached_length = self.manager.match(m.salt, m.ids)
        num_free = self.manager.num_free if self.state == "ready" else 0  # before that nobody knows who holds what
        return Matched(
            call=m.call, worker=m.worker, pool_term=self.term, cached_length=cached_length, num_free=num_free
        )


def _check_ids(packed_ids: bytes) -> None:
    if not packed_ids or len(packed_ids) % 4:
        raise ProtocolError(f"{len(packed_ids)} bytes are not the ids of a prompt")
