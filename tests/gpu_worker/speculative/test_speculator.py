"""Control over whole answers, simulated: text is given, steps cost what a function of their rows says."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from services.gpu_worker.batch import Chunk, SampledToken, Sequence
from services.gpu_worker.speculative import guided
from services.gpu_worker.speculative import speculator as speculator_module
from services.gpu_worker.speculative.draft import NO_DRAFT, chain
from services.gpu_worker.speculative.proposer import Proposal
from services.gpu_worker.speculative.row_cost import KEPT_STEPS, RowCost
from services.gpu_worker.speculative.speculator import READ_TOKENS, Offer, Speculator
from shared.speculative_config import SpeculativeConfig
from tests.gpu_worker.builders import make_params

SUFFIX = SpeculativeConfig(method="suffix", num_speculative_tokens=16)
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=16)


def few_rows_are_cheap(num_rows: int) -> float:
    """As of a decoder on a CPU: the first rows share the reading of weights, further ones are computed."""
    return 0.006 * (1.0 if num_rows <= 1 else 1.0 + 0.25 * (num_rows - 1))


def rows_are_nearly_free(num_rows: int) -> float:
    """As of a GPU, or of few rows whose weights are large."""
    return 0.006 * (1.0 + 0.02 * (num_rows - 1))


def rows_of_power(power: float, num_rows: int) -> float:
    return 0.006 * num_rows**power


def make_sequence(prompt: list[int], number: int = 0, **params: object) -> Sequence:
    return Sequence(
        sid=f"r{number}.0", epoch=1, choice=0, params=make_params(max_tokens=10_000, **params),
        num_prompt_tokens=len(prompt), token_ids=list(prompt), block_ids=[], num_computed=len(prompt) - 1,
    )  # fmt: skip


class Simulation:
    """What each sequence draws is known; it only takes more or fewer steps."""

    def __init__(self, speculator: Speculator, seconds: Callable[[int], float] = few_rows_are_cheap) -> None:
        self.speculator = speculator
        self.seconds = seconds
        self.wall_s = 0.0
        self.num_steps = 0
        self.num_draft_rows = 0

    def run(self, sequences: list[Sequence], answers: list[list[int]]) -> float:
        """Until all have drawn their answers; tokens a second, against those without drafts."""
        left = {id(s): list(answer) for s, answer in zip(sequences, answers, strict=True)}
        without_s = 0.0
        for n in range(max(map(len, answers))):
            without_s += self.seconds(sum(len(answer) > n for answer in answers))
        before_s = self.wall_s
        while unfinished := [s for s in sequences if left[id(s)]]:
            self.step([Chunk(s, len(s.token_ids) - 1, 1, True) for s in unfinished], left)
        for seq in sequences:
            self.speculator.forget(seq)
        return without_s / (self.wall_s - before_s)

    def step(self, chunks: list[Chunk], left: dict[int, list[int]]) -> None:
        most = [len(left[id(c.seq)]) - 1 for c in chunks]
        drafts = self.speculator.draft(chunks, most, 256)
        chunks = [replace(c, draft=draft) for c, draft in zip(chunks, drafts, strict=True)]
        drawn = []
        for chunk in chunks:
            own, count = left[id(chunk.seq)], 1
            while count <= len(chunk.draft.ids) and chunk.draft.ids[count - 1] == own[count - 1]:
                count += 1
            drawn.append(own[:count])
            del own[:count]
        num_rows = sum(c.num_rows for c in chunks)
        self.num_draft_rows += num_rows - len(chunks)
        self.num_steps += 1
        self.wall_s += self.seconds(num_rows)
        self.speculator.observe(chunks, [tuple(map(SampledToken, ids)) for ids in drawn], self.seconds(num_rows))
        for chunk, ids in zip(chunks, drawn, strict=True):
            chunk.seq.token_ids += ids


def words(rng: random.Random, count: int, vocabulary: int = 20_000) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(count)]


def test_who_copies_does_not_nap_over_the_end_of_anothers_prompt() -> None:
    """Beside which a step has no room for guesses, whatever they are worth."""
    cost, rng = RowCost(), random.Random(1)
    for num_rows in (1, 2, 4, 8, 16):
        cost.observe(num_rows, rows_are_nearly_free(num_rows))
    simulation = Simulation(Speculator(SUFFIX, cost, max_step_s=rows_are_nearly_free(256)), rows_are_nearly_free)
    text = words(rng, 2000)
    copying, other = make_sequence(text), make_sequence(words(rng, 20_000), 1)
    left = {id(copying): list(text), id(other): [1]}
    own = Chunk(copying, len(text) - 1, 1, True)
    for n in range(61):
        own = replace(own, start=len(copying.token_ids) - 1)
        simulation.step([own] if n < 10 else [own, Chunk(other, n * 255, 255, False)], left)
    before = simulation.num_draft_rows
    simulation.step([replace(own, start=len(copying.token_ids) - 1)], left)
    assert simulation.num_draft_rows > before


def test_guesses_that_are_not_worth_their_rows_let_a_sequence_nap(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be if all of them were right."""
    cost = RowCost()
    for num_rows in (1, 2, 4):
        cost.observe(num_rows, few_rows_are_cheap(num_rows) * num_rows**0.5)
    speculator, seq = Speculator(SUFFIX, cost), make_sequence([1] * 50)
    monkeypatch.setattr(speculator, "_propose", lambda seq, most: (Proposal((1,), (1,)), [0.3]))
    for _ in range(3):
        assert speculator.draft([Chunk(seq, 49, 1, True)], [8], 64) == [NO_DRAFT]
    assert speculator._guided[seq.sid].num_idle == 3


