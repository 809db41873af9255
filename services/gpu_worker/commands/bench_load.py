"""Load for the engine in one process: requests, blocks and policies of batching, without any service.

Policies: *continuous* is the running set as production drives it, always `concurrency` requests in flight. *fixed* runs
batches that compute finished rows until the longest of the batch ends, as serving without continuous batching does.
*fixed-compact* is the same without the finished rows. The last two exist to compare with.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from services.gpu_worker.admission import Admission
from services.gpu_worker.batch import Drafter, Engine
from services.gpu_worker.commits import Commit
from services.gpu_worker.composer import Budget
from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.running_set import Change, RunningSet
from shared.protocol import SamplingParams
from shared.scripts import CommitCode
from shared.wire import sequence_id
from shared.worker_protocol import Admit, TakeOver

SALT = bytes(32)
TERM = 1


@dataclass(frozen=True)
class Request:
    prompt_ids: list[int]
    max_tokens: int


@dataclass
class Result:
    """kv_waste: share of the slots of a sequence's own blocks that were never written, at its end."""

    wall_s: float = 0.0
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_steps: int = 0
    num_gaps: int = 0
    ttft_s: list[float] = field(default_factory=list)
    num_slots: int = 0
    num_written_slots: int = 0

    @property
    def kv_waste(self) -> float:
        return 1.0 - self.num_written_slots / self.num_slots if self.num_slots else 0.0


def requests(num: int, prompt_tokens: int, lengths: Iterable[int], vocab_size: int, seed: int) -> list[Request]:
    """Prompts of random ids; lengths are cycled."""
    rng = random.Random(seed)
    cycle = deque(lengths)
    made = []
    for _ in range(num):
        made.append(Request([rng.randrange(vocab_size // 2, vocab_size) for _ in range(prompt_tokens)], cycle[0]))
        cycle.rotate(-1)
    return made


class EngineBench:
    """One engine with a running set, and the blocks of its pool as a plain free list."""

    def __init__(
        self, engine: Engine, budget: Budget, max_step_s: float, *, overlap: bool = True,
        drafter: Drafter | None = None, clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._clock = clock
        self._running = RunningSet(
            engine.info, budget, lambda params, vocab: None, drafter, enable_prefix_caching=False
        )
        self._loop = EngineLoop(engine, self._running, max_step_s=max_step_s, overlap=overlap)
        self._running.apply(Change("run", TERM, TakeOver(term=TERM, inbox="")))
        self._running.questions.clear()
        self._free = list(range(engine.info.num_blocks))
        self._blocks: dict[str, list[int]] = {}
        self._started: dict[str, float] = {}
        self._wanted: dict[str, int] = {}
        self._next = 0

    def run(self, todo: Sequence[Request], concurrency: int, policy: str) -> Result:
        """The whole load under a policy; rates count wanted tokens only."""
        result = Result()
        loop = self._loop
        begin, num_steps, num_gaps = self._clock(), loop.num_steps, loop.num_gaps
        if policy == "continuous":
            self._run_together(list(todo), concurrency, result)
        else:
            for i in range(0, len(todo), concurrency):
                batch = list(todo[i : i + concurrency])
                longest = max(r.max_tokens for r in batch)
                run_to = longest if policy == "fixed" else None
                self._run_together(batch, concurrency, result, run_to)
        result.wall_s = self._clock() - begin
        result.num_steps, result.num_gaps = loop.num_steps - num_steps, loop.num_gaps - num_gaps
        return result

    def _run_together(
        self, waiting: list[Request], concurrency: int, result: Result, run_to: int | None = None
    ) -> None:
        waiting.reverse()
        while waiting or self._running.sequences:
            while waiting and len(self._running.sequences) < concurrency:
                self._admit(waiting.pop(), run_to, result)
            self._step(result)

    def _admit(self, request: Request, run_to: int | None, result: Result) -> None:
        """With all the blocks that it will need: there is no scheduler here to grant more."""
        sid = sequence_id(f"bench{self._next}", 0)
        self._next += 1
        max_tokens = run_to or request.max_tokens
        num_blocks = -(-(len(request.prompt_ids) + max_tokens) // self._engine.info.block_size)
        blocks = [self._free.pop() for _ in range(num_blocks)]
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True)
        admit = Admit(sid=sid, epoch=1, pool_term=0, cached_length=0, block_ids=tuple(blocks))
        admission = Admission(params, request.prompt_ids, SALT, [], None)
        self._running.apply(Change("run", TERM, admit, admission))
        self._blocks[sid], self._started[sid], self._wanted[sid] = blocks, self._clock(), request.max_tokens
        result.num_written_slots += len(request.prompt_ids) + max_tokens - 1  # the last token's KV is never computed
        result.num_slots += num_blocks * self._engine.info.block_size
        result.num_prompt_tokens += len(request.prompt_ids)

    def _step(self, result: Result) -> None:
        before = [(seq, seq.num_output_tokens) for seq in self._running.sequences.values()]
        self._loop.step_once()
        now = self._clock()
        for seq, num_tokens in before:
            if seq.num_output_tokens > num_tokens:
                self._drew(seq.sid, num_tokens, seq.num_output_tokens, now, result)
        self._settle()

    def _drew(self, sid: str, num_before: int, num_after: int, now: float, result: Result) -> None:
        """Tokens that a sequence had, and has now."""
        if num_before == 0:
            result.ttft_s.append(now - self._started[sid])
        result.num_output_tokens += max(0, min(num_after, self._wanted[sid]) - num_before)

    def _settle(self) -> None:
        """What production's commits do, answered at once; blocks of ended sequences are free again."""
        commit: Commit = self._running.ledger.build()
        answers = [(CommitCode.APPENDED, e.first + e.count) for e in commit.entries]
        self._running.ledger.apply(commit, answers)
        carried = self._running.outbox.carry(set())
        self._running.outbox.acknowledged(carried)
        for sid in [s for s in self._blocks if s not in self._running.sequences]:
            self._free += self._blocks.pop(sid)
