"""Which worker takes a sequence, and which sequence gives way. *Pure.*"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.scheduler.sequence import Running
from services.scheduler.worker_view import WorkerView

# A running neighbour costs about as much as computing this many prompt tokens: it slows every decode step, a little.
NEIGHBOUR_COST_TOKENS = 64


def choose_worker(num_tokens: int, candidates: Iterable[WorkerView], cached: Mapping[str, int]) -> str:
    """The longest prefix wins unless its load costs more than recomputing elsewhere would. Ties: the least loaded.

    A worker missing in `cached` did not answer in time and counts as holding nothing.
    """

    def cost(view: WorkerView) -> tuple[int, int, str]:
        uncached = num_tokens - cached.get(view.worker, 0)
        return uncached + NEIGHBOUR_COST_TOKENS * view.num_sequences, view.num_sequences, view.worker

    return min(candidates, key=cost).worker


def choose_victim(running: Iterable[Running], below_priority: int | None = None) -> Running | None:
    """Lowest priority first (highest number), then the cheapest to bring back, then the latest come.

    below_priority: only those that rank behind it (to make room for a newcomer of that priority).
    """
    candidates = [r for r in running if not r.preempting and (below_priority is None or r.priority > below_priority)]
    return min(candidates, key=lambda r: (-r.priority, r.num_tokens, -r.arrival_ms, r.sid), default=None)
