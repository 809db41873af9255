"""The engine's own thread: takes plan changes, begins steps, hands their results to the running set.

Owns the lock around the running set and when the engine runs; decides nothing about sequences. Queued changes are
applied before a step begins, in order, never to one that has. With an engine that can overlap, the next step begins
when the present one is nearly over, unless that needs the host to draw its tokens, and while it computes, the present
one's results are taken in: so the engine need not wait for what is done here. Steps run in the order in which they
begin, so a block that a change gives to another sequence is written by its old holder before, and never after. With
nothing to do the thread sleeps on a condition. `step_once` is one round, so that tests can drive it without a thread.

A step that fails changes nothing: what it has written lies in blocks that are not sealed, so it is run again in parts,
and the step that has begun after it is forgotten. A sequence that fails alone ends, if the engine can still compute
something else; if not, the engine is to blame. One whose grammar fails ends at once. Where memory has run out, parts
are made until one fits, and later steps are no larger.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from services.gpu_worker.admission import Answered
from services.gpu_worker.batch import AnswerFailed, Chunk, Engine
from services.gpu_worker.commits import Place
from services.gpu_worker.failures import EngineBroken, EngineDied, OutOfMemory, WorkerFailure
from services.gpu_worker.probe import probe
from services.gpu_worker.running_set import Change, RunningSet
from services.gpu_worker.speculative.draft import NO_DRAFT
from services.gpu_worker.step_cost import START_HANG_S, StepCost
from services.gpu_worker.step_limit import StepLimit
from services.gpu_worker.steps import Begun, results_of, starter
from shared.worker_protocol import Admit

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class _Watch:
    chunks: Seq[Chunk]
    hung_at: float


class EngineLoop:
    """cost: what steps of this engine cost, as far as it is known. overlap: steps, on an engine that can.
    on_step is told the seconds of every step that succeeded, in the engine's thread."""

    def __init__(
        self, engine: Engine, running: RunningSet, *, max_step_s: float = 0.1, cost: StepCost | None = None,
        overlap: bool = True, clock: Callable[[], float] = time.monotonic,
        on_step: Callable[[float], None] = lambda seconds: None,
    ) -> None:  # fmt: skip
        self.running = running
        self.cost = cost or StepCost()
        self.limit = StepLimit()
        self.num_steps = 0  # that have ended, well or not
        self.hang_s = 0.0  # of what is watched: what takes longer never ends
        self.num_gaps = 0  # before steps that could have begun sooner: the engine stood still
        self.num_drawn = 0  # that count: of answers
        self.num_prefilled = 0
        self.failure: WorkerFailure | None = None  # what ended the thread, if not `stop`
        self.lock = threading.Condition(threading.Lock())  # guards the running set and the queue
        self._engine = engine
        self._start = starter(engine, overlap)
        self._max_step_s = max_step_s
        self._clock = clock
        self._on_step = on_step
        self._queue: deque[Change | Answered] = deque()
        self._in_flight: deque[Begun] = deque()  # at most two, the older one first
        self._watch: _Watch | None = None  # over the older one, or over one that is yet to begin
        self._ended_at = float("-inf")  # the last step
        self._is_busy = False  # in the last round there was something to compute
        self._stopping = False
        self._thread: threading.Thread | None = None

    def submit(self, change: Change | Answered) -> None:
        with self.lock:
            self._queue.append(change)
            self.lock.notify()

    @property
    def has_changes(self) -> bool:
        """Are there some that wait for the next step to begin? Under the lock."""
        return bool(self._queue)

    def awaits_answer(self, sid: str, epoch: int) -> bool:
        """Or will, once its `Admit` is applied."""
        with self.lock:
            admits = (c.message for c in self._queue if isinstance(c, Change) and isinstance(c.message, Admit))
            return self.running.awaits_answer(sid, epoch) or any((a.sid, a.epoch) == (sid, epoch) for a in admits)

    def reset(self) -> None:
        """A new life. What a step in flight still writes, it writes before any step that is yet to begin."""
        with self.lock:
            self._queue.clear()
            self.running.reset()

    # --- one round ---------------------------------------------------------------------------------------------------

    def step_once(self) -> bool:
        """Applies what is queued, begins a step and ends the one before; False if there was nothing to do."""
        had_work = bool(self._in_flight)
        if had_work:
            self._in_flight[0].step.wait_until_late()
            with self.lock:
                needs_tokens = self.running.expects_drafts()
            if needs_tokens:
                self._end()
        with self.lock:
            changed = bool(self._queue)
            while self._queue:
                self.running.apply(self._queue.popleft())
            prepared = self.running.prepare(
                self.cost.max_prefill_tokens(self._max_step_s), self.limit.num_tokens, may_think=not self._in_flight
            )
        if prepared.most and not self._in_flight:
            self._watch_over(prepared.chunks, 0)  # what a model guesses takes as long as a step may
            self.running.drafting.drafter.think()
            self._watch = None
        with self.lock:
            chunks = self.running.draft(prepared)
        if chunks:
            self._begin(chunks)
            self.num_gaps += len(self._in_flight) > 1 and self._in_flight[0].step.has_ended
        num_left = 1 if chunks and self._in_flight[-1].step.may_be_followed else 0
        while len(self._in_flight) > num_left:
            self._end()
        self._is_busy = bool(chunks)
        return changed or had_work or bool(prepared.chunks)

    def _begin(self, chunks: Seq[Chunk]) -> None:
        before, hang_s, asked = self._watch, self.hang_s, self._clock()
        self.hang_s, self._watch = START_HANG_S, _Watch(chunks, asked + START_HANG_S)
        step, begun_at = self._start(chunks), self._clock()
        num_prefill = sum(c.count for c in chunks if c.count > 1 or not c.sample)
        self._in_flight.append(Begun(chunks, step, num_prefill, begun_at, self._is_busy))
        if before is None:
            self._watch_oldest()
        else:
            self.hang_s, self._watch = hang_s, replace(before, hung_at=before.hung_at + begun_at - asked)
        self.hang_s += begun_at - asked  # who counts from the end of the last step has counted that too

    def _end(self) -> None:
        """The oldest step; WorkerFailure if the process must be replaced. What failed is not held on to while its parts
        run: its traceback keeps tensors alive. Drafts are not tried again."""
        chunks = self._in_flight[0].chunks
        ran_out = self._take_results()
        self._watch_oldest()
        if ran_out is None:
            return
        while self._in_flight:  # began with what this one should have drawn
            self._drop()
        with self.lock:
            self.running.recall()
            left = [c for c in chunks if self.running.sequences.get(c.seq.sid) is c.seq]
        if ran_out:
            self.limit.ran_out(sum(c.num_rows for c in chunks))
        if len(left) < len(chunks) or any(c.draft for c in chunks):  # perhaps without what it failed of
            self._compute([replace(c, draft=NO_DRAFT) for c in left])
        elif ran_out:
            self._shrink(chunks)
        elif len(chunks) > 1:
            self._halve(chunks)
        else:
            self._blame(chunks[0])

    def _take_results(self) -> bool | None:
        """Of the oldest step; None if it went well, else whether memory ran out."""
        begun, chunks = self._in_flight[0], self._in_flight[0].chunks
        try:
            drawn = results_of(begun.step, chunks)
        except MemoryError as e:
            log.warning("memory has run out in a step of %d sequences: %s", len(chunks), e)
            return True
        except AnswerFailed as e:
            with self.lock:
                self.running.fail_answer(chunks, e)
            return False
        except Exception:
            log.warning("a step of %d sequences failed", len(chunks), exc_info=len(chunks) == 1)
            return False
        finally:
            seconds, interval = self._ended()
        self.limit.went_well()
        with self.lock:
            num_drawn = self.running.advance(chunks, drawn, interval)
            self.num_drawn += num_drawn
            self.num_prefilled += begun.num_prefill
        self.cost.observe(sum(c.count == 1 and c.sample for c in chunks), begun.num_prefill, num_drawn, seconds)
        self._on_step(seconds)
        return None

    def _ended(self) -> tuple[float, float]:
        """The oldest step has, well or not; how long it took after it could start, and after the one before where
        there was always something to do."""
        begun, now = self._in_flight.popleft(), self._clock()
        seconds = now - max(begun.at, self._ended_at)
        interval = now - self._ended_at if begun.follows else seconds
        self._ended_at = now
        self._watch = None
        self.num_steps += 1
        return seconds, interval

    def _drop(self) -> None:
        """The oldest step, whatever comes of it."""
        with contextlib.suppress(Exception):
            self._in_flight[0].step.results()
        self._ended()
        self._watch_oldest()

    def _watch_oldest(self) -> None:
        if self._in_flight:
            self._watch_over(self._in_flight[0].chunks, self._in_flight[0].num_prefill)

    def _watch_over(self, chunks: Seq[Chunk], num_prefill: int) -> None:
        self.hang_s = self.cost.hang_s(num_prefill)
        self._watch = _Watch(chunks, self._clock() + self.hang_s)

    # --- what failed -------------------------------------------------------------------------------------------------

    def _compute(self, chunks: Seq[Chunk]) -> None:
        """A part of a step that failed."""
        if not chunks:
            return
        with self.lock:
            self.running.begin(chunks)
        self._begin(chunks)
        self._end()

    def _halve(self, chunks: Seq[Chunk]) -> None:
        for part in (chunks[: len(chunks) // 2], chunks[len(chunks) // 2 :]):
            self._compute(part)

    def _shrink(self, chunks: Seq[Chunk]) -> None:
        """Smaller steps, from now on too; of a single sequence a shorter chunk, the rest of which has time."""
        if sum(c.count for c in chunks) == 1:
            raise OutOfMemory("there is no memory for a step of one token", [chunks[0].seq.place])
        if len(chunks) > 1:
            self._halve(chunks)
        else:
            self._compute([replace(chunks[0], count=chunks[0].count // 2, sample=False)])

    def _blame(self, chunk: Chunk) -> None:
        """The sequence, if the engine computes something else into its block, which is given up with it."""
        self._watch_over([chunk], 0)
        try:
            probe(self._engine, chunk.seq.block_ids[chunk.start // self.running.info.block_size])
        except Exception as e:
            raise EngineBroken("the engine cannot compute anything any more", [chunk.seq.place]) from e
        finally:
            self._watch = None
        log.error("the engine failed on %s alone", chunk.seq.sid)
        with self.lock:
            self.running.fail(chunk.seq)

    # --- the thread --------------------------------------------------------------------------------------------------

    @property
    def hung(self) -> tuple[Place, ...]:
        """Who is in the present step, if it has taken longer than any step should."""
        watch = self._watch
        return tuple(c.seq.place for c in watch.chunks) if watch is not None and self._clock() > watch.hung_at else ()

    def start(self, on_progress: Callable[[], None]) -> None:
        """on_progress is called in the thread after every round that changed something, and when the thread dies."""
        self._thread = threading.Thread(target=self._run, args=(on_progress,), name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the steps that have begun; returns after STOP_TIMEOUT_S if that never ends."""
        with self.lock:
            self._stopping = True
            self.lock.notify()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)

    def _run(self, on_progress: Callable[[], None]) -> None:
        try:
            while not self._stopping:
                if self.step_once():
                    on_progress()
                    continue
                with self.lock:
                    if not self._queue and not self._stopping:
                        self.lock.wait()
            while self._in_flight:
                self._end()
        except WorkerFailure as e:
            log.error("the engine stops", exc_info=e.__cause__)
            self.failure = e
        except BaseException as e:  # a bug in the running set: the process must not go on without its engine
            log.exception("the engine thread has died")
            self.failure = EngineDied(f"the engine thread has died of {type(e).__name__}")
        on_progress()
