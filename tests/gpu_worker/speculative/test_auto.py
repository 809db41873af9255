"""Texts and heads together over whole answers, simulated: who guesses for whom, and what is kept for heads."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest

from services.gpu_worker.batch import Chunk, SampledToken, Sequence
from services.gpu_worker.speculative.auto import AutoSpeculator
from services.gpu_worker.speculative.draft import NO_DRAFT
from services.gpu_worker.speculative.model_speculator import ModelSpeculator
from services.gpu_worker.speculative.proposer import Proposal
from services.gpu_worker.speculative.purse import Purse
from services.gpu_worker.speculative.row_cost import RowCost
from services.gpu_worker.speculative.speculator import HELD_TOKENS, Speculator
from services.gpu_worker.speculative.worth import FIRST_REST, WINDOW, Worth
from shared.speculative_config import SpeculativeConfig
from tests.gpu_worker.speculative.test_model_speculator import Guesses, step_s
from tests.gpu_worker.speculative.test_speculator import make_sequence, words

TEXT = SpeculativeConfig(method="suffix", num_speculative_tokens=8)
HEADS = SpeculativeConfig(method="eagle3", num_speculative_tokens=8)


class Simulation:
    def __init__(self, guesses: Guesses, cost_s: Callable[[int], float] = step_s) -> None:
        self.guesses, self.cost_s = guesses, cost_s
        cost, purse = RowCost(), Purse()
        for num_rows in (1, 2, 4, 8):
            cost.observe(num_rows, cost_s(num_rows))
        text = Speculator(TEXT, cost, purse=purse)
        heads = ModelSpeculator(HEADS, guesses, lambda: guesses.now_s, cost, purse=purse)
        self.auto = AutoSpeculator(text, heads, "eagle3")
        self.overlaps = False  # a step begins before the one before it has ended, unless drafts are expected
        self.num_steps = self.num_wanted = 0  # wanted: steps in which something is kept

    def run(self, prompts: list[list[int]], answers: list[list[int]]) -> float:
        """Until all have drawn their answers; tokens a second, against those without drafts."""
        sequences = [make_sequence(prompt, n) for n, prompt in enumerate(prompts)]
        left = {id(s): list(answer) for s, answer in zip(sequences, answers, strict=True)}
        for seq, answer in zip(sequences, answers, strict=True):
            self.guesses.answers[id(seq)] = answer
        without_s = sum(self.cost_s(sum(len(a) > n for a in answers)) for n in range(max(map(len, answers))))
        begun_s = self.guesses.now_s
        while unfinished := [s for s in sequences if left[id(s)]]:
            self.step(unfinished, left)
        for seq in sequences:
            self.auto.forget(seq)
        return without_s / (self.guesses.now_s - begun_s)

    def step(self, sequences: list[Sequence], left: dict[int, list[int]]) -> None:
        begun_s, auto = self.guesses.now_s, self.auto
        chunks = [Chunk(s, len(s.token_ids) - 1, 1, True) for s in sequences]
        most = [len(left[id(s)]) - 1 for s in sequences]
        if self.overlaps and not auto.expects(sequences, [max(0, n - 1) for n in most], 64):
            most = [0] * len(chunks)
        else:
            auto.plan(chunks, most, 64)
            auto.think()
        chunks = [replace(c, draft=draft) for c, draft in zip(chunks, auto.draft(chunks, most, 64), strict=True)]
        drawn = []
        for chunk in chunks:
            own, count = left[id(chunk.seq)], 1
            while count <= len(chunk.draft) and chunk.draft.ids[count - 1] == own[count - 1]:
                count += 1
            drawn.append(tuple(map(SampledToken, own[:count])))
            del own[:count]
        self.guesses.now_s += self.cost_s(sum(c.num_rows for c in chunks))
        self.num_steps += 1
        self.num_wanted += any(auto.wants_rows(s) for s in sequences)
        auto.observe(chunks, drawn, self.guesses.now_s - begun_s)
        for chunk, tokens in zip(chunks, drawn, strict=True):
            chunk.seq.token_ids += [t.token_id for t in tokens]


def test_a_copy_is_guessed_from_its_text_and_soon_nothing_is_kept_for_heads() -> None:
    simulation, rng = Simulation(Guesses()), random.Random(1)
    text = words(rng, 600)
    assert simulation.run([text], [text]) > 4.0
    counts = simulation.auto.counts
    assert counts["suffix"].accepted.total() > 10 * counts["eagle3"].accepted.total()
    assert simulation.num_wanted < 0.5 * simulation.num_steps


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_new_text_is_guessed_by_heads(num_sequences: int) -> None:
    simulation, rng = Simulation(Guesses()), random.Random(2)
    prompts, answers = ([words(rng, 200) for _ in range(num_sequences)] for _ in range(2))
    assert simulation.run(prompts, answers) > 1.3
    counts = simulation.auto.counts
    assert counts["eagle3"].accepted.total() > 10 * counts["suffix"].accepted.total()
    assert simulation.num_wanted > 0.8 * simulation.num_steps


def test_a_text_of_both_kinds_is_guessed_by_both() -> None:
    simulation, rng = Simulation(Guesses()), random.Random(3)
    text = words(rng, 200)
    assert simulation.run([text], [words(rng, 200) + text + words(rng, 200)]) > 1.5
    assert all(simulation.auto.counts[method].accepted.total() > 60 for method in ("suffix", "eagle3"))


@pytest.mark.parametrize("num_sequences", [1, 16])
def test_heads_that_are_wrong_cost_next_to_nothing_and_nothing_is_kept_for_them(num_sequences: int) -> None:
    simulation, rng = Simulation(Guesses(chances=(0.05, 0.02))), random.Random(4)
    prompts, answers = ([words(rng, size) for _ in range(num_sequences)] for size in (50, 1500))
    assert simulation.run(prompts, answers) > 0.97
    assert simulation.num_wanted < 0.15 * simulation.num_steps
    more = [words(rng, 1500) for _ in range(num_sequences)]
    assert simulation.run(prompts, more) > 0.98


def test_heads_that_pay_less_than_they_are_expected_to_rest() -> None:
    """They take four times as long as they say."""

    class Slow(Guesses):
        def seconds(self, num_sequences: int, num_drafts: int) -> float:
            return 0.002 * num_drafts

    guesses = Slow(chances=(0.6, 0.5), round_s=0.008)
    simulation, rng = Simulation(guesses), random.Random(5)
    simulation.run([words(rng, 50)], [words(rng, 1000)])
    assert simulation.run([words(rng, 50)], [words(rng, 2000)]) > 0.97


def test_heads_that_something_held_up_once_go_on() -> None:
    """For a hundred seconds, in which nothing was gained; but neither did they take them."""

    class HeldUp(Guesses):
        def propose(self, sequences: Seq[Sequence], most: Seq[int], num_tokens: int) -> list[Proposal]:
            if len(self.asked) == 150:
                self.now_s += 100.0
            return super().propose(sequences, most, num_tokens)

    simulation, rng = Simulation(HeldUp()), random.Random(2)
    simulation.run([words(rng, 200)], [words(rng, 800)])
    undisturbed, rng = Simulation(Guesses()), random.Random(2)
    undisturbed.run([words(rng, 200)], [words(rng, 800)])
    assert simulation.num_steps < 1.1 * undisturbed.num_steps
    saved_s = [each.auto._heads.counts["eagle3"].saved_s for each in (simulation, undisturbed)]
    assert saved_s[0] > 0.8 * saved_s[1]


def test_heads_are_tried_again_where_steps_overlap_too() -> None:
    """Nothing is planned for a step before which no drafts are expected, however many of those there are."""
    guesses = Guesses(chances=(0.05, 0.02), token_s=0.0)
    simulation, rng = Simulation(guesses), random.Random(8)
    simulation.overlaps = True
    prompts = [words(rng, 50) for _ in range(2)]
    assert simulation.run(prompts, [words(rng, 3000) for _ in prompts]) > 0.97
    assert simulation.num_wanted < 0.15 * simulation.num_steps
    guesses.chances = (0.95, 0.4)
    assert simulation.run(prompts, [words(rng, 4000) for _ in prompts]) > 1.2


def test_where_rows_cost_what_they_are_neither_is_asked() -> None:
    simulation, rng = Simulation(Guesses(), lambda num_rows: 0.001 * num_rows), random.Random(6)
    prompts, answers = ([words(rng, 60) for _ in range(16)] for _ in range(2))
    assert simulation.run(prompts, [a * 10 for a in answers]) > 0.98
    assert simulation.num_wanted < 0.2 * simulation.num_steps


def test_after_a_step_that_failed_neither_guesses_for_a_while() -> None:
    simulation, rng = Simulation(Guesses()), random.Random(7)
    text = words(rng, 100)
    seq = make_sequence(text + text[:20])
    simulation.guesses.answers[id(seq)] = words(rng, 500)
    chunk = Chunk(seq, 119, 1, True)
    simulation.auto.plan([chunk], [8], 64)
    simulation.auto.think()
    assert simulation.auto.draft([chunk], [8], 64) != [NO_DRAFT]
    simulation.auto.failed()
    seq.token_ids += text[20 : 20 + HELD_TOKENS // 2]
    chunk = Chunk(seq, len(seq.token_ids) - 1, 1, True)
    assert simulation.auto.plan([chunk], [8], 64) == [0] and simulation.auto.draft([chunk], [8], 64) == [NO_DRAFT]


def test_what_has_not_paid_rests_longer_each_time_and_is_forgiven() -> None:
    worth, now, rests = Worth(), 0, []
    for gain_s in (0.1, -0.1, -0.1, 0.1, -0.1):
        for _ in range(WINDOW):
            assert worth.may("a", now) and worth.may("b", now)
            worth.note("a", now, 1.0, gain_s)
        begun = now
        while not worth.may("a", now):
            now += 1
        rests.append(now - begun)
    assert rests == [0, FIRST_REST, 2 * FIRST_REST, 0, FIRST_REST]
