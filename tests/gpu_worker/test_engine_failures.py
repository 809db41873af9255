"""A step of the real engine that fails and is run again in parts: the others' tokens are the same to the last one."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
import torch

from services.gpu_worker.batch import Chunk, Drawn
from services.gpu_worker.composer import Budget
from services.gpu_worker.engine import TorchEngine, memory_errors
from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.probe import measure
from services.gpu_worker.running_set import Change, RunningSet
from services.gpu_worker.sampler import validate
from shared.protocol import Outcome
from shared.wire import decode_as
from tests.gpu_worker.builders import make_admission, make_admit
from tests.gpu_worker.tiny_models import prompts, save

NUM_TOKENS = 24
NUM_SEQUENCES = 6
POISON = "r3.0"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save("llama", folder)
    return folder


class Failing:
    """The real engine, which fails in some steps: after everything was computed, so with all KV written."""

    def __init__(self, engine: TorchEngine) -> None:
        self.info = engine.info
        self.fails = False
        self.num_failed = 0
        self._num_steps = 0
        self._engine = engine

    def step(self, chunks: Seq[Chunk]) -> list[Drawn]:
        results = self._engine.step(chunks)
        self._num_steps += 1
        if not self.fails:
            return results
        self.num_failed += 1
        if any(c.seq.sid == POISON and c.seq.num_output_tokens >= 5 for c in chunks):
            raise RuntimeError("always with this one")
        if self._num_steps % 3 == 1 and len(chunks) > 1:
            raise RuntimeError("now and then")
        if self._num_steps in (3, 40) and len(chunks) > 1:
            raise MemoryError("twice")
        self.num_failed -= 1
        return results


def run(engine: Failing) -> tuple[dict[str, list[int]], dict[str, Outcome], RunningSet]:
    """All sequences to their end: their tokens, and how they ended."""
    running = RunningSet(engine.info, Budget(64, NUM_SEQUENCES, 64), validate)
    loop = EngineLoop(engine, running, cost=measure(engine))
    for number, prompt in enumerate(prompts(NUM_SEQUENCES, seed=3)):
        admit = make_admit(f"r{number}.0", block_ids=range(8 * number, 8 * number + 8))
        seeded = {"temperature": 0.9, "seed": number, "top_p": 0.9, "repetition_penalty": 1.1} if number % 2 else {}
        admission = make_admission(prompt, max_tokens=NUM_TOKENS, **seeded)
        loop.submit(Change("run", 1, admit, admission))
    while loop.step_once():
        pass
    accounts = running.ledger._accounts.values()
    tokens = {a.seq.sid: a.seq.token_ids[a.seq.num_prompt_tokens :] for a in accounts}
    ends = {e.sid: decode_as(Outcome, e.outcome) for e in running.ledger.build().entries if e.outcome}
    return tokens, ends, running


def test_tokens_after_steps_that_failed_are_those_of_steps_that_did_not(model: Path) -> None:
    expected, _, _ = run(Failing(TorchEngine.load(model, kv_cache_bytes=1 << 22, num_threads=1)))
    engine = Failing(TorchEngine.load(model, kv_cache_bytes=1 << 22, num_threads=1))
    engine.fails = True
    tokens, ends, running = run(engine)
    assert engine.num_failed > 15
    assert ends[POISON].code == "engine_error" and tokens[POISON] == expected[POISON][:5]
    for sid in expected.keys() - {POISON}:
        assert tokens[sid] == expected[sid] and ends[sid].reason == "length", sid
    sealed = {e.block_id for e in running.sealed.entries()}
    assert not sealed & set(range(24 + (len(prompts(NUM_SEQUENCES, seed=3)[3]) + 5) // 16, 32))


def test_memory_that_cannot_be_had_is_known_as_that() -> None:
    with pytest.raises(MemoryError, match="memory"), memory_errors():
        torch.empty(1 << 50)
    with pytest.raises(RuntimeError, match="shape"), memory_errors():
        torch.empty(3).view(2)


@pytest.mark.parametrize(
    "text",
    ["CUDA error: out of memory", "Triton Error [CUDA]: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when"],
)
def test_memory_that_a_gpus_libraries_cannot_have_is_known_as_that(text: str) -> None:
    with pytest.raises(MemoryError, match="CUDA"), memory_errors():
        raise RuntimeError(text)
