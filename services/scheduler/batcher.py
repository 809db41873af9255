"""The queue: who is placed next, where, and every step from a header to an assigned sequence. *Pure.*

A sequence that is given up after a store was asked for its blocks releases them whatever the answer was or will be, so
that a late copy of the question holds nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from services.scheduler.actions import Assign, Finish, ReadRecord
from services.scheduler.deadlines import Deadlines
from services.scheduler.fairness import Fairness
from services.scheduler.matching import Matching, Neighbour
from services.scheduler.outbound import Outbound
from services.scheduler.placement import choose_worker
from services.scheduler.pressure import Pressure
from services.scheduler.room import Room
from services.scheduler.sequence import Queued, QueueState, Running, order_key
from services.scheduler.worker_view import WorkerView
from shared.protocol import Outcome
from shared.store_calls import Ensure, Table
from shared.worker_protocol import Admit, Ended

MAX_PLACING = 64  # sequences on their way to a worker at a time
FULL_LOOK_S = 0.05  # between two looks for who might give way, where there is no room
FOLLOW_TIMEOUT_S = 5.0  # without a block more; as long as a chunk of a prompt takes on a slow machine

PREPARING = (QueueState.READING, QueueState.MATCHING, QueueState.OFFERING)
ON_ITS_WAY = (QueueState.ENSURING, QueueState.FOLLOWING, QueueState.ASSIGNING)


class Batcher:
    def __init__(
        self, workers: Mapping[str, WorkerView], neighbours: Mapping[str, Neighbour], out: Outbound,
        counts: Counter[str], pressure: Pressure, restart: Callable[[WorkerView], None], *, prefix_caching: bool,
        max_strikes: int, min_priority: int,
    ) -> None:  # fmt: skip
        self.queue: dict[str, Queued] = {}
        self.waited_ms: list[float] = []  # from admission to a worker, since somebody has looked
        self._workers = workers
        self._out = out
        self._counts = counts
        self._pressure = pressure
        self._restart = restart
        self._prefix_caching = prefix_caching
        self._room = Room(workers, self.queue, max_strikes)
        self.matching = Matching(neighbours, self.queue, out)
        self._full_until = -math.inf
        self.fairness = Fairness(workers, self.queue, min_priority)
        self.deadlines = Deadlines(self.queue, workers, out, self.drop)

    # --- into the queue and out of it ------------------------------------------------------------------------------

    def enter(self, queued: Queued, now: float) -> None:
        """Also one that is here already (a claim), in a newer epoch, or an old header of one that runs."""
        known = self.queue.get(queued.sid)
        if known is not None and known.epoch >= queued.epoch:
            return
        if any(v.running[queued.sid].epoch > queued.epoch for v in self._workers.values() if queued.sid in v.running):
            return
        if known is not None:
            self._give_up(known, now)
        self.queue[queued.sid] = queued

    def cancel(self, id: str, now: float) -> None:
        """A sequence, or all of a request."""
        for sid in [s for s in self.queue if id in (s, s.rpartition(".")[0])]:
            if self.queue[sid].state is not QueueState.ASSIGNING:  # the script will say that it has ended
                self._give_up(self.queue.pop(sid), now)

    def drop(self, queued: Queued, outcome: Outcome, now: float) -> None:
        """Ends it; it never runs."""
        self._counts[f"dropped_{outcome.code}"] += 1
        self._give_up(self.queue.pop(queued.sid), now)
        self._out.act(Finish(queued.sid, queued.epoch, outcome))

    def forget_running(self, view: WorkerView, now: float) -> None:
        """The worker has shown what it runs: headers of that are old."""
        for sid, running in view.running.items():
            queued = self.queue.get(sid)
            if queued is not None and queued.epoch < running.epoch and queued.state is not QueueState.ASSIGNING:
                self._give_up(self.queue.pop(sid), now)

    def interrupt(self, view: WorkerView) -> None:
        """What was on its way to this worker waits again; its store will be told what runs, and nothing else."""
        view.following.clear()
        view.placing.clear()
        for queued in self.queue.values():
            if queued.worker != view.worker:
                continue
            if queued.state is QueueState.ASSIGNING:
                view.placing.add(queued.sid)  # the answer of the script is awaited
            else:
                queued.back_to_waiting()

    def end(self, view: WorkerView, ended: Ended) -> None:
        """The worker has ended a place of which the script's answer is still on its way here."""
        queued = self.queue.get(ended.sid)
        if queued is not None and queued.state is QueueState.ASSIGNING and queued.epoch + 1 == ended.epoch:
            del self.queue[ended.sid]
            view.placing.discard(ended.sid)

    def _give_up(self, queued: Queued, now: float) -> None:
        """For where it was going to."""
        view = self._workers.get(queued.worker)
        if view is None or queued.state not in ON_ITS_WAY:
            return
        view.placing.discard(queued.sid)
        view.following.discard(queued.sid)
        if queued.state is not QueueState.ASSIGNING:
            self._out.calls.drop(queued.sid, queued.epoch + 1)
            self._out.release(view, now, queued.sid, queued.epoch + 1)

    # --- answers ---------------------------------------------------------------------------------------------------

    def on_record(self, sid: str, ids: bytes | None, salt: bytes, scoring: bool, draws: bool) -> None:
        queued = self.queue.get(sid)
        if queued is None or queued.state is not QueueState.READING:
            return
        if ids is None:
            del self.queue[sid]
            return
        queued.ids, queued.salt, queued.scoring, queued.draws = ids, salt, scoring, draws
        queued.state = QueueState.WAITING
        queued.num_output_tokens = len(ids) // 4 - queued.num_prompt_tokens

    def on_table(self, table: Table, now: float) -> None:
        call = self._out.calls.answered(table.call)
        view, queued = self._workers.get(table.worker), self.queue.get(table.sid)
        if view is None or not isinstance(call, Ensure):
            return
        if table.status == "not_ready":
            self._restart(view)
            return
        view.set_free(table.num_free)
        if queued is None or queued.state is not QueueState.ENSURING or queued.epoch + 1 != table.epoch:
            self._out.release(view, now, table.sid, table.epoch)
            return
        self._counts[f"ensure_{table.status}"] += 1
        match table.status:
            case "ok" if late := self.deadlines.missed(queued, view, table.cached_length, now):
                self.drop(queued, late, now)
            case "ok":
                self._assign(view, queued, table)
            case "wait":
                self._follow(view, queued, table, now)
            case "full":
                self._give_up(queued, now)
                queued.back_to_waiting()
                self._on_full(view, queued, table)
            case "stale":  # an old header: if it is not, the entry is claimed again
                self._give_up(self.queue.pop(table.sid), now)

    def _assign(self, view: WorkerView, queued: Queued, table: Table) -> None:
        queued.state = QueueState.ASSIGNING
        admit = Admit(
            sid=table.sid, epoch=table.epoch, pool_term=table.pool_term, cached_length=table.cached_length,
            block_ids=table.block_ids, alone=self._room.is_suspect(queued),
        )  # fmt: skip
        self._counts["cached_tokens"] += table.cached_length
        self._out.act(Assign(table.sid, queued.epoch, view.worker, view.term, admit))

    def _follow(self, view: WorkerView, queued: Queued, table: Table, now: float) -> None:
        """Waits for the leader. One that is not on this worker (any more) is asked about once more: what the store is
        told of it is on its way; if it still names it, this sequence computes the blocks itself."""
        if queued.leader == table.leader and not self._leads(view, table.leader):
            queued.patient = False
        queued.state, queued.followed_since = QueueState.FOLLOWING, now
        queued.leader, queued.leader_index, queued.leader_sealed = table.leader, table.leader_index, 0
        view.placing.discard(queued.sid)
        view.following.add(queued.sid)

    def _leads(self, view: WorkerView, sid: str) -> bool:
        return sid in view.running or sid in view.placing or sid in view.following

    def _on_full(self, view: WorkerView, queued: Queued, table: Table) -> None:
        """Nothing is admitted there until more is free; a lower priority gives way, or another key that has more."""
        if table.num_needed > view.member.num_blocks:
            self._refuse(queued, view.capacity)
            return  # it needs no room, and says nothing of what is free for others
        if queued.blocks_left:
            view.full_for[queued.key] = table.num_free
        else:
            view.full_at = table.num_free
        if view.ending_calls:
            return  # more may be free than the answer says
        if queued.blocks_left:  # it makes room for itself alone
            self._pressure.preempt(view, queued, key=queued.key)
            return
        if not self._pressure.preempt(view, queued):
            self._make_way(queued, view)

    def _make_way(self, queued: Queued, view: WorkerView) -> None:
        key = self.fairness.gives_way(queued, view)
        if key is not None:
            self._pressure.preempt(view, key=key)

    def on_assigned(self, action: Assign, status: str, now: float) -> None:
        queued: Queued | None = self.queue.get(action.sid)
        if queued is not None and (queued.epoch != action.epoch or queued.state is not QueueState.ASSIGNING):
            queued = None
        view = self._workers.get(action.worker)
        if view is not None and view.term != action.term:
            view = None
        if view is not None and (queued is not None or action.sid not in self.queue):
            view.placing.discard(action.sid)
        self._counts["assigned" if status == "ok" else f"assign_{status}"] += 1
        if status == "ok":
            if view is not None and queued is not None:
                view.heard_at = max(view.heard_at, now)
                view.running[action.sid] = Running(
                    action.sid, action.epoch + 1, queued.num_tokens, queued.priority, queued.arrival_ms,
                    suspect=self._room.is_suspect(queued), num_computed=action.admit.cached_length, key=queued.key,
                    first_by_ms=queued.first_by_ms, end_by_ms=queued.end_by_ms,
                )  # fmt: skip
                if queued.epoch == 0:
                    self.waited_ms.append(self.deadlines.redis_ms(now) - queued.arrival_ms)
                self.fairness.charge_prompt(queued.key, queued.num_tokens - action.admit.cached_length)
        elif view is not None and not self._runs(view, action.sid, action.epoch + 1):
            self._out.release(view, now, action.sid, action.epoch + 1)
        if queued is not None:
            if status in ("ok", "stale"):
                del self.queue[action.sid]
            else:
                queued.back_to_waiting()

    def _runs(self, view: WorkerView, sid: str, epoch: int) -> bool:
        running = view.running.get(sid)
        return running is not None and running.epoch == epoch

    # --- decisions -------------------------------------------------------------------------------------------------

    def place(self, now: float) -> None:
        self.deadlines.enforce(now)
        self.fairness.look(now)
        active = (QueueState.FOLLOWING, QueueState.MATCHING)
        for queued in sorted((q for q in self.queue.values() if q.state in active), key=order_key):
            if queued.state is QueueState.MATCHING:
                self._finish_matching(queued, now)
            else:
                self._finish_following(queued, now)
        self._start_waiting(now)

    def _finish_following(self, queued: Queued, now: float) -> None:
        view = self._workers[queued.worker]
        leader = view.running.get(queued.leader)
        if leader is not None and leader.num_sealed > queued.leader_sealed:
            queued.leader_sealed, queued.followed_since = leader.num_sealed, now
        if now - queued.followed_since > FOLLOW_TIMEOUT_S:
            queued.patient = False
        elif self._still_computes(view, queued, leader):
            return
        self._ensure(queued, view, now)

    def _still_computes(self, view: WorkerView, queued: Queued, leader: Running | None) -> bool:
        """Is its leader yet to seal the blocks it waits for? leader: if it runs."""
        if leader is not None:
            return leader.num_sealed <= queued.leader_index
        return queued.patient and self._leads(view, queued.leader)

    def _finish_matching(self, queued: Queued, now: float) -> None:
        if self.matching.is_open(queued, now):
            return
        candidates = self._candidates(queued, queued.asked, now)
        if not candidates:
            queued.back_to_waiting()
        elif not self.matching.offer_if_better(queued, candidates):
            self._ensure_in_turn(queued, candidates, now)

    def _candidates(self, queued: Queued, names: Iterable[str], now: float) -> list[WorkerView]:
        views = self._room.candidates(queued, names)
        return [v for v in views if not self.fairness.holds_back(queued, v, now)]

    def _start_waiting(self, now: float) -> None:
        """In order; nobody passes the first one for which there is no room, or for which it is not sure yet, but who
        is of another key where it is held back for others."""
        waiting = [q for q in self.queue.values() if q.state is QueueState.WAITING]
        if not waiting:
            return
        num_slots = sum(v.num_slots() for v in self._workers.values())
        num_placing = sum(len(v.placing) for v in self._workers.values())
        num_preparing = sum(q.state in PREPARING for q in self.queue.values())
        budget = min(num_slots, MAX_PLACING - num_placing) - num_preparing
        if budget <= 0 and now < self._full_until:
            return
        self._full_until = now + FULL_LOOK_S
        held_back: set[str] = set()
        for queued in self.fairness.order(waiting, skip=held_back):
            if candidates := self._candidates(queued, self._workers, now):
                if budget <= 0 or not self._start(queued, candidates, now):
                    return
                budget -= 1
            elif self._room.candidates(queued, self._workers):
                held_back.add(queued.key)
            elif not self._elsewhere_or_never(queued) and not self._room.is_suspect(queued):
                for view in self._workers.values():
                    if view.fits(queued.num_tokens + 1) and not view.has_room():  # it may not be read yet
                        self._make_way(queued, view)
                return

    def _start(self, queued: Queued, candidates: list[WorkerView], now: float) -> bool:
        """False if it must wait for the answers to those before it."""
        if not queued.ids:
            queued.state = QueueState.READING
            self._out.act(ReadRecord(queued.sid))
            return True
        if not self._matches(queued) or not self.matching.is_worthwhile(queued, candidates):
            return self._ensure_in_turn(queued, candidates, now)
        self.matching.ask(queued, candidates, now)
        return True

    def _ensure_in_turn(self, queued: Queued, candidates: list[WorkerView], now: float) -> bool:
        view = choose_worker(queued.num_tokens, candidates, queued.matches)
        if self._room.must_wait(queued, view):
            return False
        self._ensure(queued, view, now)
        return True

    def _matches(self, queued: Queued) -> bool:
        """Is it of use to know what is cached of its prompt?"""
        return self._prefix_caching and not queued.scoring

    def _ensure(self, queued: Queued, view: WorkerView, now: float) -> None:
        queued.state, queued.worker = QueueState.ENSURING, view.worker
        queued.blocks_left = self.fairness.blocks_left(queued, view, now)
        view.following.discard(queued.sid)
        view.placing.add(queued.sid)
        self._out.call(
            view, now, Ensure, sid=queued.sid, epoch=queued.epoch + 1, salt=queued.salt, ids=queued.ids_in_pool,
            wait_for_leader=queued.patient and self._matches(queued), use_cached=self._matches(queued),
            keep_free=len(view.running) + queued.blocks_left,
        )  # fmt: skip

    def _elsewhere_or_never(self, queued: Queued) -> bool:
        """It fits no worker leased here: another scheduler's takes it, or it ends."""
        capacity = self._room.too_small_for(queued)
        if capacity is None:
            return False
        if not self.matching.offer_where_it_fits(queued):
            self._refuse(queued, capacity)
        return True

    def _refuse(self, queued: Queued, capacity: int) -> None:
        self.queue.pop(queued.sid, None)
        size = f"{queued.num_tokens} tokens{' and one more' * queued.draws}"
        message = f"{size} do not fit: a worker holds at most {capacity} tokens"
        outcome = Outcome(reason="error", code="context_length_exceeded", message=message)
        self._out.act(Finish(queued.sid, queued.epoch, outcome))
