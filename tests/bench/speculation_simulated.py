"""What guesses would gain on another machine: the real engine's tokens and the real control, by a clock of given costs.

    python -m tests.bench.speculation_simulated [--rows 1:2.65,2:2.95,…] [--kinds extract,code]

A line of JSON for each kind, in each round: the time without guesses over that with them, steps and rows, and what each
method has drafted. Nothing else that runs here changes it. Costs default to those of one state of a Zen 5
(tests/bench/NOTES.md, "Where copies lose"). One sequence at a time, greedy, `auto` without other answers.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch

from services.gateway.tokenization import Tokenizer
from services.gpu_worker.admission import Admission
from services.gpu_worker.batch import Chunk
from services.gpu_worker.composer import Budget
from services.gpu_worker.drafters import AnySpeculator, make_auto
from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.heads_loading import heads_of
from services.gpu_worker.running_set import Change, RunningSet
from services.gpu_worker.speculative.head_proposer import Head, HeadProposer
from services.gpu_worker.speculative.native_eagle import Guess, Wanted
from services.gpu_worker.speculative.row_cost import RowCost
from services.gpu_worker.step_cost import StepCost
from services.gpu_worker.steps import Step
from shared import model_source
from shared.model_source import default_cache_dir
from shared.protocol import SamplingParams
from shared.settings import WorkerSettings
from shared.speculative_config import parse
from shared.worker_protocol import Admit, TakeOver
from tests.bench.speculation import NUM_OUTPUT, loaded, prompts_of

CONFIG = '{"method": "auto", "num_speculative_tokens": 16, "fleet": false}'
ROWS = "1:2.65,2:2.95,4:3.35,5:3.7,8:4.25,12:5.8,16:7.1"


@dataclass
class Machine:
    """What is simulated: seconds by rows of a step, and what else takes time; now is its clock."""

    points: list[tuple[int, float]]
    args: argparse.Namespace
    now: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    def clock(self) -> float:
        return self.now

    def step_s(self, num_rows: int) -> float:
        rows = [n for n, _ in self.points]
        i = bisect_left(rows, num_rows)
        if i == len(rows):
            return self.points[-1][1] + (num_rows - rows[-1]) * self.args.prompt_row_ms / 1000
        if i == 0:
            return self.points[0][1]
        (low, low_s), (high, high_s) = self.points[i - 1 : i + 1]
        return low_s + (high_s - low_s) * (num_rows - low) / (high - low)

    def learnt(self) -> RowCost:
        cost = RowCost()
        for num_rows in (1, 2, 4, 8):
            cost.observe(num_rows, self.step_s(num_rows))
        return cost


class TimedStep:
    """A step that has begun and takes what the machine says."""

    may_be_followed = False
    has_ended = True

    def __init__(self, step: Step, machine: Machine, num_rows: int) -> None:
        self._step, self._machine, self._num_rows = step, machine, num_rows

    def wait_until_late(self) -> None:
        return

    def results(self) -> list[Any]:
        drawn = self._step.results()
        self._machine.now += self._machine.step_s(self._num_rows)
        return drawn


class TimedHead:
    """A head whose guesses take what the machine says."""

    aside_s = 0.0

    def __init__(self, head: Head, machine: Machine) -> None:
        self.later_s = 0.0
        self._head, self._machine = head, machine

    def guess(self, wanted: Seq[Wanted]) -> list[list[Guess]]:
        args, found = self._machine.args, self._head.guess(wanted)
        num_rows, num_places = sum(len(own.taps) for own in wanted), max(1, *(own.count for own in wanted))
        self.later_s = args.head_later_ms / 1000 * (num_places - 1)
        self._machine.now += (args.head_ms + args.head_row_ms * (num_rows - 1)) / 1000 + self.later_s
        self._machine.counts["guesses"] += 1
        return found


def run(
    engine: Any, machine: Machine, drafter: AnySpeculator | None, prompts: list[list[int]], stops: tuple[int, ...]
) -> tuple[float, list[list[int]]]:
    running = RunningSet(
        engine.info, Budget(512, 64, 512), lambda params, vocab: None, drafter, enable_prefix_caching=False
    )
    loop = EngineLoop(engine, running, cost=StepCost(), overlap=False, clock=machine.clock)
    start, args = loop._start, machine.args

    def timed(chunks: Seq[Chunk]) -> TimedStep:
        has_drafts, num_rows = any(c.draft for c in chunks), sum(c.num_rows for c in chunks)
        machine.now += (args.python_ms + args.drafting_ms * has_drafts) / 1000
        machine.counts["steps"] += 1
        machine.counts["rows"] += num_rows if all(c.sample and c.count == 1 for c in chunks) else 0
        return TimedStep(start(chunks), machine, num_rows)

    loop._start = timed
    running.apply(Change("run", 1, TakeOver(term=1, inbox="")))
    num_blocks = -(-(max(map(len, prompts)) + NUM_OUTPUT) // engine.info.block_size)
    began, answers = machine.now, []
    for number, prompt in enumerate(prompts):
        admit = Admit(sid=f"r{number}.0", epoch=1, pool_term=0, cached_length=0, block_ids=tuple(range(num_blocks)))
        params = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, seed=number, stop_token_ids=stops)
        running.apply(Change("run", 1, admit, Admission(params, prompt, bytes(32), [], None)))
        (seq,) = running.sequences.values()
        while running.sequences:
            loop.step_once()
            running.outbox.acknowledged(running.outbox.carry(set()))
        answers.append(seq.token_ids[seq.num_prompt_tokens :])
    return machine.now - began, answers


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--kinds", default="edit,extract,code,chat")
    ap.add_argument("--rounds", type=int, default=2)
    ap.add_argument("--rows", default=ROWS, help="of a step, and its milliseconds")
    ap.add_argument("--prompt-row-ms", type=float, default=0.36, help="of each row beyond")
    ap.add_argument("--python-ms", type=float, default=0.13, help="of a step")
    ap.add_argument("--drafting-ms", type=float, default=0.18, help="more, of one with drafts")
    ap.add_argument("--head-ms", type=float, default=0.28, help="of the head's first guess")
    ap.add_argument("--head-later-ms", type=float, default=0.05, help="of each other")
    ap.add_argument("--head-row-ms", type=float, default=0.02, help="of each row that it reads besides")
    args = ap.parse_args()
    points = sorted((int(n), float(ms) / 1000) for n, _, ms in (each.partition(":") for each in args.rows.split(",")))
    source = model_source.resolve("smollm2-135m-instruct", default_cache_dir())
    tokenizer, engine, config = Tokenizer.from_source(source), loaded(source.path), parse(CONFIG, is_native=True)
    with_heads = heads_of(WorkerSettings(speculative_config=CONFIG), source.path, default_cache_dir())
    assert with_heads is not None and config is not None
    heads, machine = with_heads.load(engine), Machine(points, args)
    assert isinstance(heads, HeadProposer)
    heads._head, heads._clock = TimedHead(heads._head, machine), machine.clock
    stops = tuple(tokenizer.eos_token_ids)
    for kind in args.kinds.split(","):
        prompts = prompts_of(kind, tokenizer, 2, random.Random(1))
        heads.wants_any = lambda: False
        plain_s, want = run(engine, machine, None, prompts, stops)
        drafter = make_auto(config, heads, machine.learnt(), float("inf"), None, machine.clock)
        for _ in range(args.rounds):
            machine.counts.clear()
            seconds, got = run(engine, machine, drafter, prompts, stops)
            drafted = {name: (c.num_draft_tokens, c.accepted.total()) for name, c in drafter.counts.items()}
            line = {"kind": kind, "ratio": round(plain_s / seconds, 3), **machine.counts, "drafted": drafted,
                    "same_tokens": got == want}  # fmt: skip
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
