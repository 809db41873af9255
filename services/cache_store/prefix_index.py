"""Which block holds the KV of which tokens, and who is computing the ones no block holds yet. *Pure.*

`PrefixIndex` maps keys (see `shared.block_keys`) of sealed blocks to block ids and back. It keeps each block's token
ids and compares them on a hit: a key alone is never believed. `Leaders` maps keys of blocks that are about to be
computed to the sequence that computes them, so that others can wait for it instead of computing the same.

Neither knows about references: a block stays in the index until its owner takes it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shared.block_keys import chain
from shared.store_calls import InventoryEntry


class Entry(NamedTuple):
    """A sealed block: its key, the key of the block before it (or the root), its packed token ids."""

    key: bytes
    parent: bytes
    ids: bytes


class PrefixIndex:
    """Sealed blocks by key and by id; at most one block a key."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._entries: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._entries

    def find(self, key: bytes) -> int | None:
        return self._block_of.get(key)

    def entry(self, block_id: int) -> Entry | None:
        return self._entries.get(block_id)

    def match(self, keys: Sequence[bytes], packed_ids: bytes, block_bytes: int) -> list[int]:
        """The blocks of the longest sealed beginning of packed_ids, whose whole blocks have these keys."""
        block_ids = []
        for index, key in enumerate(keys):
            block_id = self._block_of.get(key)
            if block_id is None:
                break
            if self._entries[block_id].ids != packed_ids[index * block_bytes : (index + 1) * block_bytes]:
                break
            block_ids.append(block_id)
        return block_ids

    def add(self, block_id: int, entry: Entry) -> None:
        assert entry.key not in self._block_of and block_id not in self._entries
        self._block_of[entry.key] = block_id
        self._entries[block_id] = entry

    def remove(self, block_id: int) -> bool:
        """Whether the block was in the index; it is not any more."""
        entry = self._entries.pop(block_id, None)
        if entry is None:
            return False
        del self._block_of[entry.key]
        return True

    def chain(self, root: bytes, block_ids: Sequence[int]) -> list[bytes]:
        """Keys of the leading blocks of a table that are sealed, each as the continuation of the one before."""
        keys: list[bytes] = []
        parent = root
        for block_id in block_ids:
            entry = self._entries.get(block_id)
            if entry is None or entry.parent != parent:
                break
            parent = entry.key
            keys.append(parent)
        return keys

    def load(self, inventory: Iterable[InventoryEntry], num_blocks: int, block_size: int) -> int:
        """Add what a worker says it has, in the order it was sealed; of two equal blocks the first, of two statements
        about one block the later. Returns how many were skipped as wrong: no such block, or not the key of its tokens.
        """
        num_wrong = 0
        for e in inventory:
            well_formed = 0 <= e.block_id < num_blocks and len(e.ids) == 4 * block_size and len(e.parent_key) == 32
            if not well_formed or chain(e.parent_key, e.ids, block_size) != [e.key]:
                num_wrong += 1
                continue
            self.remove(e.block_id)
            if e.key not in self._block_of:
                self.add(e.block_id, Entry(e.key, e.parent_key, e.ids))
        return num_wrong

    def leaves_first(self) -> list[int]:
        """All blocks in a good order of eviction: the prefix that was longest not continued first, from its tail."""
        sealed_at = {block_id: position for position, block_id in enumerate(self._entries)}
        continued_at = dict(sealed_at)
        for block_id, entry in reversed(self._entries.items()):
            parent = self._block_of.get(entry.parent)
            if parent is not None:
                continued_at[parent] = max(continued_at[parent], continued_at[block_id])
        return sorted(self._entries, key=lambda block_id: (continued_at[block_id], -sealed_at[block_id]))

    def check_invariants(self) -> None:
        """AssertionError unless keys and blocks lead to each other."""
        assert len(self._block_of) == len(self._entries)
        for block_id, entry in self._entries.items():
            assert self._block_of.get(entry.key) == block_id, f"block {block_id} is not found under its key"


class Leaders:
    """Who computes which key first. Ask only about keys that are not sealed: a leader keeps its keys until it is
    forgotten, and until then holds the blocks it sealed."""

    def __init__(self) -> None:
        self._leader_of: dict[bytes, tuple[str, int]] = {}  # key -> sequence, number of the block in it
        self._keys_of: dict[str, list[bytes]] = {}

    def lead(self, sid: str, keys: Sequence[bytes], first_index: int) -> None:
        """The sequence is going to compute these consecutive blocks; keys that another leads stay with it."""
        for index, key in enumerate(keys, first_index):
            self._leader_of.setdefault(key, (sid, index))
        self._keys_of[sid] = list(keys)

    def find(self, keys: Sequence[bytes]) -> tuple[str, int] | None:
        """The leader of the first key, and the last of its blocks that these keys name without a gap."""
        found = self._leader_of.get(keys[0]) if keys else None
        if found is None:
            return None
        leader, last_index = found
        for key in keys[1:]:
            other, index = self._leader_of.get(key, ("", -1))
            if other != leader:
                break
            last_index = index
        return leader, last_index

    def forget(self, sid: str) -> None:
        """The sequence computes nothing any more."""
        for key in self._keys_of.pop(sid, ()):
            if self._leader_of.get(key, ("", -1))[0] == sid:
                del self._leader_of[key]

    def sequences(self) -> set[str]:
        """Everybody who leads a key now."""
        return {sid for sid, _ in self._leader_of.values()}
