"""The engine's loop with an engine that has the next step before the present one has ended."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from services.gpu_worker.batch import Chunk
from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.failures import EngineBroken, OutOfMemory
from services.gpu_worker.running_set import Change, RunningSet
from shared import scripted_vocab as vocab
from shared.protocol import Outcome
from shared.wire import decode_as
from shared.worker_protocol import Cancel, Extend, Preempt
from tests.gpu_worker.builders import ended, make_admission, make_admit, make_engine, make_running
from tests.gpu_worker.guesser import Guesser
from tests.gpu_worker.overlapping_engine import OverlappingScripted, OverlappingStep
from tests.helpers import wait_until_sync

PROMPT = list(b"abcdef")


def make_loop(num_blocks: int = 64, **options: Any) -> tuple[EngineLoop, RunningSet, OverlappingScripted]:
    running = make_running(num_blocks)
    engine = OverlappingScripted(make_engine(running, **options))
    return EngineLoop(engine, running), running, engine


def submit(
    loop: EngineLoop, number: int, prompt: list[int] = PROMPT, block_ids: range | None = None, **params: Any
) -> str:
    """Admits r<number>.0, into blocks of its own unless they are named."""
    sid = f"r{number}.0"
    admit = make_admit(sid, block_ids=block_ids or range(4 * number, 4 * number + 4))
    loop.submit(Change("run", 1, admit, make_admission(prompt, **params)))
    return sid


def run_dry(loop: EngineLoop) -> None:
    while loop.step_once():
        pass


def answers(running: RunningSet) -> dict[str, list[int]]:
    accounts = running.ledger._accounts.values()
    return {a.seq.sid: a.seq.token_ids[a.seq.num_prompt_tokens :] for a in accounts}


def outcomes(running: RunningSet) -> dict[str, Outcome]:
    return {e.sid: decode_as(Outcome, e.outcome) for e in running.ledger.build().entries if e.outcome}


def committed(running: RunningSet) -> dict[str, int]:
    """Tokens that a commit would have now."""
    return {e.sid: e.count for e in running.ledger.build().entries}


def test_a_step_begins_before_the_results_of_the_one_before_are_taken() -> None:
    loop, running, engine = make_loop()
    submit(loop, 0, max_tokens=3)
    run_dry(loop)
    assert engine.events == ["begin 1", "late 1", "begin 2", "end 1", "late 2", "begin 3", "end 2", "late 3", "end 3"]
    assert answers(running)["r0.0"] == vocab.answer(PROMPT, 3)


def test_results_are_to_be_had_while_the_next_step_computes() -> None:
    loop, running, engine = make_loop()
    submit(loop, 0)
    assert loop.step_once() and committed(running) == {"r0.0": 0}
    assert loop.step_once() and committed(running) == {"r0.0": 1}
    assert engine.events[-2:] == ["begin 2", "end 1"]


def test_steps_one_by_one_where_they_are_not_to_overlap() -> None:
    running = make_running()
    engine = OverlappingScripted(make_engine(running))
    loop = EngineLoop(engine, running, overlap=False)
    submit(loop, 0, max_tokens=3)
    assert loop.step_once() and committed(running) == {"r0.0": 1}
    run_dry(loop)
    assert engine.events == ["begin 1", "end 1", "begin 2", "end 2", "begin 3", "end 3"]
    assert answers(running)["r0.0"] == vocab.answer(PROMPT, 3)


def test_steps_that_the_engine_had_to_wait_for_are_counted() -> None:
    loop, _, engine = make_loop()
    submit(loop, 0, max_tokens=6)
    engine.late = (3, 4)
    run_dry(loop)
    assert (loop.num_gaps, loop.num_steps) == (2, 6)


def test_prompts_in_chunks_and_answers_of_different_lengths() -> None:
    loop, running, _ = make_loop()
    prompts = [[n, *PROMPT] * (n + 1) for n in range(4)]
    for n, prompt in enumerate(prompts):
        submit(loop, n, prompt, block_ids=range(12 * n, 12 * n + 12), max_tokens=3 + n, temperature=0.5, seed=n)
    run_dry(loop)
    assert answers(running) == {f"r{n}.0": vocab.answer(p, 3 + n, seed=n) for n, p in enumerate(prompts)}


def test_a_token_after_the_end_is_neither_kept_nor_sealed() -> None:
    """The end is seen when the next step has begun: its row is computed, and passed over."""
    loop, running, engine = make_loop()
    answer = vocab.answer(PROMPT, 8)
    stop = next(t for i, t in enumerate(answer) if i >= 2 and t not in answer[:i])
    num_tokens = answer.index(stop) + 1
    submit(loop, 0, stop_token_ids=(stop,), max_tokens=8)
    run_dry(loop)
    assert engine.rows == [["r0.0"]] * (num_tokens + 1)
    assert answers(running)["r0.0"] == answer[:num_tokens]
    assert outcomes(running)["r0.0"].reason == "stop" and outcomes(running)["r0.0"].num_tokens == num_tokens
    seals = running.outbox.carry(()).seals
    assert len(seals) == (len(PROMPT) + num_tokens - 1) // 4
    assert loop.num_drawn == num_tokens


def test_an_end_that_can_be_foreseen_costs_no_row() -> None:
    loop, running, engine = make_loop()
    submit(loop, 0, max_tokens=2)
    submit(loop, 1, max_tokens=4)
    run_dry(loop)
    assert engine.rows == [["r0.0", "r1.0"]] * 2 + [["r1.0"]] * 2
    assert {o.reason for o in outcomes(running).values()} == {"length"}


def test_one_that_only_waits_for_its_last_token_is_not_starved() -> None:
    loop, running, _ = make_loop()
    submit(loop, 0, block_ids=range(2), max_tokens=3)  # six and two tokens fill two blocks; the third needs no slot
    for _ in range(3):
        loop.step_once()
    assert not running.starved and committed(running)["r0.0"] == 2
    run_dry(loop)
    assert outcomes(running)["r0.0"].reason == "length"


def test_without_a_slot_for_the_next_token_it_waits_for_a_block() -> None:
    loop, running, _ = make_loop()
    submit(loop, 0, block_ids=range(2), max_tokens=6)
    run_dry(loop)
    assert running.starved == {"r0.0"}
    loop.submit(Change("run", 1, Extend(sid="r0.0", epoch=1, pool_term=0, block_ids=(9,))))
    run_dry(loop)
    assert answers(running)["r0.0"] == vocab.answer(PROMPT, 6)


@pytest.mark.parametrize("change", [Cancel(sid="r0.0", epoch=1), Preempt(sid="r0.0", epoch=1)])
def test_blocks_that_a_step_in_flight_writes_go_to_another_at_once(change: Cancel | Preempt) -> None:
    """The new holder writes them in a later step: the pool of this engine checks each token."""
    loop, running, engine = make_loop()
    submit(loop, 0)
    loop.step_once()
    loop.step_once()
    loop.submit(Change("run", 1, change))
    submit(loop, 1, list(b"something"), block_ids=range(4), max_tokens=5)
    run_dry(loop)
    assert engine.rows[1:3] == [["r0.0"], ["r1.0"]]
    assert answers(running)["r1.0"] == vocab.answer(list(b"something"), 5)
    assert len(answers(running).get("r0.0", [])) <= 1  # what was drawn before the change


def test_blocks_that_end_with_a_row_too_many_are_written_by_their_next_holder_after_it() -> None:
    loop, running, engine = make_loop()
    stop = vocab.answer(PROMPT, 1)[0]
    submit(loop, 0, stop_token_ids=(stop,))
    loop.step_once()
    loop.step_once()
    assert ended(running) == [("r0.0", 1, "stop")] and engine.events[-2:] == ["begin 2", "end 1"]
    submit(loop, 1, list(b"something"), block_ids=range(4), max_tokens=5)
    run_dry(loop)
    assert answers(running)["r1.0"] == vocab.answer(list(b"something"), 5)


def test_what_needs_the_host_is_not_followed_before_it_has_ended() -> None:
    loop, running, engine = make_loop()
    submit(loop, 0, max_tokens=4)
    loop.step_once()
    submit(loop, 1, max_tokens=2, logprobs=1)
    run_dry(loop)
    assert engine.events[:7] == ["begin 1", "late 1", "begin 2", "end 1", "end 2", "begin 3", "end 3"]
    assert engine.events[7:] == ["begin 4", "late 4", "end 4"]
    assert answers(running) == {f"r{n}.0": vocab.answer(PROMPT, 4 - 2 * n) for n in range(2)}


@pytest.mark.parametrize("poison", [[0], [3], [4], [1, 2], [0, 4]])
def test_only_those_that_fail_alone_end_and_their_mates_are_untouched(poison: list[int]) -> None:
    """The step after the one that failed has begun with tokens that nobody drew: it is forgotten."""
    loop, running, _ = make_loop()
    bad = [vocab.RAISE, 2, 7, 7]  # at its third token
    prompts = [bad if n in poison else [n, *PROMPT] for n in range(5)]
    for number, prompt in enumerate(prompts):
        submit(loop, number, prompt, max_tokens=6)
    run_dry(loop)
    for number, prompt in enumerate(prompts):
        outcome, tokens = outcomes(running)[f"r{number}.0"], answers(running)[f"r{number}.0"]
        if number in poison:
            assert (outcome.code, outcome.num_tokens) == ("engine_error", 2)
        else:
            assert outcome.reason == "length" and tokens == vocab.answer(prompt, 6)


def test_of_a_failed_step_those_that_have_left_are_not_repeated() -> None:
    """Their blocks may be another's by now; and one that is left over is not blamed for them."""
    loop, running, engine = make_loop()
    submit(loop, 0, [vocab.RAISE, 1, 2])
    submit(loop, 1, max_tokens=4)
    loop.step_once()
    loop.step_once()  # the second step, in which the first one raises, has begun
    loop.submit(Change("run", 1, Cancel(sid="r0.0", epoch=1)))
    submit(loop, 2, list(b"something"), block_ids=range(4), max_tokens=4)
    run_dry(loop)
    assert engine.rows[1:4] == [["r0.0", "r1.0"], ["r1.0", "r2.0"], ["r1.0"]]
    assert answers(running) == {"r1.0": vocab.answer(PROMPT, 4), "r2.0": vocab.answer(list(b"something"), 4)}


