"""Drafts change no token and no log-probability, whatever they are, on both engines."""

from __future__ import annotations

from typing import Any

import pytest

from services.gpu_worker.batch import AnswerFailed, Chunk, SampledToken, Sequence
from services.gpu_worker.grammar import GrammarError
from services.gpu_worker.speculative.draft import chain
from services.gpu_worker.speculative.verify import drawn_by_chunk, draws_of
from services.gpu_worker.step_inputs import SequenceError
from shared.protocol import Constraint
from tests.gpu_worker.any_engine import AnyEngine, engine_threads, load_native, load_torch
from tests.gpu_worker.builders import make_sequence
from tests.gpu_worker.guesses import CHAINS, run_in_batches
from tests.gpu_worker.test_grammar import begin, by_schema, ids
from tests.gpu_worker.tiny_models import Runner, prompts, save

NUM_OUTPUT = 12
VOCAB_SIZE = 1031
FEW = list(range(0, VOCAB_SIZE, 3))
CONTROLS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 7},
    {"temperature": 1.3, "seed": 8, "top_p": 0.9, "top_k": 40, "logprobs": 2},
    {"temperature": 1.3, "seed": 9, "min_p": 0.02, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.0, "logprobs": 2, "presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"temperature": 0.7, "seed": 1 << 40, "logit_bias": {5: 8.0, 6: 7.5, 7: -100.0}, "logprobs": 0},
    {"temperature": 0.0, "min_tokens": 5, "stop_token_ids": tuple(FEW[:128])},
    {"temperature": 1.0, "seed": 3, "min_tokens": 7, "stop_token_ids": tuple(FEW[-64:]), "top_p": 0.7},
]
PROMPTS = prompts(16, seed=5, low=3, high=60, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module", params=[load_torch, load_native])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AnyEngine:
    folder = tmp_path_factory.mktemp("model")
    save("llama", folder, vocab_size=VOCAB_SIZE, hidden_size=96, intermediate_size=200)
    loaded: AnyEngine = request.param(folder, kv_cache_bytes=16 << 20, block_size=8)
    return loaded


def sequences(runner: Runner) -> list[Sequence]:
    return [runner.sequence(p, NUM_OUTPUT, i % 3, **CONTROLS[i % 8]) for i, p in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def alone(engine: AnyEngine) -> list[list[SampledToken]]:
    """Every request by itself, token by token."""
    with engine_threads(engine, 1):
        runner = Runner(engine)
        results = [runner.run([s])[0] for s in sequences(runner)]
    assert len({tuple(t.token_id for t in tokens) for tokens in results}) == len(PROMPTS)
    return results


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("kind", CHAINS)
def test_tokens_are_those_without_drafts(
    engine: AnyEngine, alone: list[list[SampledToken]], kind: str, batch: int, threads: int
) -> None:
    with engine_threads(engine, threads):
        runner = Runner(engine, seed=batch)
        own = sequences(runner)
        guess = CHAINS[kind]({id(s): [t.token_id for t in w] for s, w in zip(own, alone, strict=True)}, VOCAB_SIZE)
        got, num_steps = run_in_batches(runner, own, guess, batch)
        assert got == alone
    if kind == "right":
        assert num_steps <= 0.4 * NUM_OUTPUT * len(own) / batch + 3 * len(own) / batch


def test_logits_that_are_not_finite_count_only_where_their_token_is_drawn() -> None:
    chunk = Chunk(make_sequence(4), 0, 4, True, chain([5, 6]))
    five, six = SampledToken(5), SampledToken(6)
    assert drawn_by_chunk([chunk], [0, 0, 0], [six, None, None]) == [(six,)]
    assert drawn_by_chunk([chunk], [0, 0, 0], [five, five, None]) == [(five, five)]
    for tokens in ([None, five, six], [five, None, six], [five, six, None]):
        with pytest.raises(SequenceError, match="not finite"):
            drawn_by_chunk([chunk], [0, 0, 0], tokens)


def test_drafts_do_not_move_the_answer_that_they_are_guesses_of() -> None:
    """What a grammar does on the way of a draft that is wrong, failing included, happens to a copy."""
    seq = make_sequence(4)
    answer = seq.answer = begin(by_schema({"enum": ["red", "rose"]}))
    letters = list(b'"rose"')
    chunk = Chunk(seq, 0, 4, True, chain([*letters[:3], 0]))
    draws = draws_of([chunk], [0] * 5)
    masks = [d.answer and ids(d.answer.mask_after(d.token_ids[4:])) for d in draws]
    assert masks == [[ord('"')], [ord("r")], [ord("e"), ord("o")], [ord("s")], None]
    assert draws[0].answer is answer and answer._ids == []


class FailsBehindAnything:
    def mask_after(self, output_ids: list[int]) -> bytes | None:
        if output_ids:
            raise GrammarError("the grammar is too complex")
        return None

    def allows(self, output_ids: list[int]) -> bool:
        return True

    def fork(self) -> FailsBehindAnything:
        return self


def test_a_grammar_that_fails_names_its_sequence(engine: AnyEngine) -> None:
    runner = Runner(engine)
    good, bad = (runner.sequence([1, 2, 3, n], 4, constraint=Constraint(grammar="g")) for n in range(2))
    bad.answer = FailsBehindAnything()  # type: ignore[assignment]
    with pytest.raises(AnswerFailed) as failed:
        engine.step([Chunk(good, 0, 4, True), Chunk(bad, 0, 4, True, chain([5]))])
    assert failed.value.sid == bad.sid
    assert all(engine.step([Chunk(good, 0, 4, True), Chunk(bad, 0, 4, True)]))


def test_drafts_that_cannot_be_are_refused(engine: AnyEngine) -> None:
    runner = Runner(engine)
    seq = runner.sequence([1, 2, 3, 4], 4)  # one block of eight slots
    for chunk, reason in (
        (Chunk(seq, 0, 3, True, chain([4])), "drafts after 3 of 4 tokens"),
        (Chunk(seq, 0, 4, False, chain([4])), "drafts after 4 of 4 tokens"),
        (Chunk(seq, 0, 4, True, chain([VOCAB_SIZE])), "outside the vocabulary"),
        (Chunk(seq, 0, 4, True, chain([1, 2, 3, 4, 5])), "9 tokens do not fit in 1 blocks"),
    ):
        with pytest.raises(SequenceError, match=reason):
            engine.step([chunk])
