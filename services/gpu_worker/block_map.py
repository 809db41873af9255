"""Which running sequence holds which block of the pool, and which blocks are spare. *Pure.*

The worker's last line of defence against two writers: a block may be written by a sequence only if nobody else holds
it and it is not spare. Knows nothing of what is in the blocks (see `seals`).
"""

from __future__ import annotations

from collections.abc import Iterable


class BlockMap:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.spares: set[int] = set()  # granted to the worker, used by no sequence yet
        self._holders: dict[int, set[str]] = {}

    @property
    def num_held(self) -> int:
        return len(self._holders)

    def is_free(self, block_id: int) -> bool:
        """Nobody can write or read it here: it may be handed to one writer."""
        return 0 <= block_id < self.num_blocks and block_id not in self.spares and block_id not in self._holders

    def hold(self, sid: str, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._holders.setdefault(block_id, set()).add(sid)

    def release(self, sid: str, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            holders = self._holders[block_id]
            holders.discard(sid)
            if not holders:
                del self._holders[block_id]

    def take_spare(self) -> int | None:
        """The lowest spare block, so that the same changes always give the same tables; None if there is none."""
        if not self.spares:
            return None
        block_id = min(self.spares)
        self.spares.discard(block_id)
        return block_id

    def clear(self) -> None:
        self.spares.clear()
        self._holders.clear()
