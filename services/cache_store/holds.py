"""The data of a block manager: what sequences hold, which (sequence, epoch) are over, what it answers. *Pure.*

`order` is the number of the call that did something. Calls may be repeated or overtake each other on their way, so
nothing is undone by a call that is older than the one that did it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

MAX_ENDINGS = 1 << 14  # about 5 MB; see `Endings`

Running = tuple[str, int, bytes, Sequence[int]]  # a row of `reconcile`: sequence, epoch, salt, block ids


class Ensured(NamedTuple):
    """Answer to `ensure`; see `shared.store_calls.Table`."""

    status: Literal["ok", "wait", "full", "stale"]
    block_ids: tuple[int, ...] = ()
    cached_length: int = 0
    leader: str = ""
    leader_index: int = -1
    num_needed: int = 0


class Sealed(NamedTuple):
    """Answer to `seal`; twin: the equal block that the sequence holds in its place, or -1."""

    accepted: bool
    twin: int = -1


@dataclass(slots=True)
class Counts:
    """Since the pool was opened; for metrics."""

    query_tokens: int = 0
    hit_tokens: int = 0
    waits: int = 0
    evictions: int = 0
    seals: int = 0
    remaps: int = 0
    collisions: int = 0
    refused_seals: int = 0
    refused_takes: int = 0


@dataclass(slots=True)
class Retired:
    """A block that the sequence must stop using (see `Remap`); it is held until that is in the worker's plan."""

    index: int
    order: int


@dataclass(slots=True)
class Hold:
    """One (sequence, epoch) and its blocks. The first len(keys) of them are sealed, under these keys."""

    sid: str
    epoch: int
    root: bytes
    order: int
    block_ids: list[int]
    keys: list[bytes]
    cached_length: int
    retired: dict[int, Retired] = field(default_factory=dict)

    def has(self, index: int, block_id: int) -> bool:
        """Whether this is, or until its retirement was, block number `index`."""
        if not 0 <= index < len(self.block_ids):
            return False
        retired = self.retired.get(block_id)
        return self.block_ids[index] == block_id or (retired is not None and retired.index == index)

    def all_ids(self) -> list[int]:
        """Everything it references, in the order in which to let go: the tail first."""
        return [*self.retired, *reversed(self.block_ids)]


class Endings:
    """Remembers what was released, so that a delayed `Ensure` does not hold blocks for a sequence that is over.

    The memory is bounded: when the oldest ending is forgotten, every `Ensure` sent before it counts as too old.
    """

    def __init__(self, limit: int = MAX_ENDINGS) -> None:
        self._limit = limit
        self._floor = -1
        self._last: OrderedDict[str, tuple[int, int]] = OrderedDict()  # sid -> epoch, order

    def __len__(self) -> int:
        return len(self._last)

    def record(self, sid: str, epoch: int, order: int) -> None:
        """This epoch and the lower ones are over, as of this call."""
        self._last[sid] = max(self._last.pop(sid, (epoch, order)), (epoch, order))
        if len(self._last) > self._limit:
            _, (_, oldest) = self._last.popitem(last=False)
            self._floor = max(self._floor, oldest)

    def is_known(self, sid: str, epoch: int) -> bool:
        """Whether this epoch has ended, as far as is remembered."""
        return epoch <= self._last.get(sid, (-1, -1))[0]

    def is_over(self, sid: str, epoch: int, order: int) -> bool:
        """Whether a call of this order that wants to hold blocks for (sid, epoch) comes too late."""
        last_epoch, last_order = self._last.get(sid, (-1, -1))
        return order <= self._floor or epoch < last_epoch or (epoch == last_epoch and order <= last_order)

    def reset(self, order: int) -> None:
        """All state was set anew by this call; older ones are too late, whatever they name."""
        self._last.clear()
        self._floor = order


def count_uses(running: Sequence[Running], num_blocks: int) -> Counter[int]:
    """In how many tables each block is; ValueError for a running set that cannot be."""
    if len({sid for sid, *_ in running}) < len(running):
        raise ValueError("a sequence runs twice")
    uses: Counter[int] = Counter()
    for sid, _, _, block_ids in running:
        if len(set(block_ids)) < len(block_ids) or any(not 0 <= b < num_blocks for b in block_ids):
            raise ValueError(f"the table of {sid} has a block twice, or one that the pool does not have")
        uses.update(block_ids)
    return uses
