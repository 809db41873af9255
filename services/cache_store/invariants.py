"""What must be true of a block manager between any two calls. *Pure; changes nothing.*"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the manager runs these checks itself
    from services.cache_store.block_manager import BlockManager


def check(manager: BlockManager) -> None:
    """AssertionError naming the first contradiction; O(blocks)."""
    manager.pool.check_invariants()
    manager.index.check_invariants()
    _check_references(manager)
    _check_free_blocks(manager)
    _check_sharing(manager)
    _check_leaders(manager)


def _check_references(manager: BlockManager) -> None:
    """Every reference is a place in a table, a retired block or a spare one, and the other way round."""
    references = Counter(manager.spares.keys())
    for sid, hold in manager.holds.items():
        assert hold.sid == sid
        references.update(hold.all_ids())
    for block_id in range(manager.num_blocks):
        held, counted = references[block_id], manager.pool.num_refs(block_id)
        assert held == counted, f"block {block_id} has {held} holders and {counted} references"


def _check_free_blocks(manager: BlockManager) -> None:
    """A free block is cached exactly if it can be found."""
    for block_id in range(manager.num_blocks):
        if manager.pool.num_refs(block_id) == 0:
            indexed, cached = block_id in manager.index, manager.pool.is_cached(block_id)
            assert indexed == cached, f"free block {block_id}: indexed {indexed}, cached {cached}"


def _check_sharing(manager: BlockManager) -> None:
    """Sealed blocks alone are shared; a sequence's sealed blocks are found under its own keys."""
    uses: Counter[int] = Counter()
    for hold in manager.holds.values():
        assert len(hold.keys) <= len(hold.block_ids)
        assert len(set(hold.block_ids)) == len(hold.block_ids), f"{hold.sid} has a block twice"
        parent = hold.root
        for block_id, key in zip(hold.block_ids, hold.keys, strict=False):
            entry = manager.index.entry(block_id)
            assert entry is not None and (entry.key, entry.parent) == (key, parent), f"{hold.sid}: chain is broken"
            parent = key
        for block_id, retired in hold.retired.items():
            assert block_id not in manager.index and retired.index < len(hold.keys)
        uses.update(hold.all_ids())
    for block_id in manager.spares:
        assert block_id not in manager.index and not uses[block_id], f"spare block {block_id} is in use"
    for block_id, num_uses in uses.items():
        shared = num_uses > 1 and block_id not in manager.unproven
        assert not shared or block_id in manager.index, f"block {block_id} is shared, and not sealed"


def _check_leaders(manager: BlockManager) -> None:
    lost = manager.leaders.sequences() - manager.holds.keys()
    assert not lost, f"others would wait for {lost}, which hold nothing"
