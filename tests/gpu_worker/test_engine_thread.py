from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from services.gpu_worker.admission import Answered
from services.gpu_worker.batch import Chunk, Drawn
from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.failures import EngineBroken, EngineDied, OutOfMemory
from services.gpu_worker.grammar import GrammarError
from services.gpu_worker.running_set import Change, RunningSet
from services.gpu_worker.scripted_engine import ScriptedEngine
from shared import scripted_vocab as vocab
from shared.protocol import Constraint, Outcome
from shared.wire import decode_as
from shared.worker_protocol import Cancel
from tests.gpu_worker.builders import ended, make_admission, make_admit, make_engine, make_running
from tests.helpers import wait_until_sync

PROMPT = list(b"abcdef")


class Recorder:
    """An engine that keeps which batches it was asked for, and lets a test stand between."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.info = engine.info
        self.batches: list[list[str]] = []
        self.sizes: list[int] = []  # in tokens
        self._engine = engine

    def step(self, chunks: Sequence[Chunk]) -> list[Drawn]:
        self.batches.append([c.seq.sid for c in chunks])
        self.sizes.append(sum(c.count for c in chunks))
        return self._engine.step(chunks)


def make_loop(num_blocks: int = 64, **options: Any) -> tuple[EngineLoop, RunningSet, Recorder]:
    running = make_running(num_blocks)
    engine = Recorder(make_engine(running, **options))
    return EngineLoop(engine, running), running, engine


def submit(loop: EngineLoop, number: int, prompt: list[int] = PROMPT, **params: Any) -> str:
    """Admits r<number>.0 into blocks of its own."""
    sid = f"r{number}.0"
    admit = make_admit(sid, block_ids=range(4 * number, 4 * number + 4))
    loop.submit(Change("run", 1, admit, make_admission(prompt, **params)))
    return sid


def outcomes(running: RunningSet) -> dict[str, Outcome]:
    return {e.sid: decode_as(Outcome, e.outcome) for e in running.ledger.build().entries if e.outcome}


def run_dry(loop: EngineLoop) -> None:
    while loop.step_once():
        pass


@pytest.fixture
def threads() -> Iterator[list[EngineLoop]]:
    """Loops whose thread is stopped after the test."""
    loops: list[EngineLoop] = []
    yield loops
    for loop in loops:
        loop.stop()


def test_a_round_applies_changes_and_steps() -> None:
    loop, running, engine = make_loop()
    assert not loop.step_once()
    submit(loop, 0, max_tokens=2)
    assert loop.step_once() and loop.step_once() and not loop.step_once()
    assert engine.batches == [["r0.0"], ["r0.0"]] and loop.num_steps == 2
    assert (loop.num_prefilled, loop.num_drawn) == (6, 2) and outcomes(running)["r0.0"].reason == "length"


@pytest.mark.parametrize("poison", [[0], [3], [4], [1, 2], [0, 4]])
def test_only_those_that_fail_alone_end_and_their_mates_are_untouched(poison: list[int]) -> None:
    loop, running, engine = make_loop()
    bad = [vocab.RAISE, 2, 7, 7]  # at its third token
    for number in range(5):
        submit(loop, number, bad if number in poison else [number, *PROMPT], max_tokens=6)
    run_dry(loop)
    for sid, outcome in outcomes(running).items():
        number = int(sid[1])
        (account,) = [a for a in running.ledger._accounts.values() if a.seq.sid == sid]
        tokens = account.seq.token_ids[account.seq.num_prompt_tokens :]
        if number in poison:
            assert (outcome.code, outcome.num_tokens) == ("engine_error", 2)
        else:
            assert outcome.reason == "length" and tokens == vocab.answer([number, *PROMPT], 6)
    assert len(outcomes(running)) == 5


class FailingGrammar:
    """Allows everything up to so many tokens, and then cannot go on."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def mask_after(self, output_ids: Sequence[int]) -> bytes | None:
        if len(output_ids) >= self._num_tokens:
            raise GrammarError("the grammar is too complex")
        return None

    def allows(self, output_ids: Sequence[int]) -> bool:
        return True

    def fork(self) -> FailingGrammar:
        return self


