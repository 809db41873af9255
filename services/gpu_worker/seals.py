"""The sealed blocks of this worker's pool: full, computed, not to change; and the keys that name them. *Pure.*

The inventory is the truth about bytes from which a cache store rebuilds its index. It outlives an incarnation, since
the bytes do. A block leaves it when it is handed out to be written again. Keys are as `shared.block_keys` makes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from services.gpu_worker.batch import Sequence
from shared.block_keys import chain, next_key, root_key
from shared.store_calls import Inventory, InventoryEntry
from shared.wire import pack_ids
from shared.worker_protocol import Seal

MAX_PAGE_BYTES = 256 * 1024
ENTRY_BYTES = 112  # of an inventory entry without its tokens: two keys, field names


class SealedBlocks:
    def __init__(self, block_size: int, variant: str) -> None:
        self.block_size = block_size
        self._variant = variant
        self._entries: dict[int, InventoryEntry] = {}  # in the order of sealing

    def __len__(self) -> int:
        return len(self._entries)

    def key_of(self, block_id: int) -> bytes | None:
        entry = self._entries.get(block_id)
        return None if entry is None else entry.key

    def prefix_keys(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """Keys of its first blocks, from its tokens."""
        root = root_key(seq.salt, self._variant)
        return chain(root, pack_ids(seq.token_ids[: num_blocks * self.block_size]), self.block_size)

    def seal_computed(self, seq: Sequence) -> list[Seal]:
        """Seals the blocks of the sequence that its computed tokens fill, and were not sealed before."""
        size, seals = self.block_size, []
        while (seq.num_sealed + 1) * size <= seq.num_computed:
            index = seq.num_sealed
            ids = seq.token_ids[index * size : (index + 1) * size]
            parent = seq.keys[-1] if seq.keys else root_key(seq.salt, self._variant)
            key = next_key(parent, ids)
            self._add(seq.block_ids[index], key, parent, pack_ids(ids))
            seq.keys.append(key)
            seq.num_sealed += 1
            seals.append(seal_of(seq, index, size))
        return seals

    def _add(self, block_id: int, key: bytes, parent_key: bytes, ids: bytes) -> None:
        self.forget([block_id])
        self._entries[block_id] = InventoryEntry.unchecked(block_id=block_id, key=key, parent_key=parent_key, ids=ids)

    def forget(self, block_ids: Iterable[int]) -> None:
        """These are about to be written again."""
        for block_id in block_ids:
            self._entries.pop(block_id, None)

    def entries(self) -> list[InventoryEntry]:
        return list(self._entries.values())


def seal_of(seq: Sequence, index: int, block_size: int) -> Seal:
    ids = tuple(seq.token_ids[index * block_size : (index + 1) * block_size])
    return Seal.unchecked(sid=seq.sid, epoch=seq.epoch, index=index, block_id=seq.block_ids[index], ids=ids)


def inventory_pages(entries: list[InventoryEntry], worker: str, pool_term: int) -> Iterator[Inventory]:
    """The answer to a store, in messages of bounded size; the last one says so, and may be empty."""
    width = ENTRY_BYTES + (len(entries[0].ids) if entries else 0)
    count = max(1, MAX_PAGE_BYTES // width)
    for start in range(0, max(1, len(entries)), count):
        page = tuple(entries[start : start + count])
        yield Inventory(worker=worker, pool_term=pool_term, blocks=page, last=start + count >= len(entries))
