"""The engine's own thread: takes plan changes, composes a step, runs it, hands its results to the running set.

Owns the lock around the running set and when the engine runs; decides nothing about sequences. Queued changes are
applied between steps, in order, never to a step already prepared. With nothing to do the thread sleeps on a condition.
`step_once` is one round, so that tests can drive it without a thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

from services.gpu_worker.batch import Chunk, Engine, SampledToken
from services.gpu_worker.running_set import Change, RunningSet
from services.gpu_worker.step_cost import StepCost

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0


class EngineLoop:
    """on_step is told the seconds of every step that succeeded, in the engine's thread."""

    def __init__(
        self, engine: Engine, running: RunningSet, *, max_step_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic, on_step: Callable[[float], None] = lambda seconds: None,
    ) -> None:  # fmt: skip
        self.running = running
        self.cost = StepCost()
        self.num_steps = 0
        self.num_drawn = 0
        self.num_prefilled = 0
        self.failure: BaseException | None = None  # what ended the thread, if not `stop`
        self.lock = threading.Condition(threading.Lock())  # guards the running set and the queue
        self._engine = engine
        self._max_step_s = max_step_s
        self._clock = clock
        self._on_step = on_step
        self._queue: deque[Change] = deque()
        self._step: tuple[float, float] | None = None  # when the present step began, and when it counts as hung
        self._stopping = False
        self._thread: threading.Thread | None = None

    def submit(self, change: Change) -> None:
        with self.lock:
            self._queue.append(change)
            self.lock.notify()

    @property
    def has_changes(self) -> bool:
        """Are there some that wait for the present step to end? Under the lock."""
        return bool(self._queue)

    def reset(self) -> None:
        """A new life. Blocks that a step in progress still writes are handed out by no change before it has ended."""
        with self.lock:
            self._queue.clear()
            self.running.reset()

    # --- one round ---------------------------------------------------------------------------------------------------

    def step_once(self) -> bool:
        """Applies what is queued and runs one step; False if there was neither."""
        with self.lock:
            changed = bool(self._queue)
            while self._queue:
                self.running.apply(self._queue.popleft())
            chunks = self.running.prepare(self.cost.max_prefill_tokens(self._max_step_s))
        if chunks:
            self._compute(chunks)
        return changed or bool(chunks)

    def _compute(self, chunks: Seq[Chunk]) -> None:
        """One step; if it fails, its halves, until the one that fails alone is found: never blame its mates."""
        num_prefill = sum(c.count for c in chunks if c.count > 1 or not c.sample)
        started = self._clock()
        self._step = (started, started + self.cost.hang_s(num_prefill))
        try:
            sampled = self._engine.step(chunks)
            _check(chunks, sampled)
        except Exception:
            self._step = None
            self._halve(chunks)
            return
        self._step = None
        seconds = self._clock() - started
        num_drawn = sum(t is not None for t in sampled)
        self.cost.observe(sum(c.count == 1 and c.sample for c in chunks), num_prefill, num_drawn, seconds)
        with self.lock:
            self.running.advance(chunks, sampled)
            self.num_steps += 1
            self.num_drawn += num_drawn
            self.num_prefilled += num_prefill
        self._on_step(seconds)

    def _halve(self, chunks: Seq[Chunk]) -> None:
        """Called while the engine's exception is handled."""
        if len(chunks) == 1:
            log.exception("the engine failed on %s alone", chunks[0].seq.sid)
            with self.lock:
                self.running.fail(chunks[0].seq)
            return
        log.warning("a step of %d sequences failed; running its halves", len(chunks))
        middle = len(chunks) // 2
        self._compute(chunks[:middle])
        self._compute(chunks[middle:])

    # --- the thread --------------------------------------------------------------------------------------------------

    @property
    def hung(self) -> bool:
        """Has the present step taken longer than any step should?"""
        step = self._step
        return step is not None and self._clock() > step[1]

    def start(self, on_progress: Callable[[], None]) -> None:
        """on_progress is called in the thread after every round that changed something, and when the thread dies."""
        self._thread = threading.Thread(target=self._run, args=(on_progress,), name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its step; returns after STOP_TIMEOUT_S if that never ends."""
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
        except BaseException as e:  # a bug in the running set: the process must not go on without its engine
            log.exception("the engine thread has died")
            self.failure = e
            on_progress()


def _check(chunks: Seq[Chunk], sampled: Seq[SampledToken | None]) -> None:
    if [t is not None for t in sampled] != [c.sample for c in chunks]:
        raise ValueError("the engine's results do not match its chunks")
