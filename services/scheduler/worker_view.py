"""What a scheduler knows of one worker that it leases. *Pure.*

Phases: TAKING_OVER until the worker has answered with its running set, RECONCILING until the store has set its
references to exactly that, then READY. Nothing is assigned, extended or released before READY. A new pool term (the
store changed) starts again at TAKING_OVER under the same run term.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from services.scheduler.sequence import Queued, Running
from shared.protocol import Member
from shared.wire import MAX_MESSAGE_BYTES

SPARE_SECONDS = 2.0  # the spare grant lasts this long at the worker's measured speed
ASK_AGAIN_S = 0.5  # a question to a worker that has not answered
SILENCE_S = 0.4  # a worker with sequences reports every 0.1 s: after this its lease is looked at, not later
HANG_SLACK_S = 0.7
MIN_STANDING = 20  # reports that say the same; a scheduler that was stopped reads only a few old ones
MAX_SPARE_SHARE = 0.05  # of the pool, but never less than one block a running sequence
MAX_TOKENS = MAX_MESSAGE_BYTES // 4 - 256  # whose ids fit into one call to a store


def fits_member(worker: Member, num_held: int) -> bool:
    return num_held <= min(worker.max_model_len, worker.num_blocks * worker.block_size, MAX_TOKENS)


class Phase(Enum):
    TAKING_OVER = auto()
    RECONCILING = auto()
    READY = auto()


@dataclass(slots=True)
class WorkerView:
    member: Member
    term: int
    store: str = ""  # incarnation that leases the pool; "" while none does
    pool_term: int = 0
    phase: Phase = Phase.TAKING_OVER
    asked_at: float = -math.inf  # when TakeOver or Reconcile was last sent
    patience_s: float = ASK_AGAIN_S  # after which it is sent again; doubled each time
    ask: int = 0  # number of the last TakeOver
    oldest_ask: int = 1  # an answer to one before may be older than what was planned since
    heard_at: float = -math.inf  # its last report, or when it was given a sequence
    running: dict[str, Running] = field(default_factory=dict)
    placing: set[str] = field(default_factory=set)  # a store is asked for their blocks, or has given them
    following: set[str] = field(default_factory=set)  # chosen for it; they wait for another's blocks
    spares: set[int] = field(default_factory=set)  # sent to the worker and not known to be taken
    num_free: int = 0
    full_at: int = -1  # num_free at which the last sequence did not fit; -1: it is not known to be full
    full_for: dict[str, int] = field(default_factory=dict)  # the same for keys that have to leave room to others
    granting: bool = False
    num_taken: int = -1  # spares that the worker has taken in its life, as far as it has told; -1: it does not say
    taken_call: int = -1  # the newest call by which the store has learnt of taken spares
    ending_calls: set[int] = field(default_factory=set)  # calls under way that tell the store of ended sequences
    starved_since: float = math.inf
    handing_over: bool = False
    num_steps: int = -1  # as last reported
    stepped_at: float = math.inf  # when that changed, or when it had nothing to step
    num_standing: int = 0  # reports since then
    hang_s: float = 0.0  # as last reported
    tokens_per_second: float = 0.0
    prefill_tokens_per_second: float = 0.0

    @property
    def worker(self) -> str:
        return self.member.incarnation

    @property
    def num_sequences(self) -> int:
        return len(self.running) + len(self.placing) + len(self.following)

    def on_their_way(self, queue: Mapping[str, Queued]) -> list[Queued]:
        """Those of the queue that are being placed there, or wait for another's blocks."""
        return [queue[sid] for sid in (*self.placing, *self.following) if sid in queue]

    def num_slots(self) -> int:
        """How many sequences more may be placed there: one more than its batch takes, so that no slot waits for a
        message."""
        if self.phase is not Phase.READY or self.handing_over or self.member.draining or self.full_at >= 0:
            return 0
        lookahead = max(1, self.member.max_num_seqs // 16)
        return max(0, self.member.max_num_seqs + lookahead - self.num_sequences)

    def has_room(self) -> bool:
        return self.num_slots() > 0

    def fits(self, num_held: int) -> bool:
        """Could it ever run here, alone? num_held: see `Queued`."""
        return fits_member(self.member, num_held)

    def num_blocks_for(self, num_held: int) -> int:
        """Without any prefix hit."""
        return math.ceil(num_held / self.member.block_size)

    @property
    def capacity(self) -> int:
        """Tokens that its pool holds."""
        return self.member.num_blocks * self.member.block_size

    def spare_target(self) -> int:
        """Blocks the spare grant should hold: 2 s of decoding, at most 5 % of the pool, at least one a sequence."""
        if not self.num_sequences:
            return 0
        for_speed = math.ceil(self.tokens_per_second * SPARE_SECONDS / self.member.block_size)
        most = int(self.member.num_blocks * MAX_SPARE_SHARE)
        return max(self.num_sequences, min(max(for_speed, 2 * self.num_sequences), most))

    def wants_grant(self) -> bool:
        if self.phase is not Phase.READY or self.granting or not self.running:
            return False
        target = self.spare_target()
        return len(self.spares) <= target - max(1, target // 4) and self.num_free > 0

    def is_silent(self, now: float) -> bool:
        """Has it sequences, and has it said nothing for longer than a worker that is alive would?"""
        return bool(self.running) and now - self.heard_at > SILENCE_S

    def note_steps(self, num_steps: int, hang_s: float, now: float) -> None:
        """What a report says of the engine; what it runs is known already."""
        self.hang_s = hang_s
        if num_steps != self.num_steps or all(r.starved for r in self.running.values()):
            self.num_steps, self.stepped_at, self.num_standing = num_steps, now, 0
        else:
            self.num_standing += 1

    def is_hung(self) -> bool:
        """Does it report, again and again, the step that should have ended? It gives itself up earlier, if it can."""
        standing_s = self.heard_at - self.stepped_at
        return self.num_standing >= MIN_STANDING and self.hang_s > 0 and standing_s > self.hang_s + HANG_SLACK_S

    def set_free(self, num_free: int) -> None:
        """The store said how many blocks are free or evictable; more than at the last refusal ends the refusal."""
        self.num_free = num_free
        if num_free > self.full_at:
            self.full_at = -1
        self.full_for = {key: at for key, at in self.full_for.items() if num_free <= at}

    def forget_full(self) -> None:
        """More may fit than did at the last refusal, for another reason than blocks that are free."""
        self.full_at = -1
        self.full_for.clear()
