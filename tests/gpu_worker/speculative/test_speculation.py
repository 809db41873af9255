"""Proposers, control, verification and the engines together: the text is that without speculation, in fewer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.gpu_worker.batch import Engine
from services.gpu_worker.composer import Budget
from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.metrics_defs import WorkerMetrics
from services.gpu_worker.running_set import RunningSet
from services.gpu_worker.sampler import validate
from services.gpu_worker.speculative.row_cost import RowCost
from services.gpu_worker.speculative.speculator import Speculator
from shared import scripted_vocab as vocab
from shared.protocol import TokenChunk
from shared.speculative_config import SpeculativeConfig
from tests.gpu_worker.any_engine import load_native, load_torch
from tests.gpu_worker.builders import make_engine, make_running
from tests.gpu_worker.engine_loops import FreeRows, run_joining, told_of
from tests.gpu_worker.overlapping_engine import OverlappingScripted
from tests.gpu_worker.tiny_models import prompts, save

CONFIGS = [SpeculativeConfig(method="suffix"), SpeculativeConfig(method="ngram", prompt_lookup_min=1)]
CONTROLS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 7},
    {"temperature": 0.2, "seed": 8, "top_p": 0.9, "logprobs": 2},
    {"frequency_penalty": 0.4, "min_tokens": 5, "stop_token_ids": (1, 2, 3)},
]
NUM_OUTPUT = 40


def run(
    engine: Engine, texts: list[list[int]], params: list[dict[str, Any]], config: SpeculativeConfig | None,
    overlap: bool = False, cost: RowCost | None = None,
) -> tuple[list[TokenChunk], EngineLoop]:  # fmt: skip
    """One joins every second step."""
    speculator = Speculator(config, cost or FreeRows()) if config else None
    running = RunningSet(engine.info, Budget(64, 16, 16), validate, speculator)
    loop = EngineLoop(engine, running, overlap=overlap)
    size = -(-(max(map(len, texts)) + 2 * NUM_OUTPUT) // engine.info.block_size)
    blocks = [range(size * n, size * (n + 1)) for n in range(len(texts))]
    run_joining(loop, texts, params, blocks, NUM_OUTPUT)
    return told_of(running, len(texts)), loop


@pytest.mark.parametrize("load", [load_torch, load_native])
@pytest.mark.parametrize("config", CONFIGS, ids=["suffix", "ngram"])
def test_answers_are_the_same_as_without(tmp_path: Path, load: Any, config: SpeculativeConfig) -> None:
    """A model of few tokens, whose answers repeat themselves."""
    save("llama", tmp_path, vocab_size=40, num_hidden_layers=1)
    engine = load(tmp_path, kv_cache_bytes=8 << 20, block_size=8)
    texts = prompts(8, seed=4, low=10, high=40, vocab_size=40)
    params = [CONTROLS[n % 4] for n in range(8)]
    want, slow = run(engine, texts, params, None)
    for overlap in (False, True):
        got, loop = run(engine, texts, params, config, overlap)
        assert got == want
        drafter = loop.running.drafting.drafter
        assert isinstance(drafter, Speculator) and sum(c.accepted.total() for c in drafter.counts.values()) > 30
        assert loop.num_steps < slow.num_steps


@pytest.mark.parametrize("overlap", [False, True])
def test_a_script_that_copies_takes_far_fewer_steps(overlap: bool) -> None:
    running = make_running(64, max_model_len=200)
    text = list(b"one two three four five six seven eight nine ten eleven")
    prompt = [*text, vocab.SCRIPT, *text]
    engine = OverlappingScripted(make_engine(running))
    (chunk,), loop = run(engine, [prompt], [{"stop_token_ids": (vocab.EOS,), "max_tokens": 80}], CONFIGS[0], overlap)
    assert list(chunk.ids) == [*text, vocab.EOS] and chunk.finish == "stop"
    assert loop.num_steps < 25


def test_a_prompt_in_pieces_and_steps_that_overlap() -> None:
    """No token is being drawn while its pieces are computed, and what rows cost is known by then."""
    running = make_running(64, max_model_len=200)
    engine = OverlappingScripted(make_engine(running))
    cost = RowCost()
    for num_rows in (1, 2, 4, 8):
        cost.observe(num_rows, 0.005 + 0.001 * num_rows)
    prompt = [n % 50 for n in range(60)]
    (chunk,), _ = run(engine, [prompt], [{}], CONFIGS[0], overlap=True, cost=cost)
    assert list(chunk.ids) == vocab.answer(prompt, NUM_OUTPUT)


async def test_metrics_tell_what_was_drafted_and_accepted() -> None:
    running = make_running(64, max_model_len=200)
    text = list(b"one two three four five six")
    engine = OverlappingScripted(make_engine(running))
    _, loop = run(engine, [[*text, vocab.SCRIPT, *text]], [{"max_tokens": 20}], CONFIGS[0])
    metrics = WorkerMetrics()
    metrics.observe(loop)
    metrics.observe(loop)

    def value(name: str, **labels: str) -> float:
        got = metrics.registry.get_sample_value(f"headrace_spec_decode_{name}_total", {"method": "suffix"} | labels)
        return got or 0.0

    assert value("num_accepted_tokens") == 20 - (loop.num_steps - 3)  # the prompt takes four steps, the last draws
    assert value("num_accepted_tokens_per_pos", position="0") <= value("num_drafts") < value("num_draft_tokens")
    assert value("num_accepted_tokens") <= value("num_draft_tokens")
