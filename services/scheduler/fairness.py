"""Whose turn it is: the order of the queue between API keys, by the tokens they have been given. *Pure.*

Each key has a counter of tokens: those computed for its prompts, and with more weight those drawn. The key with the
lowest one is next; within a key it is the order of priority and arrival (`order_key`). Between keys a priority counts
too, but none below a bound: a key may let others pass, and cannot pass them by what it says of itself. A key that comes
back from idleness starts just before the least served one, so that nobody saves up (virtual token counters, Sheng et
al., OSDI 2024).

Order alone would not help somebody who comes while long answers of another key fill a worker. So while other keys are
about, a key leaves a small share of each worker free, in slots, blocks and prefill under way; and for a key that has
nothing running there, the most served one gives way with a sequence, which costs little: its KV stays findable.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

from services.scheduler.sequence import Queued, QueueState, order_key
from services.scheduler.worker_view import Phase, WorkerView

OUTPUT_WEIGHT = 2.0  # of a drawn token, against one of a prompt
NEWCOMER_TOKENS = 1.0  # a key that comes back is next
RECENT_S = 10.0  # a key is about for so long after it had a sequence
SHARE_LEFT = 16  # one of so many slots and blocks of a worker, at least one, is left to other keys
PREFILL_AHEAD_S = 0.25  # a worker reports every 0.1 s: it never lacks work, and a newcomer waits no longer than this


class Fairness:
    def __init__(self, workers: Mapping[str, WorkerView], queue: Mapping[str, Queued], min_priority: int = 0) -> None:
        self._min_priority = min_priority
        self._workers = workers
        self._queue = queue
        self._used: dict[str, float] = defaultdict(float)
        self._floor = 0.0  # what the least served key had, when there last was one
        self._active: set[str] = set()
        self._seen_at: dict[str, float] = {}

    # --- what keys have been given -----------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Who is about; to be called before any question."""
        active = {q.key for q in self._queue.values()}
        active |= {r.key for v in self._workers.values() for r in v.running.values()}
        active.discard("")  # of what was taken over: not known yet
        self._floor = min((self._used[k] for k in active & self._active), default=self._floor)
        for key in active - self._active:
            self._used[key] = max(self._used[key], self._floor - NEWCOMER_TOKENS)
        self._active = active
        self._seen_at |= dict.fromkeys(active, now)

    def charge_prompt(self, key: str, num_tokens: int) -> None:
        self._used[key] += num_tokens

    def charge_output(self, key: str, num_tokens: int) -> None:
        self._used[key] += OUTPUT_WEIGHT * num_tokens

    # --- order -------------------------------------------------------------------------------------------------------

    def order(self, waiting: Iterable[Queued], skip: Collection[str] = ()) -> Iterator[Queued]:
        """By priority, then the least served key's first one. What is on its way, and what is taken from here, counts
        as served, so that keys take turns. skip: keys that are passed over, also those that come into it meanwhile."""
        queues: dict[str, list[Queued]] = defaultdict(list)
        for queued in sorted(waiting, key=order_key, reverse=True):
            queues[queued.key].append(queued)
        used = self._used.copy()
        for queued in self._queue.values():
            if queued.state is not QueueState.WAITING:
                used[queued.key] += queued.num_tokens

        def place(first: Queued) -> tuple[int, float, tuple[int, float, str], str]:
            return max(first.priority, self._min_priority), used[first.key], order_key(first), first.key

        heap = [place(q[-1]) for key, q in queues.items() if key not in skip]
        heapq.heapify(heap)
        while heap:
            key = heap[0][-1]
            queued = queues[key].pop()
            yield queued
            used[key] += queued.num_tokens
            if key not in skip and (rest := queues[key]):
                heapq.heapreplace(heap, place(rest[-1]))
            else:
                heapq.heappop(heap)

    # --- room for others ---------------------------------------------------------------------------------------------

    def holds_back(self, queued: Queued, view: WorkerView, now: float) -> bool:
        """Would it take there what its key has to leave to others?"""
        if not self._shares(queued.key, view, now):
            return False
        left = max(1, view.member.max_num_seqs // SHARE_LEFT)
        if view.num_sequences + left >= view.member.max_num_seqs or queued.key in view.full_for:
            return True
        ahead = sum(r.num_tokens - r.num_computed for r in view.running.values() if r.key == queued.key)
        ahead += sum(q.num_tokens for q in view.on_their_way(self._queue) if q.key == queued.key)
        return 0 < view.prefill_tokens_per_second * PREFILL_AHEAD_S < ahead

    def blocks_left(self, queued: Queued, view: WorkerView, now: float) -> int:
        """Blocks that it has to leave free there for other keys."""
        return max(1, view.member.num_blocks // SHARE_LEFT) if self._shares(queued.key, view, now) else 0

    def _shares(self, key: str, view: WorkerView, now: float) -> bool:
        """Only a key that has something there already has to leave anything."""
        recent = any(k != key and now - at < RECENT_S for k, at in self._seen_at.items())
        return recent and self._num_there(view)[key] > 0

    def gives_way(self, queued: Queued, view: WorkerView) -> str | None:
        """The key of which a sequence makes room there for this one, whose key has none."""
        there = self._num_there(view)
        if view.phase is not Phase.READY or view.handing_over or there[queued.key]:
            return None
        richest = max((k for k, n in there.items() if n > 1), key=lambda k: (self._used[k], k), default=None)
        return richest if richest is not None and self._used[richest] > self._used[queued.key] else None

    def _num_there(self, view: WorkerView) -> Counter[str]:
        return Counter([*(r.key for r in view.running.values()), *(q.key for q in view.on_their_way(self._queue))])
