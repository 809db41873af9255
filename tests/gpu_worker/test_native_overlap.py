"""The native engine in steps that overlap: the tokens are those of steps one by one, and drawn as torch draws them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.gpu_worker.batch import Chunk, SampledToken
from services.gpu_worker.native_engine import NativeEngine
from services.gpu_worker.native_inputs import build_native_inputs
from services.gpu_worker.sampler import sample
from services.gpu_worker.speculative.verify import draws_of
from services.gpu_worker.step_inputs import SequenceError
from tests.gpu_worker.any_engine import engine_threads, load_native
from tests.gpu_worker.engine_loops import run_loop
from tests.gpu_worker.tiny_models import Runner, build, prompts, save

NUM_TOKENS = 20
SICK = 298  # a token id that nobody draws here
# greedy, with noise, and with what only the host can do
IN_THE_STEP: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.3, "seed": 1 << 40}]
BY_THE_HOST: list[dict[str, Any]] = [{"temperature": 0.9, "top_p": 0.8}, {"repetition_penalty": 1.2}, {"logprobs": 2}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> NativeEngine:
    folder = tmp_path_factory.mktemp("model")
    save("llama", folder, vocab_size=9001)  # draws of several pieces, the last one short
    return load_native(folder, kv_cache_bytes=8 << 20)


@pytest.mark.parametrize("controls", [IN_THE_STEP, IN_THE_STEP + BY_THE_HOST], ids=["all in the step", "mixed"])
@pytest.mark.parametrize("threads", [1, 2])
def test_tokens_are_those_of_steps_one_by_one(
    engine: NativeEngine, controls: list[dict[str, Any]], threads: int
) -> None:
    texts = prompts(6, seed=5, vocab_size=9001)
    params = [controls[n % len(controls)] for n in range(6)]
    runner = Runner(engine)
    want = []
    for text, own in zip(texts, params, strict=True):
        (tokens,) = runner.run([runner.sequence(text, NUM_TOKENS, **own)])
        want.append([t.token_id for t in tokens])
    with engine_threads(engine, threads):
        assert (
            run_loop(engine, texts, params, NUM_TOKENS)
            == run_loop(engine, texts, params, NUM_TOKENS, overlap=False)
            == want
        )
    assert len({tuple(tokens) for tokens in want}) == 6


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 1.9])
def test_the_decoder_draws_what_torch_draws(engine: NativeEngine, temperature: float) -> None:
    runner = Runner(engine)
    sequences = [
        runner.sequence(text, 4, choice=n, temperature=temperature, seed=n << 33 | n)
        for n, text in enumerate(prompts(24, seed=2, vocab_size=9001))
    ]
    chunks = [Chunk(s, 0, len(s.token_ids), sample=True) for s in sequences]
    inputs = build_native_inputs(chunks, engine._geometry)
    logits, drawn = engine.decoder.forward(inputs)
    with torch.inference_mode():
        assert drawn == [t.token_id for t in sample(logits, draws_of(chunks, inputs.sample_chunks))]
    assert not inputs.host_samples and (temperature < 0.1 or drawn != logits.argmax(-1).tolist())


def test_a_token_that_no_step_in_flight_draws_is_refused(engine: NativeEngine) -> None:
    runner = Runner(engine)
    seq = runner.sequence([1, 2, 3], 3)
    with pytest.raises(SequenceError, match="tokens 3 to 4 of 3"):
        engine.begin([Chunk(seq, 3, 1, sample=True)])


def test_no_more_than_two_steps_are_under_way(engine: NativeEngine) -> None:
    """What they read and write is kept for so many."""
    runner = Runner(engine)
    seq = runner.sequence(list(range(60)), 3)
    chunks = [Chunk(seq, 0, 60, sample=True)]
    begun = []
    with pytest.raises(RuntimeError, match="two steps"):
        for _ in range(200):
            begun.append(engine.begin(chunks))
    assert begun[-2].results() == begun[-1].results() == engine.step(chunks)


def test_memory_that_cannot_be_had_for_logits_is_known_as_that(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only then are steps made smaller; torch raises something else."""
    seq = Runner(engine).sequence([1, 2, 3], 3)
    monkeypatch.setattr(engine.decoder, "_logits", torch.empty(0, 1 << 50))
    for start in (engine.begin, engine.step):
        with pytest.raises(MemoryError, match="memory"):
            start([Chunk(seq, 0, 3, sample=True)])


def test_a_decoder_ends_while_steps_are_under_way(tmp_path: Path) -> None:
    """The one that has begun ends before its memory goes; the one that waits is forgotten."""
    save("llama", tmp_path)
    engine = load_native(tmp_path, kv_cache_bytes=1 << 20)
    chunks = [Chunk(Runner(engine).sequence(list(range(60)), 3), 0, 60, sample=True)]
    first, second = engine.begin(chunks), engine.begin(chunks)
    first.wait_until_late()
    engine.decoder.set_num_threads(2)  # ends the runner and its pool
    want = engine.step(chunks)
    assert [(SampledToken(first.run.drawn[0]),)] == engine.begin(chunks).results() == want
    assert second.run.drawn[0] in (0, first.run.drawn[0])


def test_what_is_not_finite_ends_alone_also_in_overlapping_steps(tmp_path: Path) -> None:
    """The step after it has begun with a token that was never drawn."""
    model = build("llama")
    model.model.embed_tokens.weight.data[SICK] = torch.nan
    model.save_pretrained(tmp_path)
    engine = load_native(tmp_path, kv_cache_bytes=1 << 20)
    runner = Runner(engine)
    texts = prompts(3, seed=9, vocab_size=SICK)
    want = [[t.token_id for t in runner.run([runner.sequence(text, NUM_TOKENS)])[0]] for text in texts]
    got = run_loop(engine, [*texts, [3, SICK, 9]], [{}] * 4, NUM_TOKENS)
    assert got == [*want, []]
