"""A scheduler's calls to a store core, over the wire format and back."""

from __future__ import annotations

from typing import Any

from services.cache_store.store_core import StoreCore
from shared.block_keys import chain, root_key
from shared.store_calls import Ensure, Grant, Inventory, InventoryEntry, Match, Reconcile, StoreCall, Update
from shared.wire import decode, encode, pack_ids
from shared.worker_protocol import Seal

SALT = b"s" * 32
PROMPT = tuple(range(100, 110))
LOCATED: dict[str, Any] = {"worker": "w", "reply_to": "reply:x"}


class Caller:
    """One scheduler under one run term; each message goes over the wire format and back."""

    def __init__(self, core: StoreCore, run_term: int = 1, pool_term: int = 1) -> None:
        self.core, self.run_term, self.pool_term, self.number = core, run_term, pool_term, 0

    def message(self, kind: type[StoreCall], **fields: Any) -> StoreCall:
        self.number += 1
        terms = {"call": self.number, "run_term": self.run_term, "pool_term": self.pool_term}
        return kind(**(LOCATED | terms | fields))

    def send(self, message: StoreCall) -> Any:
        ((reply_to, answer),) = self.core.handle(decode(encode(message)))
        assert reply_to == message.reply_to
        assert answer.call == message.call and answer.worker == message.worker  # type: ignore[attr-defined]
        return decode(encode(answer))

    def ensure(self, sid: str, epoch: int = 1, ids: tuple[int, ...] = PROMPT, **fields: Any) -> Any:
        return self.send(self.message(Ensure, sid=sid, epoch=epoch, salt=SALT, ids=pack_ids(ids), **fields))

    def reconcile(self, *running: tuple[str, int, bytes, tuple[int, ...]], spares: tuple[int, ...] = ()) -> Any:
        return self.send(self.message(Reconcile, running=running, spare_block_ids=spares))

    def update(self, **fields: Any) -> Any:
        return self.send(self.message(Update, **fields))

    def grant(self, num_blocks: int) -> Any:
        return self.send(self.message(Grant, num_blocks=num_blocks))

    def match(self, ids: tuple[int, ...] = PROMPT) -> Any:
        return self.send(self.message(Match, salt=SALT, ids=pack_ids(ids)))


def seals(table: tuple[int, ...], sid: str = "a", epoch: int = 1, ids: tuple[int, ...] = PROMPT) -> tuple[Seal, ...]:
    whole = [ids[i : i + 4] for i in range(0, len(ids) - 3, 4)]
    return tuple(Seal(sid=sid, epoch=epoch, index=i, block_id=table[i], ids=part) for i, part in enumerate(whole))


def page(*blocks: InventoryEntry, pool_term: int = 1, last: bool = True) -> Inventory:
    return Inventory(worker="w", pool_term=pool_term, blocks=blocks, last=last)


def sealed_block(block_id: int, ids: tuple[int, ...] = PROMPT[:4]) -> InventoryEntry:
    root, packed = root_key(SALT, "variant"), pack_ids(ids)
    return InventoryEntry(block_id=block_id, key=chain(root, packed, 4)[0], parent_key=root, ids=packed)


def open_store(num_blocks: int = 16, pool_term: int = 1, min_run_term: int = 0) -> StoreCore:
    core = StoreCore("store")
    assert core.open_pool("w", pool_term, num_blocks, 4, "variant", min_run_term)
    return core
