"""Every message that crosses a process, and how it is encoded.

A message is a frozen pydantic model with a tag; on the wire it is msgpack `[tag, fields]`, refused when larger than
`MAX_MESSAGE_BYTES` or malformed (`ProtocolError`). Unknown fields are ignored, so that services one version apart
understand each other; a change that an old reader would misread raises `MAJOR`, which is part of every Redis key.
The hot ones (`TokenChunk`, `Report`) travel as plain tuples and are checked by hand, which costs a tenth.

Knows nothing of Redis. Ids: `rid` names a request, `sid` = `rid.choice` a sequence, `worker`, `store`, ... are
incarnations (one life of a process). Token ids travel packed as little-endian uint32.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAJOR = 1
MAX_MESSAGE_BYTES = 1 << 20
MAX_CHOICES = 128

FinishReason = Literal["stop", "length", "cancelled", "error"]
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]


class ProtocolError(ValueError):
    """A message that cannot be decoded: the bytes are not from a Headrace service of this major version."""


def sequence_id(rid: str, choice: int) -> str:
    return f"{rid}.{choice}"


def split_sequence_id(sid: str) -> tuple[str, int]:
    rid, _, choice = sid.rpartition(".")
    return rid, int(choice)


def pack_ids(ids: Sequence[int]) -> bytes:
    """Little-endian uint32; OverflowError for an id outside [0, 2^32)."""
    packed = array.array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    if len(data) % 4:
        raise ProtocolError(f"{len(data)} bytes are not whole uint32 ids")
    ids = array.array("I")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


_set = object.__setattr__


class Message(BaseModel):
    """Base of all messages. A subclass names its tag; the tag table is built when the class is."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    TAG: ClassVar[str] = ""
    _by_tag: ClassVar[dict[str, type[Message]]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if "TAG" in cls.__dict__:
            assert cls.TAG not in Message._by_tag, cls.TAG
            Message._by_tag[cls.TAG] = cls

    def to_wire(self) -> Any:
        return self.model_dump()

    @classmethod
    def from_wire(cls, fields: Any) -> Self:
        return cls.model_validate(fields)

    @classmethod
    def unchecked(cls, **fields: Any) -> Self:
        """A message of fields that are known to be right, all of them given: in a quarter of `model_construct`'s time,
        which hot messages take most of their decoding for."""
        message = cls.__new__(cls)
        _set(message, "__dict__", fields)
        _set(message, "__pydantic_fields_set__", set(fields))
        _set(message, "__pydantic_extra__", None)
        _set(message, "__pydantic_private__", None)
        return message


M = TypeVar("M", bound=Message)


def encode(message: Message) -> bytes:
    data: bytes = msgpack.packb([message.TAG, message.to_wire()])
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"{message.TAG} of {len(data)} bytes is larger than {MAX_MESSAGE_BYTES}")
    return data


def decode(data: bytes) -> Message:
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(data)} bytes is larger than {MAX_MESSAGE_BYTES}")
    try:
        tag, fields = msgpack.unpackb(data, strict_map_key=False)
        cls = Message._by_tag[tag]
        return cls.from_wire(fields)
    except (ValueError, TypeError, KeyError, ValidationError, msgpack.UnpackException, RecursionError) as e:
        raise ProtocolError(f"undecodable message: {type(e).__name__}") from e


def _row(fields: Any, *types: type) -> list[Any]:
    """The first fields of a hot message, which must have exactly these types; a newer service may send more."""
    row = list(fields[: len(types)])
    if tuple(map(type, row)) != types:
        raise ProtocolError("wrong field types")
    return row


def _ints(values: list[Any]) -> tuple[int, ...]:
    if any(type(v) is not int for v in values):
        raise ProtocolError("wrong field types")
    return tuple(values)


def decode_as(cls: type[M], data: bytes) -> M:
    """The message, which must be of this class."""
    message = decode(data)
    if not isinstance(message, cls):
        raise ProtocolError(f"expected {cls.TAG}, got {message.TAG}")
    return message


# --- a request ---------------------------------------------------------------------------------------------------


