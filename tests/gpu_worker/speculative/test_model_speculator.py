"""When a model guesses and how far, over whole answers, simulated: text is given, time is what costs say."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from services.gpu_worker.batch import Chunk, SampledToken, Sequence
from services.gpu_worker.speculative import model_speculator
from services.gpu_worker.speculative.batch_proposer import HELD_UP
from services.gpu_worker.speculative.model_speculator import LONGEST_REST_S, MAX_FAILURES, REST_S, ModelSpeculator
from services.gpu_worker.speculative.proposer import NOTHING, Proposal
from services.gpu_worker.speculative.row_cost import RowCost
from services.gpu_worker.speculative.speculator import HELD_TOKENS
from shared.speculative_config import SpeculativeConfig
from tests.gpu_worker.builders import make_params

CONFIG = SpeculativeConfig(method="suffix", num_speculative_tokens=8)
VOCAB_SIZE = 1000


def step_s(num_rows: int) -> float:
    """As of a GPU, or of weights that are large: rows beside the first cost little."""
    return 0.010 * (1.0 + 0.04 * (num_rows - 1))


@dataclass
class Guesses:
    """A proposer for many that is right by chance. chance: of a token of which it is sure, and of one of which it is
    not; what it says of them is true. round_s: of a token for each; token_s: of a token that is behind."""

    chances: tuple[float, float] = (0.95, 0.4)
    round_s: float = 0.001
    token_s: float = 0.0002
    rng: random.Random = field(default_factory=lambda: random.Random(3))
    answers: dict[int, list[int]] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    asked: list[list[int]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    failing: bool = False
    now_s: float = 0.0
    num_guessed: int = 0
    max_drafts: int = 64

    def num_behind(self, seq: Sequence) -> int:
        return len(seq.token_ids) - self.computed.get(id(seq), 0)

    def seconds(self, num_sequences: int, num_drafts: int) -> float:
        return self.round_s * num_drafts

    def catch_up_seconds(self, num_tokens: int) -> float:
        return self.token_s * num_tokens

    def propose(self, sequences: Seq[Sequence], most: Seq[int], num_tokens: int) -> list[Proposal]:
        self.asked.append(list(most))
        if self.failing:
            raise RuntimeError("no model")
        proposals = []
        for seq, count in zip(sequences, most, strict=True):
            read = min(self.num_behind(seq), num_tokens)
            num_tokens -= read
            self.computed[id(seq)] = self.computed.get(id(seq), 0) + read
            self.now_s += self.token_s * (read - 1)
            proposals.append(self._guess(seq, count) if not self.num_behind(seq) else NOTHING)
        self.now_s += self.round_s * max(len(p.ids) for p in proposals)
        return proposals

    def _guess(self, seq: Sequence, count: int) -> Proposal:
        left = self.answers[id(seq)][seq.num_output_tokens :][:count]
        sure = [self.rng.random() < 0.5 for _ in left]
        right = [self.rng.random() < self.chances[not is_sure] for is_sure in sure]
        self.num_guessed += len(left)
        ids = tuple(token if fine else VOCAB_SIZE for token, fine in zip(left, right, strict=True))
        return Proposal(ids, tuple(8 if is_sure else 2 for is_sure in sure))

    def forget(self, seq: Sequence) -> None:
        self.forgotten.append(seq.sid)


class Simulation:
    def __init__(
        self, guesses: Guesses, cost_s: Callable[[int], float] = step_s, config: SpeculativeConfig = CONFIG,
        max_step_s: float = float("inf"),
    ) -> None:  # fmt: skip
        self.guesses = guesses
        self.cost_s = cost_s
        cost = RowCost()
        for num_rows in (1, 2, 4, 8):
            cost.observe(num_rows, cost_s(num_rows))
        self.speculator = ModelSpeculator(config, guesses, lambda: guesses.now_s, cost, max_step_s=max_step_s)
        self.num_steps = 0
        self.drafted: list[list[int]] = []

    def run(self, sequences: list[Sequence], num_tokens: int) -> float:
        """Until all have drawn so many; tokens a second, against those without drafts."""
        rng = random.Random(4)
        for seq in sequences:
            self.guesses.answers[id(seq)] = [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]
        begun, without_s = self.guesses.now_s, num_tokens * self.cost_s(len(sequences))
        while unfinished := [s for s in sequences if s.num_output_tokens < num_tokens]:
            self.step([Chunk(s, len(s.token_ids) - 1, 1, True) for s in unfinished])
        for seq in sequences:
            self.speculator.forget(seq)
        return without_s / (self.guesses.now_s - begun)

    def step(self, chunks: list[Chunk]) -> None:
        begun = self.guesses.now_s
        answers = [self.guesses.answers[id(c.seq)][c.seq.num_output_tokens :] for c in chunks]
        most = [len(left) - 1 for left in answers]
        planned = self.speculator.plan(chunks, most, 64)
        self.speculator.think()
        drafts = self.speculator.draft(chunks, most, 64)
        assert all(len(ids) <= count for ids, count in zip(drafts, planned, strict=True))
        self.drafted.append([len(ids) for ids in drafts])
        chunks = [replace(c, draft=draft) for c, draft in zip(chunks, drafts, strict=True)]
        drawn = []
        for chunk, left in zip(chunks, answers, strict=True):
            count = 1
            while count <= len(chunk.draft.ids) and chunk.draft.ids[count - 1] == left[count - 1]:
                count += 1
            drawn.append(tuple(map(SampledToken, left[:count])))
        self.guesses.now_s += self.cost_s(sum(c.num_rows for c in chunks))
        self.num_steps += 1
        self.speculator.observe(chunks, drawn, self.guesses.now_s - begun)
        for chunk, tokens in zip(chunks, drawn, strict=True):
            chunk.seq.token_ids += [t.token_id for t in tokens]


def make_sequence(number: int = 0, num_prompt: int = 20, **params: object) -> Sequence:
    """That has drawn its first token, the last of these."""
    return Sequence(
        sid=f"r{number}.0", epoch=1, choice=0, params=make_params(max_tokens=10_000, **params),
        num_prompt_tokens=num_prompt - 1, token_ids=[1] * num_prompt, block_ids=[], num_computed=num_prompt - 1,
    )  # fmt: skip


@pytest.mark.parametrize("num_sequences", [1, 4])
def test_a_model_that_is_mostly_right_makes_fewer_steps(num_sequences: int) -> None:
    simulation = Simulation(Guesses(chances=(0.95, 0.4)))
    ratio = simulation.run([make_sequence(n) for n in range(num_sequences)], 400)
    assert ratio > 1.35
    counts = simulation.speculator.counts["suffix"]
    assert counts.num_draft_tokens < simulation.guesses.num_guessed  # of those of which it was not sure, some were not
    assert counts.accepted[0] > counts.accepted[1] > 0
    assert counts.saved_s == pytest.approx((ratio - 1) * simulation.guesses.now_s, rel=0.2)


@pytest.mark.parametrize("num_sequences", [1, 16])
@pytest.mark.parametrize(
    "guesses",
    [partial(Guesses, chances=(0.02, 0.02)), partial(Guesses, round_s=0.012), partial(Guesses, chances=(0.15, 0.03))],
)
def test_guesses_that_do_not_pay_cost_next_to_nothing(num_sequences: int, guesses: Callable[[], Guesses]) -> None:
    """Wrong ones, right ones that take longer than a step, and such as nearly would."""
    simulation = Simulation(guesses())
    assert simulation.run([make_sequence(n) for n in range(num_sequences)], 3000) > 0.98
    assert 0 < simulation.guesses.num_guessed < 0.2 * 3000 * num_sequences


def test_where_rows_cost_what_they_are_nothing_is_guessed_either() -> None:
    simulation = Simulation(Guesses(), lambda num_rows: 0.010 * num_rows**1.05)
    assert simulation.run([make_sequence(n) for n in range(8)], 500) > 0.98
    assert sum(map(sum, simulation.drafted)) < 50


@pytest.mark.parametrize("num_prompt", [20, 1500])
def test_what_becomes_right_is_found_and_what_becomes_wrong_is_dropped(num_prompt: int) -> None:
    """Though the model has fallen behind by then, and reads a long prompt from what it may waste."""
    simulation = Simulation(Guesses(chances=(0.0, 0.0)))
    seq = make_sequence(num_prompt=num_prompt)
    ratios = [simulation.run([seq], 3000)]
    simulation.guesses.chances = (1.0, 0.9)
    ratios.append(simulation.run([make_sequence(1, num_prompt)], 6000))
    simulation.guesses.chances = (0.0, 0.0)
    ratios.append(simulation.run([make_sequence(2, num_prompt)], 8000))
    assert ratios[0] > 0.975 and ratios[1] > 1.3 and ratios[2] > 0.975


def test_no_token_is_late_for_the_reading_of_a_long_prompt() -> None:
    """Before one step no more is read than a quarter of the longest step's time."""
    simulation = Simulation(Guesses(chances=(1.0, 1.0)), max_step_s=0.04)
    seq = make_sequence(num_prompt=3000)
    simulation.guesses.answers[id(seq)] = list(range(200))
    most_s = 0.0
    for _ in range(20):
        before = simulation.guesses.now_s
        simulation.step([Chunk(seq, len(seq.token_ids) - 1, 1, True)])
        most_s = max(most_s, simulation.guesses.now_s - before)
    assert most_s < 0.01 + 0.04 / 4 + 0.001


