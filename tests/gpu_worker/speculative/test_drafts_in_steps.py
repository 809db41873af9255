"""Several tokens a step, through the running set and the engine's loop: text, ends, seals and blocks as without."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest

from services.gpu_worker.batch import Chunk, Drawn
from services.gpu_worker.composer import Budget
from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.running_set import Change, RunningSet
from services.gpu_worker.scripted_engine import ScriptedEngine
from services.gpu_worker.speculative.row_cost import RowCost
from services.gpu_worker.speculative.speculator import HELD_TOKENS, Speculator
from shared import scripted_vocab as vocab
from shared.protocol import Outcome, TokenChunk
from shared.speculative_config import SpeculativeConfig
from shared.wire import decode_as
from shared.worker_protocol import Cancel, Extend, Preempt
from tests.gpu_worker.builders import make_admission, make_admit, make_engine, make_running
from tests.gpu_worker.guesser import Guesser
from tests.gpu_worker.overlapping_engine import OverlappingScripted

PROMPT = list(b"abcdef")


def make_loop(guesser: Guesser | None, num_blocks: int = 96, **options: Any) -> tuple[EngineLoop, RunningSet]:
    running = make_running(num_blocks, drafter=guesser)
    return EngineLoop(OverlappingScripted(make_engine(running, **options)), running), running


def submit(loop: EngineLoop, number: int, prompt: list[int] = PROMPT, num_blocks: int = 12, **params: Any) -> None:
    admit = make_admit(f"r{number}.0", block_ids=range(12 * number, 12 * number + num_blocks))
    loop.submit(Change("run", 1, admit, make_admission(prompt, **params)))


def run_dry(loop: EngineLoop) -> None:
    while loop.step_once():
        pass


def answers(running: RunningSet) -> dict[str, list[int]]:
    entries = running.ledger.build().entries
    return {e.sid: list(decode_as(TokenChunk, e.chunk).ids) for e in entries if e.count}


def outcomes(running: RunningSet) -> dict[str, Outcome]:
    return {e.sid: decode_as(Outcome, e.outcome) for e in running.ledger.build().entries if e.outcome}


@pytest.mark.parametrize("beside", [0, 1, 3])
@pytest.mark.parametrize("wrong_every", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("overlap", [False, True])
def test_answers_are_those_without_drafts(wrong_every: int, overlap: bool, beside: int) -> None:
    guesser = Guesser(3 + 3 * beside, wrong_every, beside)
    running = make_running(96, drafter=guesser)
    loop = EngineLoop(OverlappingScripted(make_engine(running)), running, overlap=overlap)
    texts = [[n, *PROMPT] * (n + 1) for n in range(4)]
    for n, text in enumerate(texts):
        submit(loop, n, text, max_tokens=9 + n, temperature=0.5, seed=n, **({"logprobs": 2} if n == 2 else {}))
    run_dry(loop)
    assert answers(running) == {f"r{n}.0": vocab.answer(text, 9 + n, seed=n) for n, text in enumerate(texts)}
    assert {o.reason for o in outcomes(running).values()} == {"length"} and guesser.num_drafted > 0
    (chunk,) = (decode_as(TokenChunk, e.chunk) for e in running.ledger.build().entries if e.sid == "r2.0")
    assert chunk.logprobs is not None and [top[0][0] for _, top in chunk.logprobs] == list(chunk.ids)


def test_right_drafts_take_fewer_steps() -> None:
    loop, running = make_loop(Guesser(num_drafts=3, wrong_every=1000))
    submit(loop, 0, [1, *PROMPT], max_tokens=13)
    run_dry(loop)
    assert answers(running)["r0.0"] == vocab.answer([1, *PROMPT], 13)
    assert loop.num_drawn == 13 and loop.num_steps == 4  # the first draft, at position 0, is wrong


def test_right_drafts_between_wrong_ones_take_as_few_steps() -> None:
    loop, running = make_loop(Guesser(num_drafts=9, wrong_every=1000, beside=2))
    submit(loop, 0, [1, *PROMPT], max_tokens=13)
    run_dry(loop)
    assert answers(running)["r0.0"] == vocab.answer([1, *PROMPT], 13)
    assert loop.num_drawn == 13 and loop.num_steps == 7  # near the end there is no room for so many


@pytest.mark.parametrize("at", [2, 3, 4, 5])
@pytest.mark.parametrize("min_tokens", [0, 4])
@pytest.mark.parametrize("beside", [0, 1])
def test_nothing_counts_after_a_stop_token(at: int, min_tokens: int, beside: int) -> None:
    """Neither text nor seals nor as generated, though drafts behind it were right and are computed."""
    results = []
    for guesser in (None, Guesser(4 + 4 * beside, 1000, beside)):
        loop, running = make_loop(guesser)
        answer = vocab.answer(PROMPT, 12)
        submit(loop, 0, stop_token_ids=(answer[at],), min_tokens=min_tokens, max_tokens=12)
        run_dry(loop)
        outcome = outcomes(running)["r0.0"]
        assert loop.num_drawn == outcome.num_tokens
        seals = [(s.index, s.ids) for s in running.outbox.carry(()).seals]
        results.append((answers(running), outcome.reason, outcome.num_tokens, seals))
    assert results[0] == results[1]


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_max_tokens_is_kept_and_no_draft_is_made_behind_it(max_tokens: int) -> None:
    guesser = Guesser(num_drafts=4, wrong_every=1000)
    loop, running = make_loop(guesser)
    submit(loop, 0, max_tokens=max_tokens)
    run_dry(loop)
    assert answers(running)["r0.0"] == vocab.answer(PROMPT, max_tokens)
    assert guesser.num_drafted < max_tokens + 4 and (max_tokens > 1 or guesser.num_drafted == 0)


def test_blocks_are_sealed_with_drawn_tokens_only() -> None:
    """Rejected drafts stand in slots that are written again before their block is full."""
    seals = []
    for guesser in (None, Guesser(5, 2), Guesser(5, 7), Guesser(7, 7, 1)):
        loop, running = make_loop(guesser)
        submit(loop, 0, max_tokens=20)
        run_dry(loop)
        seals.append([(s.index, s.block_id, s.ids) for s in running.outbox.carry(()).seals])
        assert [e.key for e in running.sealed.entries()] and len(seals[-1]) == (len(PROMPT) + 19) // 4
    assert seals[0] == seals[1] == seals[2] == seals[3]


def test_without_slots_there_are_no_drafts() -> None:
    guesser = Guesser(num_drafts=5, wrong_every=1000)
    loop, running = make_loop(guesser)
    submit(loop, 0, [1, *PROMPT], num_blocks=2, max_tokens=9)  # seven tokens and one slot
    run_dry(loop)
    assert running.starved == {"r0.0"} and guesser.num_drafted == 1
    loop.submit(Change("run", 1, Extend(sid="r0.0", epoch=1, pool_term=0, block_ids=(60, 61))))
    run_dry(loop)
    assert answers(running)["r0.0"] == vocab.answer([1, *PROMPT], 9) and guesser.num_drafted > 1


def test_drafts_take_a_spare_block_only_where_there_is_one_for_everybody() -> None:
    def most_taken(num_spares: int) -> int:
        loop, running = make_loop(Guesser(num_drafts=3, wrong_every=1000))
        loop.submit(Change("run", 1, Extend(sid="", epoch=0, pool_term=0, block_ids=tuple(range(40, 40 + num_spares)))))
        for n in range(2):
            submit(loop, n, [1, 2, 3, 4, 5, 6, 7], num_blocks=2, max_tokens=16)
        loop.step_once()
        return len(running.outbox.carry(()).taken)

    assert [most_taken(n) for n in (0, 2, 3, 4)] == [0, 0, 2, 2]


@pytest.mark.parametrize(("budget", "num_rows"), [(Budget(32, 20, 32), 20), (Budget(12, 20, 12), 12)])
def test_a_step_has_no_more_rows_than_it_may(budget: Budget, num_rows: int) -> None:
    """Neither tokens, nor rows that are drawn from."""
    running = make_running(96, capacity=budget, drafter=Guesser(num_drafts=8, wrong_every=1000))
    loop = EngineLoop(OverlappingScripted(make_engine(running)), running)
    sizes = []
    begin = loop._start

    def start(chunks: Seq[Chunk]) -> Any:
        sizes.append(sum(1 + len(c.draft) if c.sample else c.count for c in chunks))
        return begin(chunks)

    loop._start = start
    for n in range(6):
        submit(loop, n, max_tokens=8)
    run_dry(loop)
    assert max(sizes[1:]) == num_rows and len(answers(running)) == 6


@pytest.mark.parametrize("kind", [Cancel, Preempt])
def test_those_that_leave_after_a_step_with_drafts_leave_what_is_drawn(kind: type[Cancel] | type[Preempt]) -> None:
    loop, running = make_loop(Guesser(wrong_every=1000))
    submit(loop, 0, max_tokens=20)
    loop.step_once()
    loop.step_once()
    loop.submit(Change("run", 1, kind(sid="r0.0", epoch=1)))
    submit(loop, 1, list(b"something"), max_tokens=6)
    run_dry(loop)
    assert answers(running)["r1.0"] == vocab.answer(list(b"something"), 6)
    if kind is Preempt:
        kept = answers(running)["r0.0"]
        assert len(kept) > 2 and kept == vocab.answer(PROMPT, len(kept))


@pytest.mark.parametrize("position", [0, 1, 2, 3, 6])
def test_one_that_fails_while_drafts_are_verified_ends_where_it_would_without(position: int) -> None:
    loop, running = make_loop(Guesser(wrong_every=1000))
    submit(loop, 0, [vocab.RAISE, position, 7], max_tokens=9)
    submit(loop, 1, max_tokens=9)
    run_dry(loop)
    assert (outcomes(running)["r0.0"].code, outcomes(running)["r0.0"].num_tokens) == ("engine_error", position)
    assert answers(running)["r1.0"] == vocab.answer(PROMPT, 9)


class FailsOnDrafts(ScriptedEngine):
    num_failures = 0

    def step(self, chunks: Seq[Chunk]) -> list[Drawn]:
        if any(c.draft for c in chunks):
            self.num_failures += 1
            raise RuntimeError("of drafts")
        return super().step(chunks)


def test_where_drafts_make_steps_fail_they_are_not_tried_each_time() -> None:
    text = list(bytes(range(HELD_TOKENS // 2)) * 6)
    cost = RowCost()
    cost.observe(1, 1.0)
    cost.observe(16, 1.0)
    drafter = Speculator(SpeculativeConfig(method="suffix", num_speculative_tokens=8), cost)
    running = make_running(200, max_model_len=800, capacity=Budget(512, 32, 512), drafter=drafter)
    engine = FailsOnDrafts(num_blocks=200, block_size=running.info.block_size, max_model_len=800)
    loop = EngineLoop(engine, running)
    submit(loop, 0, [vocab.SCRIPT, *text], num_blocks=200, max_tokens=len(text))
    run_dry(loop)
    assert answers(running)["r0.0"] == text and not any(o.code for o in outcomes(running).values())
    assert 1 < engine.num_failures <= 1 + len(text) // HELD_TOKENS


def test_where_memory_runs_out_drafts_are_given_up_first() -> None:
    guesser = Guesser(num_drafts=6, wrong_every=1000)
    loop, running = make_loop(guesser)
    submit(loop, 0, [vocab.OOM, 4, 7], max_tokens=9)
    submit(loop, 1, max_tokens=9)
    run_dry(loop)
    assert answers(running) == {
        "r0.0": vocab.answer([vocab.OOM, 4, 7], 9), "r1.0": vocab.answer(PROMPT, 9)
    }  # fmt: skip
    assert guesser.num_failed and loop.limit.num_tokens <= 4 and not any(o.code for o in outcomes(running).values())


def test_a_step_with_drafts_is_not_followed_before_it_has_ended() -> None:
    loop, running = make_loop(Guesser(num_drafts=2, wrong_every=1000))
    engine = loop._engine
    assert isinstance(engine, OverlappingScripted)
    submit(loop, 0, [1, *PROMPT], max_tokens=5)
    run_dry(loop)
    assert engine.events == ["begin 1", "end 1", "begin 2", "end 2", "begin 3", "late 3", "end 3"]