def test_a_step_that_does_not_fit_runs_in_parts() -> None:
    loop, running, _ = make_loop()
    prompts = [[vocab.OOM, 5, *PROMPT] if n == 2 else [n, *PROMPT] for n in range(5)]
    for number, prompt in enumerate(prompts):
        submit(loop, number, prompt, max_tokens=6)
    run_dry(loop)
    assert answers(running) == {f"r{n}.0": vocab.answer(p, 6) for n, p in enumerate(prompts)}


def test_where_not_even_one_token_fits_the_worker_fails() -> None:
    loop, running, _ = make_loop()
    for number in range(3):
        submit(loop, number, [vocab.OOM, 0, *PROMPT] if number == 1 else [number, *PROMPT])
    with pytest.raises(OutOfMemory) as failed:
        run_dry(loop)
    assert failed.value.blamed == {("r1.0", 1)} and set(running.sequences) == {"r0.0", "r1.0", "r2.0"}


def test_an_engine_that_begins_nothing_any_more_is_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, running, engine = make_loop()
    monkeypatch.setattr(engine, "begin", lambda chunks: 1 / 0)
    submit(loop, 0)
    with pytest.raises(EngineBroken) as failed:
        run_dry(loop)
    assert failed.value.blamed == {("r0.0", 1)}


