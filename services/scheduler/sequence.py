"""The scheduler's view of a sequence: queued with it, or placed on a worker that it leases. *Pure.*

Only hints: the record in Redis decides, and every script call names the epoch that this view believes in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

AGING_MS_PER_TOKEN = 1.0
MAX_AGING_MS = 2000.0


class QueueState(Enum):
    WAITING = auto()  # for its turn
    READING = auto()  # its record is being read
    MATCHING = auto()  # stores are asked how much of it they hold
    OFFERING = auto()  # to the scheduler that leases a better worker
    ENSURING = auto()  # a store allocates its blocks
    FOLLOWING = auto()  # another sequence of the chosen worker computes the blocks it needs next
    ASSIGNING = auto()  # the assign script is under way


@dataclass(slots=True)
class Queued:
    """num_tokens: prompt and committed output, all of which must be in the pool before the next token is drawn."""

    sid: str
    epoch: int
    num_prompt_tokens: int
    num_output_tokens: int = 0
    priority: int = 0
    arrival_ms: int = 0
    strikes: int = 0
    state: QueueState = QueueState.WAITING
    worker: str = ""  # chosen
    ids: bytes = b""  # packed prompt and output, once read
    salt: bytes = b""
    scoring: bool = False  # log-probabilities of its prompt are missing yet: all of it is computed
    draws: bool = False  # tokens, behind its own; nobody knows before it is read
    matches: dict[str, int] = field(default_factory=dict)  # worker -> cached length
    asked: frozenset[str] = frozenset()  # workers whose match is awaited
    asked_at: float = 0.0
    offered: bool = False  # to another scheduler, in this epoch
    leader: str = ""
    leader_index: int = -1
    leader_sealed: int = 0  # blocks, when last looked
    followed_since: float = 0.0  # or since it was seen to get on
    patient: bool = True  # waits for a leader; not any more after one has not got on for long
    key: str = ""  # id of the API key
    start_by_ms: int = 0  # deadlines, in Redis' time
    first_by_ms: int = 0
    end_by_ms: int = 0
    order: tuple[int, float, str] | None = None  # see `order_key`
    blocks_left: int = 0  # what its key had to leave to others when the store was asked

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def num_held(self) -> int:
        """Tokens that must fit where it runs: one that is drawn needs a slot too."""
        return self.num_tokens + self.draws

    @property
    def ids_in_pool(self) -> bytes:
        """Packed; a store adds a slot. Of a prompt that nothing is drawn after, the last token is never computed."""
        return self.ids if self.draws else self.ids[:-4] or self.ids

    def back_to_waiting(self) -> None:
        self.state, self.worker, self.leader, self.matches = QueueState.WAITING, "", "", {}


def order_key(queued: Queued) -> tuple[int, float, str]:
    """fcfs with aging: by priority (lower first), then by arrival, a long prompt standing back for at most 2 s."""
    if queued.order is None:  # asked for at every decision, of everybody who waits
        aging = min(MAX_AGING_MS, AGING_MS_PER_TOKEN * queued.num_tokens)
        queued.order = queued.priority, queued.arrival_ms + aging, queued.sid
    return queued.order


@dataclass(slots=True)
class Running:
    """A sequence placed on a leased worker, as the last report showed it."""

    sid: str
    epoch: int
    num_tokens: int
    priority: int = 0
    arrival_ms: int = 0
    starved: bool = False
    preempting: bool = False
    suspect: bool = False
    num_sealed: int = 0  # blocks, from the first on
    num_computed: int = 0
    key: str = ""
    first_by_ms: int = 0  # until it has drawn a token
    end_by_ms: int = 0
    ending: bool = False  # its end has been decided here