def test_a_grammar_that_fails_ends_its_own_answer_as_the_clients_fault() -> None:
    loop, running, engine = make_loop()
    sids = [submit(loop, n, max_tokens=4, constraint=Constraint(grammar="g") if n == 1 else None) for n in range(4)]
    loop.submit(Answered(sids[1], 1, FailingGrammar(2)))
    run_dry(loop)
    assert engine.batches == [sids, sids, sids, [sids[0], *sids[2:]], [sids[0], *sids[2:]]]
    ended = outcomes(running)
    assert (ended[sids[1]].code, ended[sids[1]].num_tokens) == ("grammar_too_complex", 2)
    assert ended[sids[1]].message == "structured output: the grammar is too complex"
    assert [ended[sid].reason for sid in (sids[0], *sids[2:])] == ["length"] * 3


def test_blocks_of_a_failed_step_are_not_sealed() -> None:
    loop, running, _ = make_loop()
    submit(loop, 0, [vocab.RAISE, 0, 1, 2, 3])
    run_dry(loop)
    assert outcomes(running)["r0.0"].code == "engine_error"
    assert not len(running.sealed) and not running.outbox.carry(()).seals


def test_results_that_do_not_match_the_chunks_are_a_failure() -> None:
    class Short(Recorder):
        def step(self, chunks: Sequence[Chunk]) -> list[Drawn]:
            return super().step(chunks)[1:]

    running = make_running()
    loop = EngineLoop(Short(make_engine(running)), running)
    submit(loop, 0)
    run_dry(loop)
    assert outcomes(running)["r0.0"].code == "engine_error"


def test_a_step_that_does_not_fit_runs_in_parts_and_later_ones_are_no_larger() -> None:
    loop, running, engine = make_loop()
    for number in range(5):
        submit(loop, number, [vocab.OOM, 5, *PROMPT] if number == 2 else [number, *PROMPT], max_tokens=6)
    run_dry(loop)
    for account in running.ledger._accounts.values():
        prompt, output = account.seq.token_ids[: account.seq.num_prompt_tokens], account.seq.token_ids
        assert output[len(prompt) :] == vocab.answer(prompt, 6)
    assert len(outcomes(running)) == 5 and {o.reason for o in outcomes(running).values()} == {"length"}
    assert loop.limit.num_tokens <= 5
    assert engine.sizes[0] == 32 and max(engine.sizes[6:]) <= 5


def test_a_prompt_that_does_not_fit_alone_is_cut() -> None:
    loop, running, engine = make_loop()
    sid = submit(loop, 0, [vocab.OOM, 2, *PROMPT], max_tokens=3)
    run_dry(loop)
    (account,) = running.ledger._accounts.values()
    assert account.seq.sid == sid and account.seq.token_ids[8:] == vocab.answer([vocab.OOM, 2, *PROMPT], 3)
    assert engine.sizes == [8, 4, 2, 2, 2, 2, 1, 1]


def test_where_not_even_one_token_fits_the_worker_fails_and_only_that_one_is_blamed() -> None:
    loop, running, _ = make_loop()
    for number in range(3):
        submit(loop, number, [vocab.OOM, 0, *PROMPT] if number == 1 else [number, *PROMPT])
    with pytest.raises(OutOfMemory) as failed:
        run_dry(loop)
    assert failed.value.blamed == {("r1.0", 1)}
    assert set(running.sequences) == {"r0.0", "r1.0", "r2.0"} and not outcomes(running)


