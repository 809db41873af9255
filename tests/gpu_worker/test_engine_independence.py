"""P2: one request, one answer. Tokens and log-probabilities by bits, alone, batched, chunked, from hits, on threads.

The tiny models' sizes (odd multiples of vector widths, several query heads a KV head) are as good at showing a
dependence as large ones; `test_default_model.py` repeats the main cases on a real model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.gpu_worker.batch import Chunk, SampledToken, Sequence
from tests.gpu_worker.any_engine import AnyEngine, engine_threads, load_native, load_torch
from tests.gpu_worker.gguf_files import write_gguf
from tests.gpu_worker.tiny_models import Runner, build, prompts, save

NUM_OUTPUT = 8
CONTROLS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "seed": 7, "logprobs": 2},
    {"temperature": 0.8, "seed": 8, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.2, "seed": 9, "min_p": 0.02, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
]
SIZES = {"vocab_size": 1031, "hidden_size": 96, "intermediate_size": 200}


@dataclass(frozen=True)
class Case:
    """A model and an engine for it."""

    load: Callable[..., AnyEngine]
    path: Path
    kv_cache_dtype: str = "auto"

    def engine(self, kv_cache_bytes: int) -> AnyEngine:
        return self.load(self.path, kv_cache_bytes=kv_cache_bytes, kv_cache_dtype=self.kv_cache_dtype)


@pytest.fixture(scope="module", params=["torch", "torch-int8", "native", "native-Q4_1", "native-Q8_0", "native-int8"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    kind, _, type_name = request.param.partition("-")
    folder: Path = tmp_path_factory.mktemp("model")
    load = load_torch if kind == "torch" else load_native
    if type_name in ("", "int8"):
        save("llama", folder, **SIZES)
        return Case(load, folder, type_name or "auto")
    write_gguf(build("llama", **SIZES | {"intermediate_size": 224}), folder / "model.gguf", type_name=type_name)
    return Case(load, folder / "model.gguf")


@pytest.fixture(scope="module")
def engine(case: Case) -> AnyEngine:
    return case.engine(32 << 20)


PROMPTS = prompts(33, seed=5, low=3, high=150, vocab_size=1031)


def sequences(runner: Runner, count: int) -> list[Sequence]:
    return [runner.sequence(p, NUM_OUTPUT, i % 3, **CONTROLS[i % 4]) for i, p in enumerate(PROMPTS[:count])]


@pytest.fixture(scope="module")
def alone(engine: AnyEngine) -> list[list[SampledToken]]:
    """Every request by itself, its prompt in one piece, on one thread."""
    with engine_threads(engine, 1):
        results = []
        for i in range(len(PROMPTS)):
            runner = Runner(engine, seed=i)
            results += runner.run([sequences(runner, i + 1)[i]])
    assert len({tuple(t.token_id for t in tokens) for tokens in results}) == len(PROMPTS)
    return results


@pytest.mark.parametrize(("batch", "threads"), [(2, 1), (3, 2), (5, 1), (16, 1), (16, 2), (33, 2)])
def test_batches(engine: AnyEngine, alone: list[list[SampledToken]], batch: int, threads: int) -> None:
    with engine_threads(engine, threads):
        runner = Runner(engine, seed=batch)
        assert runner.run(sequences(runner, batch)) == alone[:batch]


@pytest.mark.parametrize(("prefill_chunk", "threads"), [(1, 1), (16, 2), (17, 3), (64, 1), (64, 2), (512, 2), (512, 3)])
def test_prefill_chunks(engine: AnyEngine, alone: list[list[SampledToken]], prefill_chunk: int, threads: int) -> None:
    """Chunks of different sequences share steps with each other and with decoding rows."""
    with engine_threads(engine, threads):
        runner = Runner(engine, seed=prefill_chunk)
        assert runner.run(sequences(runner, 6), prefill_chunk) == alone[:6]


def test_after_a_cache_hit(engine: AnyEngine, alone: list[list[SampledToken]]) -> None:
    """A sequence that finds its prompt's whole blocks written by another one, which ran in another company."""
    with engine_threads(engine, 2):
        runner = Runner(engine)
        first = sequences(runner, 5)
        runner.run(first, prefill_chunk=24)
        for i, other in enumerate(first):
            cached = (other.num_prompt_tokens - 1) // 16 * 16
            again = runner.sequence(PROMPTS[i], NUM_OUTPUT, i % 3, **CONTROLS[i % 4])
            again.block_ids[: cached // 16] = other.block_ids[: cached // 16]
            again.num_computed = cached
            assert runner.run([again]) == [alone[i]]


def test_resumed_elsewhere(case: Case, alone: list[list[SampledToken]]) -> None:
    """Prompt and half of the output recomputed by another engine, as after a move to another worker."""
    elsewhere = case.engine(8 << 20)
    with engine_threads(elsewhere, 1):
        runner = Runner(elsewhere)
        for i in range(4):
            moved = sequences(runner, 4)[i]
            moved.token_ids += [t.token_id for t in alone[i][:4]]
            assert runner.run([moved], prefill_chunk=50) == [alone[i][4:]]


def test_joining_and_leaving(engine: AnyEngine, alone: list[list[SampledToken]]) -> None:
    """Company that changes at every step."""
    with engine_threads(engine, 2):
        runner = Runner(engine)
        all_of_them = sequences(runner, 6)
        results: list[list[SampledToken]] = [[] for _ in all_of_them]
        step = 0
        while any(len(r) < NUM_OUTPUT for r in results):
            now = [i for i in range(6) if len(results[i]) < NUM_OUTPUT and (step + i) % (i + 2) != 0]
            chunks = []
            for i in now:
                s = all_of_them[i]
                left = len(s.token_ids) - s.num_computed
                count = min(left, 5 + 7 * ((step + i) % 4))
                chunks.append(Chunk(s, s.num_computed, count, sample=count == left))
            for i, tokens in zip(now, runner.step(chunks), strict=True):
                results[i] += tokens
            step += 1
        assert results == alone[:6]


@pytest.mark.parametrize("settings", [{"block_size": 8}, {"block_size": 64}, {"kv_cache_dtype": "float16"}], ids=str)
def test_other_pools(case: Case, settings: dict[str, Any]) -> None:
    check_independence(case.load(case.path, kv_cache_bytes=16 << 20, **settings))


@pytest.mark.parametrize("name", ["llama-biases", "qwen2", "qwen3"])
@pytest.mark.parametrize("load", [load_torch, load_native])
def test_other_architectures(tmp_path: Path, name: str, load: Callable[..., AnyEngine]) -> None:
    save(name, tmp_path, vocab_size=1031)
    check_independence(load(tmp_path, kv_cache_bytes=16 << 20))


def check_independence(engine: AnyEngine) -> None:
    with engine_threads(engine, 2):
        together = Runner(engine, 1)
        batched = together.run(sequences(together, 5), prefill_chunk=19)
    with engine_threads(engine, 1):
        single = Runner(engine, 2)
        assert batched == [single.run([s])[0] for s in sequences(single, 5)]
