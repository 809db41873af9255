"""All controls of sampling hold for drafts too: what a control forbids is never taken because it was guessed."""

from __future__ import annotations

from typing import Any

import pytest

from services.gpu_worker.speculative.draft import chain
from tests.gpu_worker.any_engine import AnyEngine, load_native, load_torch
from tests.gpu_worker.guesses import Guess, run_with_drafts
from tests.gpu_worker.tiny_models import Runner, ids_of, save

NUM_OUTPUT = 24
PROMPT = [5, 17, 3, 29, 5, 17, 3, 41]


@pytest.fixture(scope="module", params=[load_torch, load_native])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AnyEngine:
    folder = tmp_path_factory.mktemp("model")
    save("llama", folder)
    loaded: AnyEngine = request.param(folder, kv_cache_bytes=4 << 20)
    return loaded


def without(engine: AnyEngine, **params: Any) -> list[int]:
    runner = Runner(engine)
    return ids_of(runner.run([runner.sequence(PROMPT, NUM_OUTPUT, **params)]))[0]


def with_drafts(engine: AnyEngine, guess: Guess, **params: Any) -> list[int]:
    runner = Runner(engine)
    results, _ = run_with_drafts(runner, [runner.sequence(PROMPT, NUM_OUTPUT, **params)], guess, prefill_chunk=512)
    return ids_of(results)[0]


def always(*ids: int) -> Guess:
    return lambda seq, most: chain([ids[i % len(ids)] for i in range(most)])


def what_comes(ids: list[int]) -> Guess:
    return lambda seq, most: chain(ids[seq.num_output_tokens :][:most])


def test_speculative_decoding_a_forbidden_token_is_not_taken(engine: AnyEngine) -> None:
    unbound = without(engine)
    for forbidden in set(unbound[:4]):
        bias = {forbidden: -100.0}
        for guess in (always(forbidden), what_comes(unbound)):
            got = with_drafts(engine, guess, logit_bias=bias)
            assert forbidden not in got and got == without(engine, logit_bias=bias)


def test_speculative_decoding_min_p_leaves_the_likeliest(engine: AnyEngine) -> None:
    drawn = without(engine, temperature=1.0, seed=7)
    assert drawn != without(engine)
    for guess in (what_comes(drawn), what_comes(without(engine))):
        assert with_drafts(engine, guess, temperature=1.0, seed=7, min_p=0.99) == without(engine)


def test_speculative_decoding_penalties_see_what_was_taken_in_the_same_step(engine: AnyEngine) -> None:
    penalties: dict[str, Any] = {"presence_penalty": 2.0, "frequency_penalty": 1.0, "repetition_penalty": 1.5}
    want = without(engine, **penalties)
    assert want != without(engine)
    for guess in (always(want[0]), what_comes(want), what_comes(without(engine))):
        assert with_drafts(engine, guess, **penalties) == want


def test_speculative_decoding_a_stop_token_waits_for_min_tokens(engine: AnyEngine) -> None:
    unbound = without(engine)
    ends: dict[str, Any] = {"min_tokens": 10, "stop_token_ids": (unbound[0], unbound[1])}
    for guess in (always(*unbound[:2]), what_comes(unbound)):
        got = with_drafts(engine, guess, **ends)
        assert not set(got[:10]) & set(unbound[:2]) and got == without(engine, **ends)