def test_what_was_offered_for_a_step_that_never_came_is_forgotten() -> None:
    speculator, text = Speculator(SUFFIX), [*range(20), *range(20)]
    seq, next_one = make_sequence(text), make_sequence(text)
    chunk = Chunk(seq, 39, 1, True)
    assert speculator.offers([chunk], [8], 64)
    speculator.offers([chunk], [0], 64)
    speculator.forget(seq)
    offer: Offer = (Proposal((1,), (1,)), [0.9])
    speculator.chosen([replace(chunk, seq=next_one)], {seq.sid: offer}, 64)
    assert speculator._guided[seq.sid].num_idle == 0


@pytest.mark.parametrize("config", [SUFFIX, NGRAM], ids=["suffix", "ngram"])
def test_a_copy_is_drafted_long(config: SpeculativeConfig) -> None:
    simulation, rng = Simulation(Speculator(config)), random.Random(1)
    ratios = []
    for number in range(4):
        text = words(rng, 300)
        ratios.append(simulation.run([make_sequence(text, number)], [text]))
    assert ratios[0] > 2.0 and ratios[-1] > 2.7
    assert simulation.num_draft_rows / simulation.num_steps > 8


@pytest.mark.parametrize("config", [SUFFIX, NGRAM], ids=["suffix", "ngram"])
@pytest.mark.parametrize("num_sequences", [1, 16])
def test_text_that_repeats_by_chance_alone_costs_next_to_nothing(config: SpeculativeConfig, num_sequences: int) -> None:
    """So few words that matches of one or two are everywhere, and never right more often than chance."""
    simulation, rng = Simulation(Speculator(config)), random.Random(2)
    sequences = [make_sequence(words(rng, 200, 60), n) for n in range(num_sequences)]
    ratio = simulation.run(sequences, [words(rng, 800, 60) for _ in sequences])
    assert ratio > 0.98
    assert simulation.num_draft_rows / simulation.num_steps < 0.1 * num_sequences


