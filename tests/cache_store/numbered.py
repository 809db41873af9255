"""A block manager whose calls are numbered as a caller numbers them."""

from __future__ import annotations

from collections.abc import Sequence

from services.cache_store.block_manager import BlockManager
from services.cache_store.holds import Ensured, Sealed
from shared.wire import pack_ids

BLOCK_SIZE = 4
SALT = bytes(32)


class Numbered:
    """Calls of one manager under rising numbers; `at` repeats an old number."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.manager = BlockManager(num_blocks, BLOCK_SIZE, "test")
        self.last = 0

    def next(self, at: int | None) -> int:
        self.last += at is None
        return self.last if at is None else at

    def ensure(
        self, sid: str, ids: Sequence[int], epoch: int = 1, at: int | None = None, salt: bytes = SALT, **options: object
    ) -> Ensured:
        return self.manager.ensure(sid, epoch, salt, pack_ids(ids), self.next(at), **options)  # type: ignore[arg-type]

    def seal(
        self,
        sid: str,
        index: int,
        ids: Sequence[int],
        block_id: int | None = None,
        epoch: int = 1,
        at: int | None = None,
    ) -> Sealed:
        """ids: those of the whole sequence; seals block `index` of them as the block that the sequence has there."""
        block_id = self.table(sid, epoch)[index] if block_id is None else block_id
        part = ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        return self.manager.seal(sid, epoch, index, block_id, part, self.next(at))

    def seal_all(self, sid: str, ids: Sequence[int], epoch: int = 1) -> None:
        for index in range(len(ids) // BLOCK_SIZE):
            assert self.seal(sid, index, ids, epoch=epoch).accepted

    def compute(self, sid: str, ids: Sequence[int]) -> tuple[int, ...]:
        """A sequence that comes, is computed and goes, leaving its sealed blocks; its table."""
        table = self.ensure(sid, ids).block_ids
        assert table
        self.seal_all(sid, ids)
        self.release(sid)
        return table

    def take(self, sid: str, index: int, block_id: int, epoch: int = 1, at: int | None = None) -> bool:
        return self.manager.take(sid, epoch, index, block_id, self.next(at))

    def drop(self, sid: str, block_id: int, epoch: int = 1, at: int | None = None) -> None:
        self.manager.drop(sid, epoch, block_id, self.next(at))

    def release(self, sid: str, epoch: int = 1, at: int | None = None) -> None:
        self.manager.release(sid, epoch, self.next(at))

    def grant(self, num_blocks: int, at: int | None = None) -> tuple[int, ...]:
        return self.manager.grant(num_blocks, self.next(at))

    def reclaim(self, block_ids: Sequence[int], at: int | None = None) -> None:
        self.manager.reclaim(block_ids, self.next(at))

    def reconcile(
        self,
        running: Sequence[tuple[str, int, bytes, Sequence[int]]],
        spares: Sequence[int] = (),
        at: int | None = None,
    ) -> None:
        self.manager.reconcile(running, spares, self.next(at))

    def match(self, ids: Sequence[int], salt: bytes = SALT) -> int:
        return self.manager.match(salt, pack_ids(ids))

    def table(self, sid: str, epoch: int = 1) -> tuple[int, ...]:
        return self.manager.table(sid, epoch)

    @property
    def num_free(self) -> int:
        return self.manager.num_free
