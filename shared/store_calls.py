"""What schedulers and workers say to a cache store, and its answers.

Every call about blocks is a state: repeating it changes nothing. What is said of answers may be lost, or come twice.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from shared.wire import MAX_STATE_BYTES, Message, ProtocolError
from shared.worker_protocol import Seal, Taken

MAX_FLEET_ASKS = 8


class InventoryEntry(Message):
    """A sealed block as the worker holds it; keys as `shared.block_keys` computes them."""

    TAG: ClassVar[str] = "block"
    block_id: int
    key: bytes
    parent_key: bytes
    ids: bytes  # packed


class Inventory(Message):
    """One page of the answer to `ListInventory`, in the order the blocks were sealed; `last` ends it."""

    TAG: ClassVar[str] = "inventory"
    worker: str
    pool_term: int
    blocks: tuple[InventoryEntry, ...]
    last: bool


class StoreCall(Message):
    """Common head. run_term: the caller's lease on the worker; pool_term: the store's on the pool, known so far.

    call rises with every new call of a run term, whatever its kind; a repeat has the number of the call it repeats. So
    the store can tell a late call from a new one, and never undoes by the one what the other did.
    """

    call: int
    reply_to: str
    worker: str
    run_term: int
    pool_term: int


class Ensure(StoreCall):
    """Match, reference and allocate blocks for all of ids (packed), in one step. Repeated: the same table.

    Who gives a sequence up releases it whatever the answer was, so that a late repeat does not hold blocks for it.
    """

    TAG: ClassVar[str] = "ensure"
    sid: str
    epoch: int
    salt: bytes
    ids: bytes
    wait_for_leader: bool = True  # False: do not wait for an equal block that another sequence is computing
    use_cached: bool = True  # False: every prompt position is wanted, so match nothing; blocks are sealed as usual
    keep_free: int = 0  # full, unless this many blocks stay free after it (room for the running ones to grow)


class Table(Message):
    """The answer to `Ensure`.

    ok: block_ids cover all ids, the first cached_length tokens of them are sealed.
    wait: sequence `leader` is computing the next equal blocks, up to its block number leader_index.
    full: fewer than num_needed blocks are free. stale: the call's run_term or epoch is not current.
    not_ready: the pool is not rebuilt, or not reconciled with this run_term yet; pool_term is the current one.
    """

    TAG: ClassVar[str] = "table"
    call: int
    worker: str
    pool_term: int
    sid: str
    epoch: int
    status: Literal["ok", "wait", "full", "stale", "not_ready"]
    block_ids: tuple[int, ...] = ()
    cached_length: int = 0
    leader: str = ""
    leader_index: int = -1
    num_needed: int = 0
    num_free: int = 0


class Grant(StoreCall):
    """Make the worker's spare grant num_blocks large (allocates what is missing, never takes away).

    No block is reclaimed while one is under way: its answer would seem to give the block again.
    """

    TAG: ClassVar[str] = "grant"
    num_blocks: int


class Granted(Message):
    TAG: ClassVar[str] = "granted"
    call: int
    worker: str
    pool_term: int
    status: Literal["ok", "stale", "not_ready"]
    spare_block_ids: tuple[int, ...] = ()  # the whole grant, as many as could be had
    num_free: int = 0


class Update(StoreCall):
    """What a report says about blocks, applied in this order: taken, seals, dropped, released."""

    TAG: ClassVar[str] = "update"
    taken: tuple[Taken, ...] = ()
    seals: tuple[Seal, ...] = ()
    dropped: tuple[tuple[str, int, int], ...] = ()  # (sid, epoch, block id) whose Remap is in the plan stream
    released: tuple[tuple[str, int], ...] = ()  # (sid, epoch)
    reclaimed: tuple[int, ...] = ()  # spare blocks whose Reclaim is in the plan stream

    def to_wire(self) -> Any:
        fields = self.model_dump(exclude={"taken", "seals"})
        return fields | {"taken": [t.to_wire() for t in self.taken], "seals": [s.to_wire() for s in self.seals]}

    @classmethod
    def from_wire(cls, fields: Any) -> Self:
        if not isinstance(fields, dict):
            raise ProtocolError("update: not a map")
        taken = tuple(map(Taken.from_wire, fields.get("taken", ())))
        seals = tuple(map(Seal.from_wire, fields.get("seals", ())))
        return cls.model_validate(fields | {"taken": taken, "seals": seals})


class Updated(Message):
    """remaps: (sid, epoch, index, old block, new block); the old one is held until an `Update` drops it."""

    TAG: ClassVar[str] = "updated"
    call: int
    worker: str
    pool_term: int
    status: Literal["ok", "stale", "not_ready"]
    remaps: tuple[tuple[str, int, int, int, int], ...] = ()
    num_free: int = 0


class Reconcile(StoreCall):
    """Set the pool's references to exactly this running set, and refuse run terms below this one from now on."""

    TAG: ClassVar[str] = "reconcile"
    MAX_BYTES: ClassVar[int] = MAX_STATE_BYTES
    running: tuple[tuple[str, int, bytes, tuple[int, ...]], ...]  # (sid, epoch, salt, block ids)
    spare_block_ids: tuple[int, ...]


class Reconciled(Message):
    TAG: ClassVar[str] = "reconciled"
    call: int
    worker: str
    pool_term: int
    status: Literal["ok", "stale", "not_ready"]
    num_free: int = 0
    num_blocks: int = 0


class Match(StoreCall):
    """How much of ids (packed) is sealed in the worker's pool? Changes nothing; for placement."""

    TAG: ClassVar[str] = "match"
    salt: bytes
    ids: bytes


class Matched(Message):
    TAG: ClassVar[str] = "matched"
    call: int
    worker: str
    pool_term: int
    cached_length: int
    num_free: int = 0


class FleetCall(Message):
    """A worker has had these answers, and asks what is known of those tenants: what has changed after the version of
    this very store that it has, or 0. See `shared/suffix_table.py`."""

    TAG: ClassVar[str] = "fleet"
    worker: str
    reply_to: str
    answers: tuple[tuple[bytes, bytes, bytes], ...] = ()  # tenant, the last ids of the prompt, those of the answer
    asks: tuple[tuple[bytes, int], ...] = Field(default=(), max_length=MAX_FLEET_ASKS)


class FleetChanges(Message):
    """The answer about one tenant, if there is something to say. is_all: no later changes are known."""

    TAG: ClassVar[str] = "fleet_changes"
    store: str
    tenant: bytes
    version: int
    is_all: bool
    words: bytes  # packed