def test_text_of_which_little_is_guessed_is_read_in_pieces_until_it_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at it is paid for; what is worth guessing is missed for a few tokens only."""
    reads: list[int] = []
    read = guided.Guided.read

    def counted(own: Any, most: int) -> int:
        reads.append(read(own, most))
        return reads[-1]

    monkeypatch.setattr(guided.Guided, "read", counted)
    simulation, rng = Simulation(Speculator(SUFFIX)), random.Random(3)
    seq, new = make_sequence(words(rng, 150)), words(rng, 400)
    simulation.run([seq], [new])
    assert len(reads) < 60 and max(reads[1:]) == guided.MAX_NAP_STEPS
    reads.clear()
    again = make_sequence([*words(rng, 5), *new])
    copied = [*words(rng, 100), *new]
    before = simulation.num_steps
    simulation.run([again], [copied])
    assert simulation.num_steps - before < 100 + 400 / 5


@pytest.mark.parametrize("num_sequences", [8, 16, 32])
def test_a_batch_in_which_rows_cost_what_they_are_is_not_drafted_for_at_a_loss(num_sequences: int) -> None:
    """Though its text often goes on for a few tokens as it did before."""
    simulation, rng = Simulation(Speculator(SUFFIX, known_cost())), random.Random(11)
    sequences = [make_sequence(words(rng, 150, 400), n) for n in range(num_sequences)]
    answers = []
    for seq in sequences:
        answer: list[int] = []
        while len(answer) < 400:
            at = rng.randrange(140)
            answer += seq.token_ids[at : at + 3] if rng.random() < 0.15 else words(rng, 1, 400)
        answers.append(answer[:400])
    assert simulation.run(sequences, answers) > 0.985


def test_where_rows_cost_as_much_as_steps_nothing_is_drafted_even_of_a_copy() -> None:
    """As of a batch that fills the machine; what rows cost is tried again now and then."""
    simulation = Simulation(Speculator(SUFFIX), lambda num_rows: 0.001 * num_rows**1.1)
    text = words(random.Random(3), 2000)
    ratio = simulation.run([make_sequence(text)], [text])
    assert ratio > 0.97 and 0 < simulation.num_draft_rows < 0.1 * simulation.num_steps


def test_a_machine_on_which_rows_have_become_dear_or_cheap_is_noticed() -> None:
    """Though not at once: that other steps are slower too is the likelier reason, and what drafts have cost where rows
    were dear is to be earned back first."""
    text = words(random.Random(4), 1500)
    simulation = Simulation(Speculator(SUFFIX))
    drafted = []
    for power, num_steps in ((0, 4), (1.4, 4), (0, 32)):
        seconds = partial(rows_of_power, power) if power else few_rows_are_cheap
        simulation.seconds, simulation.num_steps = seconds, 0
        while simulation.num_steps < num_steps * KEPT_STEPS:
            simulation.run([make_sequence(text)], [text])
        simulation.num_draft_rows = simulation.num_steps = 0
        simulation.run([make_sequence(text)], [text])
        drafted.append(simulation.num_draft_rows / simulation.num_steps)
    assert drafted[0] > 8 and drafted[1] < 1 and drafted[2] > 8


def test_in_a_batch_drafts_go_to_those_that_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation, rng = Simulation(Speculator(SUFFIX), rows_are_nearly_free), random.Random(5)
    text = words(rng, 400)
    sequences = [make_sequence(text, 0), *(make_sequence(words(rng, 400, 60), n) for n in range(1, 4))]
    answers = [list(text), *(words(rng, 400, 60) for _ in range(3))]
    drafted: dict[str, int] = {}
    observe = simulation.speculator.observe

    def count(chunks: list[Chunk], *args: Any) -> None:
        for chunk in chunks:
            drafted[chunk.seq.sid] = drafted.get(chunk.seq.sid, 0) + len(chunk.draft.ids)
        observe(chunks, *args)

    monkeypatch.setattr(simulation.speculator, "observe", count)
    simulation.run(sequences, answers)
    assert drafted["r0.0"] > 200 and drafted["r0.0"] > 2 * (sum(drafted.values()) - drafted["r0.0"])


@pytest.mark.parametrize("asked", [0, 2])
def test_a_request_can_only_lower_how_many(asked: int) -> None:
    speculator = Speculator(SpeculativeConfig(method="suffix", num_speculative_tokens=5))
    text = words(random.Random(6), 50)
    low, high = (
        make_sequence(text + text[:20], 0, num_speculative_tokens=asked),
        make_sequence(text + text[:20], 1, num_speculative_tokens=40),
    )
    drafts = speculator.draft([Chunk(s, 69, 1, True) for s in (low, high)], [30, 30], 100)
    assert [len(ids) for ids in drafts] == [asked, 5] and drafts[1] == chain(text[20:25])


def known_cost(seconds: Callable[[int], float] = few_rows_are_cheap) -> RowCost:
    cost = RowCost()
    for num_rows in (1, 2, 4, 8):
        cost.observe(num_rows, seconds(num_rows))
    return cost


@pytest.mark.parametrize(("seconds", "least"), [(few_rows_are_cheap, 0), (rows_are_nearly_free, 200)])
def test_who_has_no_drafts_waits_a_tenth_longer_at_most_for_one_who_copies(
    seconds: Callable[[int], float], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation, rng = Simulation(Speculator(SUFFIX, known_cost(seconds)), seconds), random.Random(15)
    text = words(rng, 400)
    sequences = [make_sequence(text, 0), *(make_sequence(words(rng, 50), n) for n in range(1, 4))]
    observe, drafted = simulation.speculator.observe, []

    def check(chunks: list[Chunk], *args: Any) -> None:
        drafted.append(len(chunks[0].draft))
        num_guided = sum(bool(c.draft) for c in chunks)
        if num_guided < len(chunks):
            most_s = (1 + 0.101 * num_guided) * seconds(len(chunks))
            assert seconds(sum(c.num_rows for c in chunks)) <= most_s
        observe(chunks, *args)

    monkeypatch.setattr(simulation.speculator, "observe", check)
    simulation.run(sequences, [text, *(words(rng, 400) for _ in range(3))])
    assert sum(drafted) >= least and (least or not sum(drafted))


@pytest.mark.parametrize(("max_step_s", "with_neighbour"), [(0.0061, 0), (0.0065, 3), (1.0, 5)])
def test_drafts_keep_a_step_of_others_within_its_time(max_step_s: float, with_neighbour: int) -> None:
    """Of those that are alone it is theirs."""
    speculator = Speculator(SUFFIX, known_cost(rows_are_nearly_free), max_step_s=max_step_s)
    text = words(random.Random(16), 60)
    copy, other = make_sequence(text + text[:30], 0), make_sequence(text, 1)
    chunks = [Chunk(copy, 89, 1, True), Chunk(other, 59, 1, True)]
    assert len(speculator.draft(chunks, [20, 20], 100)[0]) == with_neighbour
    assert len(speculator.draft(chunks[:1], [20], 100)[0]) > 5


def test_all_together_read_no_more_before_a_step_than_one() -> None:
    """And those first that have the least to read: who decodes does not wait for the prompts of others."""
    speculator = Speculator(SUFFIX)
    text = words(random.Random(7), READ_TOKENS // 2 + 1)
    sequences = [make_sequence(text, n) for n in range(3)] + [make_sequence(text[:50] + text[:20], 3)]
    chunks = [Chunk(s, len(s.token_ids) - 1, 1, True) for s in sequences]
    num_read = []
    for _ in range(4):
        drafts = speculator.draft(chunks, [8] * 4, 100)
        assert drafts[3] == chain(text[20:28])
        num_read.append(sum(g.num_read for g in speculator._guided.values()))
    assert max(b - a for a, b in zip([0, *num_read], num_read, strict=False)) <= READ_TOKENS
    assert num_read[-1] == 3 * len(text) + 70


def test_long_prompts_are_read_over_several_steps() -> None:
    speculator = Speculator(SUFFIX)
    text = words(random.Random(7), READ_TOKENS)
    seq = make_sequence(text + text[:20])
    chunk = Chunk(seq, len(seq.token_ids) - 1, 1, True)
    assert speculator.draft([chunk], [8], 100) == [NO_DRAFT]
    assert speculator.draft([chunk], [8], 100) == [chain(text[20:28])]


@pytest.mark.parametrize("config", [SUFFIX, NGRAM], ids=["suffix", "ngram"])
def test_a_prediction_is_drafted_from_the_first_token_on(config: SpeculativeConfig) -> None:
    rng = random.Random(9)
    answer = words(rng, 200)
    predicted = [*answer[:90], *words(rng, 3), *answer[92:]]
    ratios = []
    for number in range(3):
        seq = replace(make_sequence(words(rng, 50), number), prediction=tuple(predicted))
        assert Speculator(config).draft([Chunk(seq, 49, 1, True)], [4], 9) == [chain(answer[:4])]
        ratios.append(Simulation(Speculator(config)).run([seq], [answer]))
    assert min(ratios) > 1.8


def test_long_predictions_are_read_over_several_steps() -> None:
    speculator = Speculator(SUFFIX)
    predicted = words(random.Random(7), READ_TOKENS)
    seq = replace(make_sequence([1, 2, 3]), prediction=tuple(predicted))
    chunk = Chunk(seq, 2, 1, True)
    assert speculator.draft([chunk], [8], 100) == [NO_DRAFT]
    assert speculator.draft([chunk], [8], 100) == [chain(predicted[:8])]


def num_indexed(speculator: Speculator) -> list[int]:
    return [g.num_indexed for g in speculator._guided.values()]


def test_of_a_long_prompt_the_end_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculator_module, "MAX_INDEXED_TOKENS", 200)
    text = words(random.Random(12), 300)
    speculator = Speculator(SUFFIX)
    early, late = make_sequence(text + text[:20], 0), make_sequence(text + text[250:270], 1)
    chunks = [Chunk(seq, 319, 1, True) for seq in (early, late)]
    assert speculator.draft(chunks, [8, 8], 100) == [NO_DRAFT, chain(text[270:278])]
    assert num_indexed(speculator) == [100, 100]


def test_a_sequence_that_grows_too_long_gives_its_index_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculator_module, "MAX_INDEXED_TOKENS", 200)
    text = words(random.Random(13), 60)
    speculator = Speculator(SUFFIX)
    seq = make_sequence(text, 0)
    simulation = Simulation(speculator)
    left = {id(seq): 5 * text}
    while left[id(seq)]:
        simulation.step([Chunk(seq, len(seq.token_ids) - 1, 1, True)], left)
        assert num_indexed(speculator)[0] <= 200 and (len(seq.token_ids) < 230 or not num_indexed(speculator)[0])
    assert speculator.draft([Chunk(seq, 359, 1, True)], [8], 100) == [NO_DRAFT]


def test_where_all_together_are_too_long_the_longest_gives_its_index_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculator_module, "MAX_ALL_INDEXED_TOKENS", 1000)
    speculator, rng = Speculator(SUFFIX), random.Random(14)
    texts = [words(rng, size) for size in (100, 600, 200, 300)]
    chunks = [Chunk(make_sequence(t + t[:20], n), len(t) + 19, 1, True) for n, t in enumerate(texts)]
    drafts = speculator.draft(chunks, [4] * 4, 100)
    assert [bool(ids) for ids in drafts] == [True, False, True, True] and num_indexed(speculator) == [120, 0, 220, 320]


def test_what_is_expected_of_a_token_that_is_not_known() -> None:
    text = words(random.Random(8), 60)
    speculator = Speculator(SUFFIX, known_cost(rows_are_nearly_free))
    copy, other = make_sequence(text + text[:20], 0), make_sequence(text, 1)
    assert speculator.expects([copy], [9], 9)
    assert speculator.expects([other, copy], [9, 9], 9)
    assert not speculator.expects([copy], [0], 9) and not speculator.expects([copy], [9], 0)
    assert not speculator.expects([other], [9], 9)
    assert not speculator.expects([make_sequence(text + text[:20], 2, num_speculative_tokens=0)], [9], 9)


def test_of_nobody_nothing_is_expected() -> None:
    """As while a prompt is computed, or when the only one has left: what steps cost is known by then."""
    assert not Speculator(SUFFIX, known_cost()).expects([], [], 9)


def test_counts_by_position() -> None:
    speculator = Speculator(SUFFIX)
    seq = make_sequence([1, 2, 3])
    drafts = [[4, 5, 6], [4], [], [4, 5, 6], [4]]
    chunks = [Chunk(seq, 2, 1, True, chain(ids)) for ids in drafts]
    # of the last two, one ended with its first draft and the other had left
    drawn = [tuple(map(SampledToken, ids)) for ids in ((4, 5, 9), (4, 8), (4,), (4,), ())]
    speculator.observe(chunks, drawn, 0.01)
    counts = speculator.counts["suffix"]
    assert (counts.num_drafts, counts.num_draft_tokens, counts.accepted) == (4, 8, {0: 3, 1: 1})


def test_one_that_left_is_forgotten_and_a_new_life_begins_anew() -> None:
    speculator = Speculator(SUFFIX)
    old, new = make_sequence([1, 2, 3, 1, 2], 0), make_sequence([7, 8, 9, 7, 8], 0)
    assert speculator.draft([Chunk(old, 4, 1, True)], [1], 9) == [chain([3])]
    assert speculator.draft([Chunk(new, 4, 1, True)], [1], 9) == [chain([9])]  # the same name, another place
    speculator.forget(new)
    assert not speculator._guided
