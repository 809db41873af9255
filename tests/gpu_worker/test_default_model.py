"""The default model: llama.cpp's greedy tokens on the same weights, and P2 by bits at a real model's sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.gpu_worker.batch import SampledToken, Sequence
from shared.model_source import KNOWN, default_cache_dir
from tests.gpu_worker.any_engine import AnyEngine, engine_threads, load_native, load_torch
from tests.gpu_worker.tiny_models import Runner, prompts
from tests.kernels.native_libraries import ISAS, library_path

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

DATA = Path(__file__).parent / "data"
NUM_OUTPUT = 4
CONTROLS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7, "logprobs": 2},
    {"temperature": 0.8, "seed": 8, "top_p": 0.95, "repetition_penalty": 1.2},
]
PROMPTS = prompts(33, seed=3, low=5, high=70, vocab_size=49152)
LONG = prompts(1, seed=4, low=540, high=601, vocab_size=49152) + prompts(2, seed=5, low=20, high=90, vocab_size=49152)


def model_path() -> Path:
    """HEADRACE_TEST_MODEL, or where `headrace fetch` puts the default model; nothing is downloaded for a test."""
    if "HEADRACE_TEST_MODEL" in os.environ:
        return Path(os.environ["HEADRACE_TEST_MODEL"])
    name = KNOWN["smollm2-135m-instruct"].file_name
    peers = Path("~/.cache/peers/model").expanduser()
    found = next((d / name for d in (default_cache_dir(), peers) if (d / name).is_file()), None)
    if found is None:
        pytest.skip("the default model is not in the cache (headrace fetch)")
    return found


def test_weights_take_the_memory_of_their_file() -> None:
    """Of the whole engine with the heads that come along: what their tables and KV caches take is within the margin."""
    command = [sys.executable, "-m", "tests.gpu_worker.loaded_memory", model_path(), library_path(ISAS[0])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert 0.9 <= int(done.stdout) / model_path().stat().st_size <= 1.15


@pytest.fixture(scope="module", params=[load_torch, load_native])
def engine(request: pytest.FixtureRequest) -> AnyEngine:
    loaded: AnyEngine = request.param(model_path(), kv_cache_bytes=1 << 30)
    return loaded


@pytest.mark.parametrize("engine", [load_torch], indirect=True)
def test_greedy_tokens_are_llama_cpp_s(engine: AnyEngine) -> None:
    """Recorded on the file's weights in F32: llama.cpp rounds activations to 8 bits when it computes on Q4_1.

    Its ignore_eos bans the tokens that end a text (0 and 2), as min_tokens does here.
    """
    entries = json.loads((DATA / "llama_greedy_f32.json").read_text())
    assert len(entries) == 5
    runner = Runner(engine)
    answers = [runner.sequence(e["prompt_ids"], 64, stop_token_ids=(0, 2), min_tokens=64) for e in entries]
    runner.run(answers)
    for entry, sequence in zip(entries, answers, strict=True):
        assert sequence.token_ids[sequence.num_prompt_tokens :] == entry["output_ids"], entry["prompt"]


def sequences(runner: Runner, texts: list[list[int]]) -> list[Sequence]:
    return [runner.sequence(p, NUM_OUTPUT, i % 3, **CONTROLS[i % 4]) for i, p in enumerate(texts)]


def run(engine: AnyEngine, texts: list[list[int]], chunk: int, threads: int, seed: int) -> list[list[SampledToken]]:
    runner = Runner(engine, seed)
    with engine_threads(engine, threads):
        return runner.run(sequences(runner, texts), chunk)


@pytest.fixture(scope="module")
def alone(engine: AnyEngine) -> list[list[SampledToken]]:
    results = []
    with engine_threads(engine, 1):
        for i in range(len(PROMPTS)):
            runner = Runner(engine, seed=i)
            results += runner.run([sequences(runner, PROMPTS[: i + 1])[i]])
    return results


@pytest.mark.parametrize(("batch", "threads"), [(2, 1), (3, 2), (5, 1), (16, 2), (33, 2)])
def test_batches(engine: AnyEngine, alone: list[list[SampledToken]], batch: int, threads: int) -> None:
    assert run(engine, PROMPTS[:batch], 512, threads, batch) == alone[:batch]


def test_prefill_chunks(engine: AnyEngine) -> None:
    whole = run(engine, LONG, 1000, 1, 0)
    for chunk, threads in ((16, 2), (64, 1), (100, 2), (512, 2)):
        assert run(engine, LONG, chunk, threads, chunk) == whole, (chunk, threads)


def test_after_a_cache_hit(engine: AnyEngine) -> None:
    runner = Runner(engine)
    first = sequences(runner, LONG[:2])
    with engine_threads(engine, 2):
        want = runner.run(first, 64)
    for i, other in enumerate(first):
        cached = (other.num_prompt_tokens - 1) // 16 * 16
        again = runner.sequence(LONG[i], NUM_OUTPUT, i % 3, **CONTROLS[i % 4])
        again.block_ids[: cached // 16] = other.block_ids[: cached // 16]
        again.num_computed = cached
        with engine_threads(engine, 1):
            assert runner.run([again]) == [want[i]]
