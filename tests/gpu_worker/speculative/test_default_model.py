"""Drafts change no token of the default model, on the native path, at a real model's sizes."""

from __future__ import annotations

from typing import Any

import pytest

from services.gpu_worker.batch import SampledToken, Sequence
from services.gpu_worker.native_engine import NativeEngine
from tests.gpu_worker.any_engine import engine_threads, load_native
from tests.gpu_worker.guesses import CHAINS, TREES, run_with_drafts
from tests.gpu_worker.test_default_model import model_path
from tests.gpu_worker.tiny_models import Runner, prompts

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

VOCAB_SIZE = 49152
GUESSES = CHAINS | TREES
CONTROLS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 7, "logprobs": 2},
    {"temperature": 1.3, "seed": 8, "top_p": 0.95, "repetition_penalty": 1.2},
    {"temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": 0.5, "min_tokens": 3, "stop_token_ids": (0, 2)},
    {"temperature": 1.3, "seed": 9, "top_k": 50, "min_p": 0.05, "logit_bias": {11: 4.0, 28: -2.0}},
]


@pytest.fixture(scope="module")
def engine() -> NativeEngine:
    return load_native(model_path(), kv_cache_bytes=1 << 30, block_size=8)


def check(engine: NativeEngine, num_prompts: int, num_output: int, kinds: list[str], batches: list[int]) -> None:
    texts = prompts(num_prompts, seed=3, low=20, high=60, vocab_size=VOCAB_SIZE)

    def sequences(runner: Runner) -> list[Sequence]:
        return [runner.sequence(p, num_output, i % 3, **CONTROLS[i % 5]) for i, p in enumerate(texts)]

    runner = Runner(engine)
    want: list[list[SampledToken]] = []
    for seq in sequences(runner):
        want += runner.run([seq])
    for kind in kinds:
        for batch in batches:
            runner = Runner(engine, seed=batch)
            own = sequences(runner)
            answers = {id(s): [t.token_id for t in w] for s, w in zip(own, want, strict=True)}
            guess = GUESSES[kind](answers, VOCAB_SIZE)
            for first in range(0, num_prompts, batch):
                got, _ = run_with_drafts(runner, own[first : first + batch], guess, prefill_chunk=33)
                assert got == want[first : first + batch], (kind, batch)


@pytest.mark.parametrize("kind", GUESSES)
def test_some_prompts(engine: NativeEngine, kind: str) -> None:
    with engine_threads(engine, 2):
        check(engine, 5, 8, [kind], [5])


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_200_prompts_alone_and_in_batches(engine: NativeEngine) -> None:
    with engine_threads(engine, 2):
        check(engine, 200, 16, list(GUESSES), [1, 16])