class SamplingParams(Message):
    """What the worker needs to draw tokens. Bounds here are the worker's own; the gateway's are narrower or equal."""

    TAG: ClassVar[str] = "sampling"
    max_tokens: int = Field(ge=0, le=1 << 24)  # resolved: never "until the context is full"
    min_tokens: int = Field(default=0, ge=0, le=1 << 24)
    temperature: float = Field(default=1.0, ge=0.0, le=100.0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0, le=1 << 24)  # 0: off
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: int = Field(ge=0, lt=1 << 64)  # resolved by the gateway when the client gave none
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=100.0, allow_inf_nan=False)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(
        default_factory=dict, max_length=1024
    )
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=128)  # EOS included unless ignore_eos
    ignore_eos: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=20)  # how many alternatives beside the drawn token


class TextParams(Message):
    """What a gateway needs to turn tokens into what the client sees; any gateway may do it after a re-attach."""

    TAG: ClassVar[str] = "text"
    api: Literal["chat", "completions"]
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    created: int = 0  # seconds, for display only
    system_fingerprint: str = ""


class TimeLimits(Message):
    """How long the parts of a request may take; 0: as long as they take. `admit` makes deadlines of them in Redis'
    time, but of the one between tokens, which is a duration for whoever reads them."""

    TAG: ClassVar[str] = "time_limits"
    queue_ms: int = Field(default=0, ge=0, le=1 << 40)  # from admission until it is first placed
    first_token_ms: int = Field(default=0, ge=0, le=1 << 40)
    inter_token_ms: int = Field(default=0, ge=0, le=1 << 40)
    total_ms: int = Field(default=0, ge=0, le=1 << 40)


class RequestSpec(Message):
    """The record `r:<rid>` besides the prompt ids: written once by `admit`, never changed."""

    TAG: ClassVar[str] = "request"
    rid: str
    num_choices: int = Field(ge=1, le=MAX_CHOICES)
    num_prompt_tokens: int = Field(ge=1)
    salt: bytes = Field(min_length=32, max_length=32)  # deployment secret, API key and cache_salt, hashed
    sampling: SamplingParams
    text: TextParams
    client_id: str = ""
    time_limits: TimeLimits = TimeLimits()
    num_prompts: int = Field(default=1, ge=1, le=MAX_CHOICES)  # of the call, each with a record of its own


class QueueEntry(Message):
    """The header in the `requests` stream: enough to order and place a sequence without its prompt."""

    TAG: ClassVar[str] = "queued"
    sid: str
    epoch: int
    num_prompt_tokens: int
    num_output_tokens: int = 0  # committed before a requeue
    priority: int = 0
    arrival_ms: int = 0  # Redis time of the admission; kept by a requeue, so the place in the queue is kept


# --- the token log ----------------------------------------------------------------------------------------------


class TokenChunk(Message):
    """Tokens committed together. `first` is the position of the first among the output tokens.

    logprobs: one (logprob, ((token id, logprob), ...)) a token, or None. `finish` (stop or length) ends the sequence
    after this chunk; of an error the outcome alone tells, since a client must not take it for an ending.
    cached_tokens is set in the chunk with the first token: prompt tokens whose KV came from the prefix cache.
    """

    TAG: ClassVar[str] = "chunk"
    first: int
    ids: tuple[int, ...]
    logprobs: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] | None = None
    finish: str = ""
    cached_tokens: int = 0

    def after(self, position: int) -> Self:
        """The part from a position within it on."""
        skipped = position - self.first
        logprobs = None if self.logprobs is None else self.logprobs[skipped:]
        return self.model_copy(update={"first": position, "ids": self.ids[skipped:], "logprobs": logprobs})

    def to_wire(self) -> Any:
        logprobs = None if self.logprobs is None else _floats(self.logprobs)
        return (self.first, pack_ids(self.ids), logprobs, self.finish, self.cached_tokens)

    @classmethod
    def from_wire(cls, fields: Any) -> Self:
        first, ids, logprobs, finish, cached_tokens = fields[:5]
        if (type(first), type(ids), type(finish), type(cached_tokens)) != (int, bytes, str, int):
            raise ProtocolError("wrong field types")
        if first < 0:
            raise ProtocolError("chunk: before the first token")
        if logprobs is not None:
            logprobs = tuple(map(_token_logprob, logprobs))
        unpacked = tuple(unpack_ids(ids))
        if logprobs is not None and len(logprobs) != len(unpacked):
            raise ProtocolError("chunk: one log-probability a token")
        return cls.unchecked(first=first, ids=unpacked, logprobs=logprobs, finish=finish, cached_tokens=cached_tokens)