@pytest.mark.parametrize("cached", [0, 18])
def test_the_first_token_waits_for_no_guess(cached: int) -> None:
    """Also where all of its prompt was cached but the last token, and the step computes one."""
    simulation = Simulation(Guesses())
    seq = make_sequence()
    del seq.token_ids[-1]
    assert simulation.speculator.plan([Chunk(seq, cached, 19 - cached, True)], [2], 9) == [0]
    seq.token_ids.append(1)
    assert simulation.speculator.plan([Chunk(seq, 19, 1, True)], [2], 9) == [2]


@pytest.mark.parametrize(("asked", "want"), [(0, 0), (2, 2), (40, 8), (None, 8)])
def test_a_request_can_only_lower_how_many(asked: int | None, want: int) -> None:
    simulation = Simulation(Guesses(chances=(1.0, 1.0), round_s=0.0), lambda num_rows: 0.01)
    seq = make_sequence(num_speculative_tokens=asked)
    assert simulation.speculator.plan([Chunk(seq, 19, 1, True)], [30], 64) == [want]
    assert simulation.speculator.expects([seq], [30], 64) == bool(want)


def test_who_has_no_guesses_waits_a_tenth_longer_at_most_for_those_of_another() -> None:
    simulation = Simulation(Guesses(chances=(1.0, 1.0)))
    sequences = [make_sequence(0), *(make_sequence(n, num_speculative_tokens=0) for n in range(1, 4))]
    simulation.run(sequences, 200)
    assert sum(map(sum, simulation.drafted)) < 10  # a guess and its row would take longer than that
    simulation = Simulation(Guesses(chances=(1.0, 1.0), round_s=0.0001))
    simulation.run([make_sequence(0), *(make_sequence(n, num_speculative_tokens=0) for n in range(1, 4))], 200)
    assert sum(map(sum, simulation.drafted)) > 50


