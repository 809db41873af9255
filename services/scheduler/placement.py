"""Which worker takes a sequence, and which sequence gives way. *Pure.*"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from services.scheduler.sequence import Running

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


def choose_victim(running: Iterable[Running], below_priority: int | None = None) -> Running | None:
    """Lowest priority first (highest number), then the cheapest to bring back, then the latest come.

    below_priority: only those that rank behind it (to make room for a newcomer of that priority).
    """
    candidates = [r for r in running if not r.preempting and (below_priority is None or r.priority > below_priority)]
    return min(candidates, key=lambda r: (-r.priority, r.num_tokens, -r.arrival_ms, r.sid), default=None)
