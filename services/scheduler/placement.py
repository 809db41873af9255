"""Which worker takes a sequence, and which sequence gives way. *Pure.*"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from services.scheduler.sequence import Queued, Running

# A running neighbour costs about as much as computing this many prompt tokens: it slows every decode step, a little.
NEIGHBOUR_COST_TOKENS = 64


class Candidate(Protocol):
    @property
    def worker(self) -> str: ...

    @property
    def num_sequences(self) -> int: ...


C = TypeVar("C", bound=Candidate)


def placing_cost(num_tokens: int, candidate: Candidate, cached: Mapping[str, int]) -> tuple[int, int, str]:
    """In prompt tokens to compute. A worker missing in `cached` did not answer in time, and counts as holding none."""
    uncached = num_tokens - cached.get(candidate.worker, 0)
    return uncached + NEIGHBOUR_COST_TOKENS * candidate.num_sequences, candidate.num_sequences, candidate.worker


def choose_worker(num_tokens: int, candidates: Iterable[C], cached: Mapping[str, int]) -> C:
    """The longest prefix wins unless its load costs more than recomputing elsewhere would. Ties: the least loaded."""
    return min(candidates, key=lambda c: placing_cost(num_tokens, c, cached))


def choose_victim(running: Iterable[Running], newcomer: Queued | None = None, min_priority: int = 0) -> Running | None:
    """Lowest priority first (highest number), then the cheapest to bring back, then the latest come.

    newcomer: only those that rank behind it. min_priority: between keys a lower one counts as this. So what a key says
    of its own sequences chooses among these, and not whose they are.
    """

    def ranks_behind(r: Running, n: Queued) -> bool:
        return r.priority > (n.priority if r.key == n.key else max(n.priority, min_priority))

    def cost(r: Running) -> tuple[int, int, str]:
        return r.num_tokens, -r.arrival_ms, r.sid

    candidates = [r for r in running if not r.preempting and (newcomer is None or ranks_behind(r, newcomer))]
    first = min(candidates, key=lambda r: (-max(r.priority, min_priority), *cost(r)), default=None)
    if first is None:
        return None
    return min((r for r in candidates if r.key == first.key), key=lambda r: (-r.priority, *cost(r)))
