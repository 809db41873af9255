"""Grammars are made beside the plan: nobody waits for one but the sequence that is held to it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterable

import pytest

from services.gpu_worker.grammar import AnswerState, Grammars
from shared import scripted_vocab as vocab
from shared.protocol import Constraint, Outcome
from shared.wire import decode_as
from shared.worker_protocol import Preempt, RunningState, TakeOver
from tests.gpu_worker.worker_bench import SCHEDULER, WorkerBench, worker_bench
from tests.helpers import wait_until

PROMPT = list(b"abcdef")
CONSTRAINT = Constraint(grammar='%llguidance {"no_forcing": true}\nstart: "grammatical"')
CANCELLED = Outcome(reason="cancelled")


class SlowGrammars(Grammars):
    """Each takes until the test opens the gate; then fails, if it is to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.error: Exception | None = None
        self.num_begun = 0

    def begin(self, constraint: Constraint, stop_ids: Iterable[int]) -> AnswerState:
        self.num_begun += 1
        assert self.gate.wait(10)
        if self.error is not None:
            raise self.error
        return super().begin(constraint, stop_ids)


@pytest.fixture
def grammars() -> SlowGrammars:
    return SlowGrammars()


@pytest.fixture
async def bench(redis_url: str, grammars: SlowGrammars) -> AsyncIterator[WorkerBench]:
    async with worker_bench(redis_url, grammars=grammars) as bench:
        try:
            yield bench
        finally:
            grammars.gate.set()
            await wait_until(lambda: not bench.worker._answers._tasks)


async def opened(bench: WorkerBench, grammars: SlowGrammars) -> None:
    """All that waits is made, and what can run has run."""
    await bench.run_dry()
    grammars.gate.set()
    await wait_until(lambda: not bench.worker._answers._tasks)
    await bench.run_dry()


async def test_others_are_admitted_and_cancelled_while_a_grammar_is_made(
    bench: WorkerBench, grammars: SlowGrammars
) -> None:
    held = await bench.place(PROMPT, max_tokens=11, constraint=CONSTRAINT)
    other = await bench.place(PROMPT, rid="q", block_ids=(4, 5, 6, 7), max_tokens=6)
    preempted = await bench.place(PROMPT, rid="p", block_ids=(8, 9, 10, 11))
    await bench.plan(Preempt(sid=preempted, epoch=1))
    await bench.run_dry()
    assert await bench.log(other) == vocab.answer(PROMPT, 6)
    assert await bench.log(held) == [] and preempted not in bench.worker.running.sequences
    await opened(bench, grammars)
    assert bytes(await bench.log(held)) == b"grammatical"


async def test_one_that_is_taken_away_while_its_grammar_is_made_is_gone(
    bench: WorkerBench, grammars: SlowGrammars
) -> None:
    cancelled = await bench.place(PROMPT, constraint=CONSTRAINT)
    preempted = await bench.place(PROMPT, rid="q", block_ids=(4, 5, 6, 7), max_tokens=11, constraint=CONSTRAINT)
    await bench.run_dry()
    await wait_until(lambda: grammars.num_begun == 2)
    assert await bench.scripts.cancel_if([cancelled], 1, CANCELLED) == 1
    await bench.plan(Preempt(sid=preempted, epoch=1))
    await bench.run_dry()
    assert not bench.worker.running.has_work and bench.worker.running.blocks.num_held == 0
    await bench.scripts.requeue(preempted, 1)
    await bench.assign(preempted, 2 - 1, block_ids=(0, 1, 2, 3, 12))
    await opened(bench, grammars)
    assert bytes(await bench.log(preempted)) == b"grammatical" and await bench.log(cancelled) == []


async def test_who_has_left_before_his_turn_has_no_grammar_made(bench: WorkerBench, grammars: SlowGrammars) -> None:
    sids = [
        await bench.place(PROMPT, rid=f"r{n}", block_ids=range(4 * n, 4 * n + 4), constraint=CONSTRAINT)
        for n in range(4)
    ]
    await bench.run_dry()
    await wait_until(lambda: grammars.num_begun == 2)
    assert await bench.scripts.cancel_if(sids, 1, CANCELLED) == 4
    await bench.run_dry()
    await opened(bench, grammars)
    assert grammars.num_begun == 2 and not bench.worker.running.has_work


async def test_a_take_over_shows_one_whose_grammar_is_made(bench: WorkerBench, grammars: SlowGrammars) -> None:
    sid = await bench.place(PROMPT, max_tokens=11, constraint=CONSTRAINT)
    await bench.run_dry()
    await bench.inbox()
    await bench.plan(TakeOver(term=bench.term + 1, inbox=SCHEDULER), term=bench.term + 1)
    await bench.run_dry()
    (state,) = [m for m in await bench.inbox() if isinstance(m, RunningState)]
    assert [(s.sid, s.epoch) for s in state.running] == [(sid, 1)]
    await opened(bench, grammars)
    assert bytes(await bench.log(sid)) == b"grammatical"


@pytest.mark.parametrize("error", [ValueError("of the vocabulary"), RuntimeError("a bug")])
async def test_what_cannot_be_made_ends_its_request_alone(
    bench: WorkerBench, grammars: SlowGrammars, error: Exception
) -> None:
    grammars.error = error
    sid = await bench.place(PROMPT, constraint=CONSTRAINT)
    await bench.run_dry()
    await opened(bench, grammars)
    outcome = decode_as(Outcome, (await bench.record(sid)).outcome)
    assert (outcome.reason, outcome.code) == ("error", "invalid_request")
    assert outcome.message == "structured output: not possible with this model"
