"""What passes between a worker and who leads it: changes of its plan, and its reports.

The hot one (`Report`) travels as plain tuples and is checked by hand, which costs a tenth.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import Field

from shared.wire import MAX_STATE_BYTES, Message, ints, pack_ids, row, unpack_ids

# --- plan changes: scheduler (or store) -> worker, in the order of the worker's plan stream ----------------------


class TakeOver(Message):
    """First message of a scheduler's term; the worker answers with its `RunningState` to `inbox`."""

    TAG: ClassVar[str] = "take_over"
    term: int
    inbox: str
    ask: int = 0  # how often this term has asked; the answer echoes it


class Admit(Message):
    """Run this sequence. Carries no token ids: the worker reads prompt and log once.

    block_ids cover at least the prompt; the first cached_length tokens need no computing (a multiple of block_size,
    at most all tokens but one).
    """

    TAG: ClassVar[str] = "admit"
    sid: str
    epoch: int
    pool_term: int
    cached_length: int
    block_ids: tuple[int, ...]
    alone: bool = False  # a suspect of earlier worker deaths: no batch mates in its steps


class Extend(Message):
    """More blocks: for a sequence, or (sid empty) for the worker's spare grant."""

    TAG: ClassVar[str] = "extend"
    sid: str
    epoch: int
    pool_term: int
    block_ids: tuple[int, ...]


class Remap(Message):
    """Block `index` of the sequence is equal to `block_id`; use that one, the old one is given to others after this."""

    TAG: ClassVar[str] = "remap"
    sid: str
    epoch: int
    pool_term: int
    index: int
    block_id: int


class Preempt(Message):
    """Stop the sequence and report its seals; its blocks go to others after this."""

    TAG: ClassVar[str] = "preempt"
    sid: str
    epoch: int


class Cancel(Message):
    TAG: ClassVar[str] = "cancel"
    sid: str
    epoch: int


class Reclaim(Message):
    """These spare blocks are no longer the worker's; those it has already used it reports as taken."""

    TAG: ClassVar[str] = "reclaim"
    pool_term: int
    block_ids: tuple[int, ...]


class SetPolicy(Message):
    TAG: ClassVar[str] = "policy"
    max_num_batched_tokens: int = Field(ge=1)
    max_num_seqs: int = Field(ge=1)
    prefill_chunk: int = Field(ge=1)


class ListInventory(Message):
    """A store that took the pool's lease asks for all sealed blocks; the answer goes to `reply_to`."""

    TAG: ClassVar[str] = "list_inventory"
    pool_term: int
    reply_to: str


# --- worker -> scheduler ----------------------------------------------------------------------------------------


class Seal(Message):
    """Block `index` of the sequence is full: KV of these tokens is written and will not change."""

    TAG: ClassVar[str] = "seal"
    sid: str
    epoch: int
    index: int
    block_id: int
    ids: tuple[int, ...]

    def to_wire(self) -> Any:
        return (self.sid, self.epoch, self.index, self.block_id, pack_ids(self.ids))

    @classmethod
    def from_wire(cls, fields: Any) -> Self:
        sid, epoch, index, block_id, ids = row(fields, str, int, int, int, bytes)
        return cls.unchecked(sid=sid, epoch=epoch, index=index, block_id=block_id, ids=tuple(unpack_ids(ids)))


class Ended(Message):
    """The worker no longer runs (sid, epoch); reason: a finish reason, or stale, refused, preempted."""

    TAG: ClassVar[str] = "ended"
    sid: str
    epoch: int
    reason: str

    def to_wire(self) -> Any:
        return (self.sid, self.epoch, self.reason)

    @classmethod
    def from_wire(cls, fields: Any) -> Self:
        sid, epoch, reason = row(fields, str, int, str)
        return cls.unchecked(sid=sid, epoch=epoch, reason=reason)


class Taken(Message):
    """A spare block went to a sequence, as its block number `index`."""

    TAG: ClassVar[str] = "taken"
    sid: str
    epoch: int
    index: int
    block_id: int

    def to_wire(self) -> Any:
        return (self.sid, self.epoch, self.index, self.block_id)

    @classmethod
    def from_wire(cls, fields: Any) -> Self:
        sid, epoch, index, block_id = row(fields, str, int, int, int)
        return cls.unchecked(sid=sid, epoch=epoch, index=index, block_id=block_id)


