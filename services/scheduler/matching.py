"""Who holds the longest prefix of a queued sequence: a worker leased here, or another scheduler's. *Pure.*

Stores are asked about every worker that could take it. A sequence whose best worker another scheduler leases is offered
to that scheduler, once an epoch: what its prefix saves there is worth more than the hop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.scheduler.actions import Offer
from services.scheduler.outbound import Outbound
from services.scheduler.placement import NEIGHBOUR_COST_TOKENS, choose_worker, placing_cost
from services.scheduler.sequence import Queued, QueueState
from services.scheduler.worker_view import WorkerView, fits_member
from shared.protocol import Member
from shared.store_calls import Match, Matched

MATCH_TIMEOUT_S = 0.2
MIN_OFFER_GAIN_TOKENS = NEIGHBOUR_COST_TOKENS  # what computing them costs is more than a hop to another scheduler


@dataclass(slots=True)
class Neighbour:
    """A worker that another scheduler leases, as of the last look at the leases. num_sequences: placed there."""

    member: Member
    scheduler: str
    store: str
    pool_term: int
    num_sequences: int

    @property
    def worker(self) -> str:
        return self.member.incarnation

    def fits(self, num_held: int) -> bool:
        return fits_member(self.member, num_held)


class Matching:
    def __init__(self, neighbours: Mapping[str, Neighbour], queue: dict[str, Queued], out: Outbound) -> None:
        self._neighbours = neighbours
        self._queue = queue
        self._out = out

    def is_worthwhile(self, queued: Queued, candidates: list[WorkerView]) -> bool:
        return len(candidates) > 1 or any(self._worth_offering(queued))

    def ask(self, queued: Queued, candidates: list[WorkerView], now: float) -> None:
        queued.state, queued.matches, queued.asked_at = QueueState.MATCHING, {}, now
        others = list(self._worth_offering(queued))
        queued.asked = frozenset([v.worker for v in candidates] + [n.worker for n in others])
        for view in candidates:
            self._out.call(view, now, Match, salt=queued.salt, ids=queued.ids)
        for other in others:
            self._out.match(other.worker, other.store, other.pool_term, now, queued.salt, queued.ids)

    def on_matched(self, matched: Matched) -> None:
        call = self._out.calls.answered(matched.call)
        if not isinstance(call, Match):
            return
        for queued in self._queue.values():
            if queued.state is QueueState.MATCHING and queued.ids == call.ids and matched.worker in queued.asked:
                queued.matches[matched.worker] = matched.cached_length

    def is_open(self, queued: Queued, now: float) -> bool:
        """Are there answers to wait for?"""
        return len(queued.matches) < len(queued.asked) and now - queued.asked_at < MATCH_TIMEOUT_S

    def offer_if_better(self, queued: Queued, candidates: Iterable[WorkerView]) -> bool:
        """Offers it where that is better than every candidate."""
        best = min(placing_cost(queued.num_tokens, v, queued.matches)[0] for v in candidates)
        others = [n for n in self._worth_offering(queued) if n.worker in queued.matches]
        if others:
            other = choose_worker(queued.num_tokens, others, queued.matches)
            if placing_cost(queued.num_tokens, other, queued.matches)[0] + MIN_OFFER_GAIN_TOKENS <= best:
                self._offer(queued, other)
                return True
        return False

    def offer_where_it_fits(self, queued: Queued) -> bool:
        """It fits no worker leased here. True if another could run it, whether it has been offered there or not."""
        others = [n for n in self._neighbours.values() if n.fits(queued.num_held)]
        if others and not queued.offered:
            self._offer(queued, choose_worker(queued.num_tokens, others, {}))
        return bool(others)

    def on_offered(self, offer: Offer, status: str) -> None:
        queued = self._queue.get(offer.sid)
        if queued is None or queued.epoch != offer.epoch or queued.state is not QueueState.OFFERING:
            return
        if status in ("ok", "stale"):
            del self._queue[offer.sid]
        else:
            queued.offered = True
            queued.back_to_waiting()

    def _worth_offering(self, queued: Queued) -> Iterable[Neighbour]:
        if queued.offered or queued.num_tokens <= MIN_OFFER_GAIN_TOKENS:
            return ()
        return (n for n in self._neighbours.values() if n.fits(queued.num_held))

    def _offer(self, queued: Queued, other: Neighbour) -> None:
        queued.state = QueueState.OFFERING
        other.num_sequences += 1  # until the next look
        self._out.act(Offer(queued.sid, queued.epoch, other.scheduler))