def _token_logprob(fields: Any) -> tuple[float, tuple[tuple[int, float], ...]]:
    logprob, top = _row(fields, float, list)
    return logprob, tuple((i, p) for i, p in (_row(pair, int, float) for pair in top))


def _floats(logprobs: Any) -> Any:
    """An engine may have drawn with certainty and say 0; on the wire a log-probability is a float."""
    return [(float(lp), [(i, float(p)) for i, p in top]) for lp, top in logprobs]


class Outcome(Message):
    """The terminal entry of a sequence: why it ended and how many of its logged tokens count."""

    TAG: ClassVar[str] = "outcome"
    reason: FinishReason
    num_tokens: int = -1  # tokens shown and counted; -1: all in the log
    code: str = ""  # of an error, for the client
    message: str = ""


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
        sid, epoch, index, block_id, ids = _row(fields, str, int, int, int, bytes)
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
        sid, epoch, reason = _row(fields, str, int, str)
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
        sid, epoch, index, block_id = _row(fields, str, int, int, int)
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
        sid, epoch, num_tokens, num_computed, block_ids, starved, salt = _row(
            fields, str, int, int, int, list, bool, bytes
        )
        return cls.unchecked(
            sid=sid, epoch=epoch, num_tokens=num_tokens, num_computed=num_computed, block_ids=_ints(block_ids),
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

    def to_wire(self) -> Any:
        return (
            self.worker, self.term, self.pool_term, [r.to_wire() for r in self.running], self.spare_block_ids,
            [t.to_wire() for t in self.taken], [s.to_wire() for s in self.seals], [e.to_wire() for e in self.ended],
            self.num_steps, float(self.tokens_per_second), float(self.prefill_tokens_per_second),
            float(self.hang_s),
        )  # fmt: skip

    @classmethod
    def from_wire(cls, fields: Any) -> Self:
        worker, term, pool_term, running, spare, taken, seals, ended, num_steps, speed = _row(
            fields, str, int, int, list, list, list, list, list, int, float
        )
        prefill_speed, hang_s = (f if type(f) is float else 0.0 for f in (*fields[10:12], 0.0, 0.0)[:2])
        return cls.unchecked(
            worker=worker, term=term, pool_term=pool_term,
            running=tuple(RunningSequence.from_wire(r) for r in running), spare_block_ids=_ints(spare),
            taken=tuple(Taken.from_wire(t) for t in taken), seals=tuple(Seal.from_wire(s) for s in seals),
            ended=tuple(Ended.from_wire(e) for e in ended), num_steps=num_steps, tokens_per_second=speed,
            prefill_tokens_per_second=prefill_speed, hang_s=hang_s,
        )  # fmt: skip


class RunningState(Message):
    """The answer to `TakeOver`: everything the worker holds, echoing the term. Seals: all full blocks it knows of."""

    TAG: ClassVar[str] = "running_state"
    worker: str
    term: int
    pool_term: int
    running: tuple[RunningSequence, ...]
    spare_block_ids: tuple[int, ...]
    seals: tuple[Seal, ...] = ()
    ask: int = 0


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


# --- scheduler <-> cache store. Every call is a state: repeating it changes nothing -------------------------------


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


# --- membership -------------------------------------------------------------------------------------------------

MemberKind = Literal["gateway", "scheduler", "store", "worker"]


class Member(Message):
    """An incarnation as it announces itself in `members`; the worker's fields are 0 or empty for other kinds."""

    TAG: ClassVar[str] = "member"
    kind: MemberKind
    incarnation: str
    name: str = ""
    max_model_len: int = 0
    num_blocks: int = 0
    block_size: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    vocab_size: int = 0
    variant: str = ""  # kernel variant; part of every block key
    device: str = ""
    draining: bool = False  # it goes on with what it has and takes no more


class Event(Message):
    """A hint on the `events` stream that something changed sooner than the next look would find it."""

    TAG: ClassVar[str] = "event"
    kind: Literal["joined", "left", "pool", "run", "cancelled"]
    id: str = ""