def test_an_engine_that_computes_nothing_any_more_is_to_blame_itself() -> None:
    class Broken(Recorder):
        def step(self, chunks: Sequence[Chunk]) -> list[Drawn]:
            self.batches.append([c.seq.sid for c in chunks])
            raise RuntimeError("the device is gone")

    running = make_running(64)
    engine = Broken(make_engine(running))
    loop = EngineLoop(engine, running)
    for number in range(4):
        submit(loop, number)
    with pytest.raises(EngineBroken) as failed:
        run_dry(loop)
    assert failed.value.blamed == {("r0.0", 1)} and len(running.sequences) == 4 and not outcomes(running)
    assert engine.batches[-2:] == [["r0.0"], ["probe"]]


def test_every_step_that_ends_counts_also_one_that_fails() -> None:
    loop, _, _ = make_loop()
    submit(loop, 0, [vocab.RAISE, 0, 1])
    submit(loop, 1, max_tokens=1)
    run_dry(loop)
    assert loop.num_steps == 3


def test_changes_are_applied_between_steps_in_order(threads: list[EngineLoop]) -> None:
    """A cancel that arrives during a step takes effect after it; the change behind it comes after it."""
    entered, go_on = threading.Event(), threading.Event()

    def sleep(_: float) -> None:
        entered.set()
        go_on.wait(10)

    loop, running, engine = make_loop(step_s=1.0, sleep=sleep)
    threads.append(loop)
    submit(loop, 0)
    loop.start(lambda: None)
    assert entered.wait(10)
    loop.submit(Change("run", 1, Cancel(sid="r0.0", epoch=1)))
    submit(loop, 0, max_tokens=1)  # the same epoch: ignored, unless the cancel came first
    assert list(running.sequences) == ["r0.0"] and not ended(running)
    go_on.set()
    wait_until_sync(lambda: ("r0.0", 1, "length") in ended(running))
    assert [e[2] for e in ended(running)] == ["cancelled", "length"]


def test_an_idle_thread_sleeps_until_there_is_a_change(threads: list[EngineLoop]) -> None:
    loop, running, _ = make_loop()
    threads.append(loop)
    progress = threading.Semaphore(0)
    rounds = []
    once = loop.step_once
    loop.step_once = lambda: rounds.append(once()) or rounds[-1]  # type: ignore[method-assign, func-returns-value]
    loop.start(progress.release)
    wait_until_sync(lambda: rounds == [False])
    submit(loop, 0, max_tokens=2)
    assert progress.acquire(timeout=10)
    wait_until_sync(lambda: rounds == [False, True, True, False])
    assert outcomes(running)["r0.0"].reason == "length"


def test_a_thread_that_dies_says_why(threads: list[EngineLoop]) -> None:
    loop, running, _ = make_loop()
    threads.append(loop)
    running.apply = lambda change: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    died = threading.Event()
    loop.start(died.set)
    submit(loop, 0)
    assert died.wait(10) and isinstance(loop.failure, EngineDied)


def test_a_new_life_during_a_step_drops_its_results() -> None:
    loop, running, _ = make_loop(step_s=1.0, sleep=lambda _: loop.reset())
    submit(loop, 0)
    loop.step_once()
    assert not running.has_work and not running.outbox and not len(running.sealed)


def test_a_new_life_does_not_see_what_was_queued_for_the_old_one() -> None:
    loop, running, _ = make_loop()
    submit(loop, 0)
    loop.reset()
    assert not loop.step_once() and not running.has_work


def test_a_step_that_does_not_end_is_hung() -> None:
    clock = [0.0]
    seen: list[Any] = []

    def sleep(seconds: float) -> None:
        for now in (4.9, 5.1):
            clock[0] = start[0] + now
            seen.append(loop.hung)

    running = make_running()
    loop = EngineLoop(make_engine(running, step_s=1.0, sleep=sleep), running, clock=lambda: clock[0])
    loop.cost.observe(1, 0, 1, 0.001)  # steps are known to be short
    start = [0.0]
    submit(loop, 0, max_tokens=1)
    loop.step_once()
    assert seen == [(), (("r0.0", 1),)] and not loop.hung