class RunningSequence(Message):
    """One row of a worker's running set. block_ids is empty in a `Report`, complete in a `RunningState`."""

    TAG: ClassVar[str] = "running"
    sid: str
    epoch: int
    num_tokens: int  # prompt and output
    num_computed: int
    block_ids: tuple[int, ...] = ()
    starved: bool = False  # cannot go on: its last block is full and no spare is left
    salt: bytes = b""  # in a RunningState, so that the store can go on with its chain of keys

    def to_wire(self) -> Any:
        return (self.sid, self.epoch, self.num_tokens, self.num_computed, self.block_ids, self.starved, self.salt)

    @classmethod
    def from_wire(cls, fields: Any) -> Self:
        sid, epoch, num_tokens, num_computed, block_ids, starved, salt = row(
            fields, str, int, int, int, list, bool, bytes
        )
        return cls.unchecked(
            sid=sid, epoch=epoch, num_tokens=num_tokens, num_computed=num_computed, block_ids=ints(block_ids),
            starved=starved, salt=salt,
        )  # fmt: skip


class Report(Message):
    """What changed at the worker, as a state: repeated or late is harmless. Apply taken, then seals, then ended."""

    TAG: ClassVar[str] = "report"
    worker: str
    term: int
    pool_term: int
    running: tuple[RunningSequence, ...] = ()
    spare_block_ids: tuple[int, ...] = ()
    taken: tuple[Taken, ...] = ()
    seals: tuple[Seal, ...] = ()
    ended: tuple[Ended, ...] = ()
    num_steps: int = 0
    tokens_per_second: float = 0.0  # decode speed lately, of the whole batch
    prefill_tokens_per_second: float = 0.0  # at most, as its steps have shown; 0: not known
    hang_s: float = 0.0  # a step that takes longer never ends; 0: not known
    taken_from: int = -1  # the number, in the worker's life, of the first of `taken`; -1: not said

    def to_wire(self) -> Any:
        return (
            self.worker, self.term, self.pool_term, [r.to_wire() for r in self.running], self.spare_block_ids,
            [t.to_wire() for t in self.taken], [s.to_wire() for s in self.seals], [e.to_wire() for e in self.ended],
            self.num_steps, float(self.tokens_per_second), float(self.prefill_tokens_per_second),
            float(self.hang_s), self.taken_from,
        )  # fmt: skip

    @classmethod
    def from_wire(cls, fields: Any) -> Self:
        worker, term, pool_term, running, spare, taken, seals, ended, num_steps, speed = row(
            fields, str, int, int, list, list, list, list, list, int, float
        )
        prefill_speed, hang_s = (f if type(f) is float else 0.0 for f in (*fields[10:12], 0.0, 0.0)[:2])
        taken_from = fields[12] if len(fields) > 12 and type(fields[12]) is int else -1
        return cls.unchecked(
            worker=worker, term=term, pool_term=pool_term,
            running=tuple(RunningSequence.from_wire(r) for r in running), spare_block_ids=ints(spare),
            taken=tuple(Taken.from_wire(t) for t in taken), seals=tuple(Seal.from_wire(s) for s in seals),
            ended=tuple(Ended.from_wire(e) for e in ended), num_steps=num_steps, tokens_per_second=speed,
            prefill_tokens_per_second=prefill_speed, hang_s=hang_s, taken_from=taken_from,
        )  # fmt: skip


class RunningState(Message):
    """The answer to `TakeOver`: everything the worker holds, echoing the term. Seals: all full blocks it knows of."""

    TAG: ClassVar[str] = "running_state"
    MAX_BYTES: ClassVar[int] = MAX_STATE_BYTES
    worker: str
    term: int
    pool_term: int
    running: tuple[RunningSequence, ...]
    spare_block_ids: tuple[int, ...]
    seals: tuple[Seal, ...] = ()
    ask: int = 0
    num_taken: int = -1  # in the worker's life, all of which this says; -1: not said
