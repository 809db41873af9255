"""What a drafter is asked for a step, where a model guesses between its preparation and its beginning."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest

from services.gpu_worker.batch import Chunk
from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.running_set import Change, RunningSet
from services.gpu_worker.speculative.draft import Draft
from shared import scripted_vocab as vocab
from shared.worker_protocol import Extend
from tests.gpu_worker.builders import make_admission, make_admit, make_engine, make_running
from tests.gpu_worker.guesser import Guesser
from tests.gpu_worker.overlapping_engine import OverlappingScripted

PROMPT = list(b"1abcdef")


class Thinker(Guesser):
    """Guesses after some thought, during which anything may happen. expected: that the next step has drafts."""

    def __init__(self, expected: bool = True) -> None:
        super().__init__(num_drafts=3, wrong_every=1000)
        self.expected = expected
        self.meanwhile: Callable[[], None] = lambda: None
        self.planned: list[list[str]] = []
        self.num_blocks: list[int] = []  # of the last that is thought about, when that begins
        self._asked: list[Chunk] = []

    def plan(self, chunks: Seq[Chunk], most: Seq[int], num_free: int) -> list[int]:
        self._asked = [c for c, n in zip(chunks, most, strict=True) if n and c.count == 1]
        self.planned.append([c.seq.sid for c in self._asked])
        return [min(n, 3) if c in self._asked else 0 for c, n in zip(chunks, most, strict=True)]

    def think(self) -> None:
        if self._asked:
            self.num_blocks.append(len(self._asked[-1].seq.block_ids))
            self.meanwhile()

    def draft(self, chunks: Seq[Chunk], most: Seq[int], num_free: int) -> list[Draft]:
        asked = {id(c.seq) for c in self._asked}
        return super().draft(
            chunks, [n if id(c.seq) in asked else 0 for c, n in zip(chunks, most, strict=True)], num_free
        )

    def expects(self, *args: object) -> bool:
        return self.expected


def begin(thinker: Thinker, num_blocks: int = 12, **params: object) -> tuple[EngineLoop, RunningSet]:
    running = make_running(96, drafter=thinker)
    loop = EngineLoop(OverlappingScripted(make_engine(running)), running)
    for number in range(2):
        admit = make_admit(f"r{number}.0", block_ids=range(12 * number, 12 * number + num_blocks))
        loop.submit(Change("run", 1, admit, make_admission(PROMPT, **({"max_tokens": 12} | params))))
    return loop, running


def texts(running: RunningSet) -> set[tuple[int, ...]]:
    return {tuple(s.token_ids[len(PROMPT) :]) for s in running.sequences.values()}


def test_others_come_to_the_running_set_while_a_model_guesses() -> None:
    thinker = Thinker()
    loop, running = begin(thinker)
    free: list[bool] = []

    def meanwhile() -> None:
        free.append(loop.lock.acquire(blocking=False))
        loop.lock.release()

    thinker.meanwhile = meanwhile
    while loop.step_once():
        pass
    assert all(free) and len(free) == 3 and thinker.planned[1] == ["r0.0", "r1.0"] and not running.sequences


def test_who_leaves_meanwhile_has_no_part_in_the_step() -> None:
    thinker = Thinker()
    loop, running = begin(thinker)

    def meanwhile() -> None:
        running.ledger.drop("r0.0", 1)
        running.dropped("r0.0", 1, "cancelled")
        thinker.meanwhile = lambda: None

    thinker.meanwhile = meanwhile
    while loop.step_once():
        pass
    engine = loop._engine
    assert isinstance(engine, OverlappingScripted)
    assert engine.rows == [["r0.0", "r1.0"], *[["r1.0"]] * 3]
    assert running.blocks.num_held == 0


@pytest.mark.parametrize("leave", [RunningSet.reset, RunningSet.release_all])
def test_where_all_leave_meanwhile_there_is_no_step_and_the_next_is_not_waited_for(
    leave: Callable[[RunningSet], object],
) -> None:
    thinker = Thinker()
    loop, running = begin(thinker)
    loop.step_once()
    thinker.meanwhile = lambda: (leave(running), None)[1]
    assert loop.step_once() and loop.num_steps == 1 and not loop.hung
    assert not loop.step_once()


def test_a_model_does_not_guess_beside_a_step() -> None:
    """It would take cores from it. Where drafts are expected the step's end is waited for."""
    thinker = Thinker(expected=False)
    loop, running = begin(thinker)
    loop.step_once()
    assert thinker.planned == [[]]  # before the first step
    loop.step_once()
    assert thinker.planned == [[]] and loop._in_flight
    thinker.expected = True
    loop.step_once()
    assert thinker.planned[1:] == [["r0.0", "r1.0"]]


def test_a_sequence_has_the_slots_for_guesses_before_they_are_computed() -> None:
    """Of three guesses two are computed by the model, behind the seven tokens and one that its blocks hold."""
    thinker = Thinker()
    loop, running = begin(thinker, num_blocks=2)
    loop.submit(Change("run", 1, Extend(sid="", epoch=0, pool_term=0, block_ids=(40, 41, 42, 43))))
    loop.step_once()
    assert running.sequences["r1.0"].block_ids == [12, 13]
    loop.step_once()
    assert thinker.num_blocks == [3]
    assert texts(running) == {tuple(vocab.answer(PROMPT, 5))}
