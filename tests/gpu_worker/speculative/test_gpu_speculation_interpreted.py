"""Who guesses on a GPU, with every kernel in Triton's interpreter: tokens are those without, whatever is guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from services.gpu_worker.batch import Chunk, Engine
from services.gpu_worker.composer import Budget
from services.gpu_worker.cuda_graphs import RECORDED_AFTER
from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.gpu_engine import GpuEngine
from services.gpu_worker.heads_loading import Heads
from services.gpu_worker.running_set import RunningSet
from services.gpu_worker.sampler import validate
from services.gpu_worker.speculative.batch_proposer import BatchProposer
from services.gpu_worker.speculative.counts import Counts
from services.gpu_worker.speculative.draft import chain
from services.gpu_worker.speculative.draft_model import DraftModel
from services.gpu_worker.speculative.model_speculator import ModelSpeculator
from shared.protocol import TokenChunk
from shared.speculative_config import SpeculativeConfig
from tests.gpu_worker.any_engine import load_gpu
from tests.gpu_worker.engine_loops import run_joining, told_of
from tests.gpu_worker.head_models import published, published_medusa
from tests.gpu_worker.test_cuda_graphs import Rerun
from tests.gpu_worker.tiny_models import Runner, prompts, save
from tests.interpreter import import_triton, interpret

import_triton()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),  # numpy's, of words that shall wrap
]
CONFIG = SpeculativeConfig(method="draft_model", model="x", num_speculative_tokens=2)
SMALL = {"num_hidden_layers": 1, "vocab_size": 64}
TINY = {"num_hidden_layers": 3, "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
        "num_attention_heads": 4, "head_dim": 16}  # fmt: skip
PARAMS: list[dict[str, Any]] = [
    {}, {"temperature": 1.2, "seed": 7, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 1},
]  # fmt: skip
NUM_OUTPUT = 6


def run(engine: Engine, proposer: BatchProposer | None, numbers: list[int]) -> tuple[list[TokenChunk], Counts, int]:
    """The texts with these numbers together; no time passes, so as much is guessed as may be. And how many steps."""
    drafter = ModelSpeculator(CONFIG, proposer, lambda: 0.0) if proposer else None
    loop = EngineLoop(engine, RunningSet(engine.info, Budget(64, 48, 16), validate, drafter), overlap=False,
                      clock=lambda: 0.0)  # fmt: skip
    texts = prompts(len(PARAMS), seed=4, low=5, high=12, vocab_size=SMALL["vocab_size"])
    blocks = [range(8 * n, 8 * n + 8) for n in numbers]
    run_joining(loop, [texts[n] for n in numbers], [PARAMS[n] for n in numbers], blocks, NUM_OUTPUT)
    if drafter is not None:
        assert drafter._num_failures == 0
    counts = drafter.counts[CONFIG.method] if drafter else Counts()
    return told_of(loop.running, len(numbers)), counts, loop.num_steps


def check(engine: GpuEngine, proposer: BatchProposer) -> Counts:
    """Of one alone, without guesses, and of two together, with them."""
    want, _, _ = run(engine, None, [1])
    got, counts, _ = run(engine, proposer, [0, 1])
    assert got[1].ids == want[0].ids and counts.num_draft_tokens >= 4
    return counts


@pytest.mark.parametrize("seed", [0, 5], ids=["right", "wrong"])
def test_a_draft_models_guesses_change_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    save("llama", tmp_path / "target", **SMALL)
    save("llama", tmp_path / "draft", seed=seed, **SMALL)
    interpret(monkeypatch)
    engine = load_gpu(tmp_path / "target", kv_cache_bytes=1 << 20, block_size=8)
    draft = load_gpu(tmp_path / "draft", block_size=8, num_blocks=engine.info.num_blocks)
    counts = check(engine, DraftModel(draft, clock=lambda: 0.0))
    if seed == 0:
        assert counts.accepted.total() >= counts.num_draft_tokens - 2, "but for those behind an end"
    else:
        assert counts.accepted.total() < counts.num_draft_tokens


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_heads_guess_with_kernels_what_they_guess_with_specifications(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Literal["eagle3", "medusa"]
) -> None:
    save("llama", tmp_path / "model", **TINY)
    if kind == "medusa":
        published_medusa(tmp_path / "model", tmp_path / "head", 2, 1)
    else:
        published(kind, tmp_path / "model", tmp_path / "head")
    engine = load_gpu(tmp_path / "model", kv_cache_bytes=1 << 20, block_size=8)
    proposer = Heads(tmp_path / "head", kind, tmp_path / "model", 8).load(engine)
    proposer._clock = lambda: 0.0
    want, found, _ = run(engine, proposer, [0, 1])
    interpret(monkeypatch)
    got, counts, _ = run(engine, proposer, [0, 1])
    assert [c.ids for c in got] == [c.ids for c in want]
    assert (counts.num_draft_tokens, counts.accepted) == (found.num_draft_tokens, found.accepted)
    assert counts.num_draft_tokens >= 4


def test_rows_that_fill_a_graph_up_change_none_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the tiles of sequences with fewer drafts than there is room for."""
    save("llama", tmp_path, **SMALL)
    interpret(monkeypatch)
    rerun = Rerun()
    engine = load_gpu(tmp_path, kv_cache_bytes=1 << 20, block_size=8, recorder=rerun)
    runner = Runner(engine)
    sequences = [runner.sequence(text, 4, logprobs=1) for text in prompts(2, low=5, high=9, vocab_size=64)]
    runner.step([Chunk(s, 0, len(s.token_ids), True) for s in sequences])
    drafts = [chain([1, 2]), chain([])]
    chunks = [Chunk(s, s.num_computed, 1, True, d) for s, d in zip(sequences, drafts, strict=True)]
    runs = [engine.step(chunks) for _ in range(RECORDED_AFTER + 1)]
    assert rerun.num_replays == 1
    for first, last in zip(runs[0], runs[-1], strict=True):
        assert [t.token_id for t in first] == [t.token_id for t in last]
        assert [t.logprob for t in last] == pytest.approx([t.logprob for t in first], abs=1e-5)