def test_a_model_that_fails_fails_no_answer_and_is_asked_more_and_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    simulation = Simulation(Guesses(failing=True))
    simulation.run([make_sequence()], HELD_TOKENS * (MAX_FAILURES + 2))
    assert len(simulation.guesses.asked) == MAX_FAILURES and caplog.text.count("draft model failed") == MAX_FAILURES
    for number in range(1, 4):
        simulation.guesses.now_s += REST_S * 2.0 ** (number - 1)
        simulation.run([make_sequence(number)], HELD_TOKENS * 3)
        assert len(simulation.guesses.asked) == MAX_FAILURES + number, "once after each rest, which is longer each time"
    simulation.guesses.failing = False
    simulation.guesses.now_s += REST_S * 8.0
    assert simulation.run([make_sequence(9)], 2000) > 1.1, "a model that has come back is asked as before"


def test_a_model_that_never_comes_back_harms_nothing_however_often_it_is_asked() -> None:
    """Once an hour for some weeks."""
    simulation = Simulation(Guesses(failing=True))
    num = 1100
    for number in range(num):
        simulation.guesses.now_s += LONGEST_REST_S
        simulation.run([make_sequence(number)], 4)
    assert len(simulation.guesses.asked) > num - HELD_TOKENS


def test_after_a_step_with_drafts_that_failed_there_are_none_for_a_while() -> None:
    simulation = Simulation(Guesses(chances=(1.0, 1.0)))
    seq = make_sequence()
    simulation.guesses.answers[id(seq)] = list(range(400))
    simulation.step([Chunk(seq, 19, 1, True)])
    simulation.speculator.failed()
    num_tokens = len(seq.token_ids)
    while len(seq.token_ids) < num_tokens + HELD_TOKENS:
        simulation.step([Chunk(seq, len(seq.token_ids) - 1, 1, True)])
        assert simulation.drafted[-1] == [0]
    simulation.step([Chunk(seq, len(seq.token_ids) - 1, 1, True)])
    assert simulation.drafted[-1] != [0]


