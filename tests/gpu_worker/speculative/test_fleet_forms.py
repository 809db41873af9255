"""Answers that have a form in common, and values that are new each time: how many steps they take, and how long."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from services.cache_store.fleet_learner import FleetLearner
from services.gpu_worker.batch import Chunk, SampledToken, Sequence
from services.gpu_worker.speculative.fleet import Fleet, FleetProposer
from services.gpu_worker.speculative.row_cost import RowCost
from services.gpu_worker.speculative.speculator import Speculator
from shared import suffix_table
from shared.speculative_config import SpeculativeConfig
from shared.suffix_table import SuffixTable, place_of
from tests.gpu_worker.builders import make_params

NUM_TAUGHT = 10
MOST = 16
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]  # its end, which is that of every chat
STEP_S = 0.005
ROW_S = 0.15 * STEP_S
TENANT, NOBODY = b"a" * 32, b"b" * 32

Words = Callable[[], str]


def json_form(word: Words) -> str:
    keys = ("first_name", "last_name", "age", "city", "profession", "country")
    return "{\n" + ",\n".join(f'  "{key}": "{word()}"' for key in keys) + "\n}"


def yaml_config(word: Words) -> str:
    return (
        f"service:\n  name: {word()}-{word()}\n  image: {word()}/{word()}\n  network:\n    host: {word()}.net\n"
        f"    port: {word()}\n    protocol: http\n  resources:\n    memory: {word()} Gi\n  owner: {word()} {word()}\n"
    )


def letter_with_table(word: Words) -> str:
    rows = "".join(f"| {word()} chairs | {word()} | $ {word()} |\n" for _ in range(3))
    return (
        f"Dear {word()} {word()},\n\nThank you for your order. We deliver it to {word()} within {word()} days.\n\n"
        f"| Item | Quantity | Price |\n|---|---|---|\n{rows}\nKind regards,\nNorthwind Shop\n"
    )


def log_lines(word: Words) -> str:
    say = ("service started", "user logged in from {}", "order {} was stored", "mail was sent to {}", "service stopped")
    return "".join(f"{word()}:{word()} INFO [{word()}] {line.format(word())}\n" for line in say)


KINDS = [json_form, yaml_config, letter_with_table, log_lines]


class Writer:
    """Writes answers of words that occur once each, and reads them as tokens."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._num_words = 0

    def word(self) -> str:
        self._num_words += 1
        return f"value{self._num_words}"

    def answer(self, kind: Callable[[Words], str]) -> list[int]:
        tokens = re.findall(r"\w+|\n *|[^\w\s]+| ", kind(self.word))
        return [self._ids.setdefault(token, 100 + len(self._ids)) for token in tokens]


def taught(answers: list[list[int]]) -> list[int]:
    learner = FleetLearner()
    for answer in answers:
        learner.learn(answer, place_of(PROMPT), len(PROMPT))
    return list(learner.changes_since(0, 1 << 20)[0])


def num_steps(table: SuffixTable, answer: list[int]) -> int:
    proposer, at, count = FleetProposer(lambda: table), 0, 0
    for token_id in PROMPT:
        proposer.append(token_id)
    while at < len(answer):
        drafts = proposer.propose(MOST).ids
        end = at
        while end < len(answer) and end - at < len(drafts) and drafts[end - at] == answer[end]:
            end += 1
        for token_id in answer[at : end + 1]:
            proposer.propose(1)
            proposer.append(token_id)
        at, count = end + 1, count + 1
    return count


@pytest.mark.parametrize("kind", KINDS)
def test_behind_a_new_value_the_form_goes_on_at_once(
    kind: Callable[[Words], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step for each value and one for what ends it, and few more."""
    writer, counts = Writer(), list[int]()
    answers = [writer.answer(kind) for _ in range(NUM_TAUGHT)]
    before = writer._num_words
    answer = writer.answer(kind)
    num_values = writer._num_words - before
    for settled in (suffix_table.SETTLED, 0):
        monkeypatch.setattr(suffix_table, "SETTLED", settled)
        table = SuffixTable()
        table.put(taught(answers))
        counts.append(num_steps(table, answer))
    with_frames, without = counts
    assert with_frames <= 2 * num_values + 12 and with_frames < 0.85 * without, (counts, num_values, len(answer))


def seconds(speculator: Speculator, answer: list[int], number: int, salt: bytes) -> float:
    """Alone on a worker whose steps cost so much a row."""
    seq = Sequence(
        sid=f"r{number}.0", epoch=1, choice=0, params=make_params(max_tokens=len(answer)),
        num_prompt_tokens=len(PROMPT), token_ids=[*PROMPT], block_ids=[], salt=salt,
    )  # fmt: skip
    sum_s, at = 0.0, 0
    while at < len(answer):
        chunk = Chunk(seq, len(seq.token_ids) - 1, 1, True)
        (drafts,) = speculator.draft([chunk], [MOST], 64)
        end = at
        while end < len(answer) - 1 and end - at < len(drafts) and drafts.ids[end - at] == answer[end]:
            end += 1
        step_s = STEP_S + ROW_S * len(drafts)
        seq.token_ids += answer[at : end + 1]
        drawn = tuple(map(SampledToken, answer[at : end + 1]))
        speculator.observe([replace(chunk, draft=drafts)], [drawn], step_s)
        sum_s, at = sum_s + step_s, end + 1
    speculator.forget(seq)
    return sum_s


def speculator_with(words: list[int]) -> Speculator:
    fleet, cost = Fleet(50_000), RowCost()
    fleet.put(fleet.tenant_of(TENANT), words)
    for num_rows in range(1, MOST + 2):
        cost.observe(num_rows, STEP_S + ROW_S * (num_rows - 1))
    return Speculator(SpeculativeConfig(method="suffix"), cost, fleet=fleet)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tenant_whose_answers_have_a_form_gains_and_others_do_not(kind: Callable[[Words], str]) -> None:
    writer = Writer()
    speculator = speculator_with(taught([writer.answer(kind) for _ in range(NUM_TAUGHT)]))
    cold = warm = 0.0
    for number in range(6):
        answer = writer.answer(kind)
        cold += seconds(speculator, answer, 2 * number, NOBODY)
        warm += seconds(speculator, answer, 2 * number + 1, TENANT)
    assert warm < cold / 1.3


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_known_of_a_form_costs_other_answers_nothing(kind: Callable[[Words], str]) -> None:
    """Of the same tokens, in any order: what statistics of a form say of them is nearly always wrong."""
    writer, rng = Writer(), random.Random(3)
    speculator = speculator_with(taught([writer.answer(kind) for _ in range(NUM_TAUGHT)]))
    cold = warm = 0.0
    for number in range(10):
        answer = writer.answer(kind) * 2
        rng.shuffle(answer)
        cold += seconds(speculator, answer, 2 * number, NOBODY)
        warm += seconds(speculator, answer, 2 * number + 1, TENANT)
    assert warm < 1.02 * cold