def test_a_new_life_does_not_see_what_is_in_flight() -> None:
    loop, running, _ = make_loop()
    submit(loop, 0)
    loop.step_once()
    loop.step_once()
    loop.reset()
    run_dry(loop)
    assert not running.has_work and not running.outbox


def test_what_is_in_flight_at_the_end_is_taken_in() -> None:
    """A worker that stops hands its sequences over with all that it has drawn."""
    turns, entered = threading.Semaphore(0), threading.Semaphore(0)

    def sleep(_: float) -> None:
        entered.release()
        turns.acquire(timeout=10)

    loop, running, engine = make_loop(step_s=1.0, sleep=sleep)
    submit(loop, 0)
    loop.start(lambda: None)
    turns.release()
    assert entered.acquire(timeout=10) and entered.acquire(timeout=10)  # the second step's end, the third has begun
    stopping = threading.Thread(target=loop.stop)
    stopping.start()
    wait_until_sync(lambda: loop._stopping)
    turns.release(9)
    stopping.join()
    assert loop.failure is None and engine.events.count("begin 4") == 0
    assert answers(running)["r0.0"] == vocab.answer(PROMPT, 3)


def test_a_step_is_watched_from_the_end_of_the_one_before() -> None:
    clock = [0.0]
    seen: list[Any] = []

    def sleep(_: float) -> None:
        for seconds in (4.0, 2.0):
            clock[0] += seconds
            seen.append(bool(loop.hung))

    running = make_running()
    engine = OverlappingScripted(make_engine(running, step_s=1.0, sleep=sleep))
    loop = EngineLoop(engine, running, clock=lambda: clock[0])
    loop.cost.observe(1, 0, 1, 0.001)  # steps are known to be short
    submit(loop, 0, max_tokens=2)
    loop.step_once()
    loop.step_once()
    assert seen == [False, True] and not loop.hung
    run_dry(loop)
    assert seen[2:] == [False, False] and loop.num_steps == 2  # the first has shown that steps may take 6 s
    assert loop.hang_s == pytest.approx(30.0)


