"""Which blocks of a draft model's pool hold what the target's hold under the same id. *Pure.*

The pool has no owner of its own: a block is whose the target's is. What stays after its sequence has left are sealed
blocks, and whether the draft model had computed one, under the key that it was sealed by, is noted here. A note is
dropped when the block is written again, for whatever tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq


class DraftBlocks:
    def __init__(self) -> None:
        self._keys: dict[int, bytes] = {}

    def holds(self, block_id: int, key: bytes) -> bool:
        return self._keys.get(block_id) == key

    def num_held(self, block_ids: Seq[int], keys: Seq[bytes]) -> int:
        """How many blocks from the first on. keys: of those that are sealed."""
        count = 0
        while count < len(keys) and self.holds(block_ids[count], keys[count]):
            count += 1
        return count

    def write(self, block_ids: Iterable[int]) -> None:
        """These are being written."""
        for block_id in block_ids:
            self._keys.pop(block_id, None)

    def fill(self, block_id: int, key: bytes) -> None:
        self._keys[block_id] = key