def test_one_that_left_is_forgotten_and_a_new_life_begins_anew() -> None:
    simulation = Simulation(Guesses(chances=(0.0, 0.0)))
    simulation.run([make_sequence()], 50)
    simulation.speculator.draft([], [], 9)
    assert simulation.guesses.forgotten == ["r0.0"] and not simulation.speculator._followed
    old, new = make_sequence(), make_sequence()
    for seq in (old, new):
        simulation.guesses.answers[id(seq)] = [1, 2, 3]
        simulation.speculator.plan([Chunk(seq, 19, 1, True)], [2], 9)
    assert simulation.speculator._followed["r0.0"].seq is new


def test_who_left_before_anything_was_guessed_for_it_is_forgotten_too() -> None:
    """Heads are told of every step, so they know of a request for one token."""
    simulation = Simulation(Guesses())
    seq = make_sequence()
    simulation.speculator.plan([Chunk(seq, 0, 19, True)], [0], 9)
    simulation.speculator.observe([Chunk(seq, 0, 19, True)], [(SampledToken(1),)], 0.01)
    simulation.speculator.forget(seq)
    simulation.speculator.plan([], [], 9)
    assert simulation.guesses.forgotten == [seq.sid]


def test_who_left_is_forgotten_again_until_no_step_is_in_flight_with_it() -> None:
    simulation = Simulation(Guesses())
    seq, other = make_sequence(1), make_sequence(2)
    chunk = Chunk(other, 19, 1, True)
    simulation.speculator.forget(seq)
    forgotten = []
    for _ in range(5):
        simulation.speculator.draft([chunk], [0], 9)
        forgotten.append(simulation.guesses.forgotten.count(seq.sid))
        simulation.speculator.observe([chunk], [(SampledToken(1),)], 0.01)
    assert forgotten == [1, 3, 4, 4, 4]  # each step that ends tells it too


def test_what_guessing_took_counts_in_its_own_step_alone() -> None:
    """The step behind it may begin before it ends, and nothing is planned for that."""
    simulation = Simulation(Guesses(chances=(1.0, 1.0), round_s=0.004))
    seq = make_sequence()
    simulation.guesses.answers[id(seq)] = list(range(400))
    for _ in range(60):
        simulation.step([Chunk(seq, len(seq.token_ids) - 1, 1, True)])
    saved_s = simulation.speculator.counts[CONFIG.method].saved_s
    chunk = Chunk(seq, len(seq.token_ids) - 1, 1, True)
    simulation.speculator.draft([chunk], [0], 9)
    simulation.speculator.observe([chunk], [(SampledToken(1),)], step_s(1))
    assert simulation.speculator.counts[CONFIG.method].saved_s == saved_s


def test_what_held_up_guessing_is_no_cost_of_it() -> None:
    """A core that somebody else had meanwhile: one second would forbid guesses for thousands of steps."""
    simulation = Simulation(Guesses(chances=(1.0, 1.0)))
    seq = make_sequence()
    simulation.guesses.answers[id(seq)] = list(range(100))
    chunk = Chunk(seq, 19, 1, True)
    (count,) = simulation.speculator.plan([chunk], [8], 64)
    before_s, clock = simulation.speculator.purse.balance_s, iter([0.0, 1.0])
    simulation.speculator._clock = lambda: next(clock)
    num_behind = simulation.guesses.num_behind(seq) - 1
    simulation.speculator.think()
    took_s = count * simulation.guesses.round_s + num_behind * simulation.guesses.token_s
    assert simulation.speculator.spent_s == 1.0
    assert before_s - simulation.speculator.purse.balance_s == pytest.approx(HELD_UP * took_s)
    simulation.speculator.observe([chunk], [(SampledToken(0),)], 1.0 + step_s(1))
    assert simulation.speculator.counts[CONFIG.method].saved_s == pytest.approx(-HELD_UP * took_s)


def test_what_is_guessed_and_not_drafted_is_learnt_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_speculator, "UNKNOWN_CHANCE", 0.0)
    simulation = Simulation(Guesses(chances=(1.0, 1.0)))
    seq = make_sequence()
    simulation.guesses.answers[id(seq)] = list(range(100))
    chunk = Chunk(seq, 19, 1, True)
    assert simulation.speculator.plan([chunk], [9], 64) == [1]  # a try
    simulation.speculator.think()
    before = simulation.speculator._followed[seq.sid].by_place.probability(0)
    simulation.speculator.observe([chunk], [(SampledToken(1),)], 0.01)
    assert simulation.speculator._followed[seq.sid].by_place.probability(0) > before