def test_what_a_step_takes_to_begin_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled there, for half a minute perhaps, while the step before has long computed what it should."""
    clock = [0.0]
    seen: list[Any] = []

    def begin(chunks: Seq[Chunk]) -> OverlappingStep:
        for seconds in (20.0, 20.0):
            clock[0] += seconds
            seen.append((loop.hung, loop.hang_s))
        return OverlappingScripted.begin(engine, chunks)

    running = make_running()
    engine = OverlappingScripted(make_engine(running))
    monkeypatch.setattr(engine, "begin", begin)
    loop = EngineLoop(engine, running, clock=lambda: clock[0])
    loop.cost.observe(1, 0, 1, 0.001)  # steps are known to be short
    submit(loop, 0)
    loop.step_once()
    assert seen == [((), 120.0)] * 2 and not loop.hung and loop.hang_s == 45.0
    clock[0] += 4.0
    loop._begin(loop._in_flight[0].chunks)
    assert seen[2:] == [((), 120.0)] * 2 and not loop.hung and loop.hang_s == 85.0
    clock[0] += 1.1
    assert loop.hung == (("r0.0", 1),)


def test_a_step_that_never_begins_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    seen: list[Any] = []

    def begin(chunks: Seq[Chunk]) -> OverlappingStep:
        clock[0] += 121.0
        seen.append(loop.hung)
        return OverlappingScripted.begin(engine, chunks)

    running = make_running()
    engine = OverlappingScripted(make_engine(running))
    monkeypatch.setattr(engine, "begin", begin)
    loop = EngineLoop(engine, running, clock=lambda: clock[0])
    submit(loop, 0)
    loop.step_once()
    assert seen == [(("r0.0", 1),)]


def test_a_pause_is_no_part_of_the_step_behind_it() -> None:
    """Nor is all that was before the first one."""
    clock = [100.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    drafter = Guesser(num_drafts=0)
    running = make_running(64, drafter=drafter)
    engine = OverlappingScripted(make_engine(running, step_s=1.0, sleep=sleep))
    loop = EngineLoop(engine, running, clock=lambda: clock[0])
    for number in range(2):
        submit(loop, number, max_tokens=4)
        run_dry(loop)
        clock[0] += 3600.0
    assert drafter.seconds == [1.0] * 8
