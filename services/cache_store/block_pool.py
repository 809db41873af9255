"""The blocks of one pool: how often each is referenced, and in which order free ones are given out. *Pure.*

A free block is *blank* (its bytes mean nothing) or *cached* (sealed, and still in the prefix index). Blank ones are
given out first, the latest freed first; then cached ones, the longest unreferenced first. Whoever frees a sequence does
so from its tail, so that the beginning of a prefix outlives its continuations.

Knows nothing of keys or sequences: the caller says whether a block it lets go is cached, and takes a block that it gets
out of the index.
"""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    """Reference counts and free lists; every operation is O(1) a block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_refs = [0] * num_blocks
        self._blank: dict[int, None] = dict.fromkeys(reversed(range(num_blocks)))
        # OrderedDict, not dict: taking the oldest key of a dict again and again scans the holes before it.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks that are still worth a hit."""
        return len(self._cached)

    def num_refs(self, block_id: int) -> int:
        return self._num_refs[block_id]

    def allocate(self, count: int) -> list[int]:
        """Free blocks, now with one reference each. The caller has checked that so many are free."""
        assert count <= self.num_free, f"{count} of {self.num_free} free blocks"
        num_blank = min(count, len(self._blank))
        block_ids = [self._blank.popitem()[0] for _ in range(num_blank)]
        block_ids += [self._cached.popitem(last=False)[0] for _ in range(count - num_blank)]
        for block_id in block_ids:
            self._num_refs[block_id] = 1
        return block_ids

    def add_ref(self, block_id: int) -> None:
        """One more holder; a free block leaves its free list."""
        if self._num_refs[block_id] == 0 and self._cached.pop(block_id, self) is self:
            del self._blank[block_id]
        self._num_refs[block_id] += 1

    def drop_ref(self, block_id: int, cached: bool) -> bool:
        """One holder less; returns whether the block is free now, then as blank or cached."""
        assert self._num_refs[block_id] > 0, f"block {block_id} has no holder"
        self._num_refs[block_id] -= 1
        if self._num_refs[block_id]:
            return False
        (self._cached if cached else self._blank)[block_id] = None
        return True

    def mark_cached(self, block_id: int) -> None:
        """A free block turns out to be sealed; it is evicted after all that are cached already."""
        self._blank.pop(block_id, None)
        self._cached[block_id] = None
        self._cached.move_to_end(block_id)

    def check_invariants(self) -> None:
        """AssertionError unless blank, cached and referenced blocks are a partition of all blocks."""
        free = self._blank.keys() | self._cached.keys()
        assert len(free) == self.num_free, "a block is blank and cached"
        unreferenced = {block_id for block_id, num_refs in enumerate(self._num_refs) if num_refs == 0}
        assert free == unreferenced, f"free but referenced, or lost: {free ^ unreferenced}"
        assert all(num_refs >= 0 for num_refs in self._num_refs)

    def is_cached(self, block_id: int) -> bool:
        """Whether the block is free and cached."""
        return block_id in self._cached
