"""One incarnation of a worker, and what is known in it alone. Who holds on to a life that is over changes nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from services.gpu_worker.batch import EngineInfo
from services.gpu_worker.composer import Budget
from services.gpu_worker.outbox import NOTHING, Carried
from services.gpu_worker.pacing import DETAILS_S, REPORT_S
from shared.bus import Entry, StreamReader
from shared.leases import Membership
from shared.protocol import Member
from shared.scripts import Scripts
from shared.store_calls import Inventory


@dataclass(eq=False)
class Life:
    membership: Membership
    reader: StreamReader
    joined: bool = False
    entries: deque[Entry] = field(default_factory=deque)  # read from the plan, not yet handed to the engine
    pages: deque[tuple[str, Inventory]] = field(default_factory=deque)  # for a store, to be sent, with the stream
    inbox: str = ""  # of the scheduler that has been told the running state, and so gets the reports
    run_term: int = 0  # its term
    reported_at: float = float("-inf")
    detailed_at: float = float("-inf")  # the last report that said which blocks were taken and sealed

    def report_is_due(self, now: float) -> bool:
        return now - self.reported_at >= REPORT_S

    def details_are_due(self, now: float) -> bool:
        return now - self.detailed_at >= DETAILS_S

    def reported(self, carried: Carried, at: float) -> None:
        self.reported_at = at
        if carried is not NOTHING:
            self.detailed_at = at

    @property
    def worker(self) -> str:
        return self.membership.incarnation


def member_of(info: EngineInfo, name: str, capacity: Budget) -> Member:
    """What a worker announces itself as, under a name that is yet to come."""
    return Member(
        kind="worker", incarnation="", name=name, max_model_len=info.max_model_len, num_blocks=info.num_blocks,
        block_size=info.block_size, max_num_seqs=capacity.max_num_seqs, variant=info.variant, device=info.device,
        max_num_batched_tokens=capacity.max_num_batched_tokens, vocab_size=info.vocab_size,
    )  # fmt: skip


def new_life(member: Member, incarnation: str, beat: Scripts, blocking: Any) -> Life:
    """Not joined yet. member: as what the worker announces itself, under its new name.

    The plan is read from the start of its stream, not from where `join` says: if that reply was lost, a scheduler may
    have written before the join is repeated. Whatever is in there is for this life, which has just drawn its name.
    """
    plan = f"plan:{incarnation}"
    named = member.model_copy(update={"incarnation": incarnation})
    return Life(Membership(beat, named, [plan]), StreamReader(blocking, beat.prefix, {plan: "0-0"}))
