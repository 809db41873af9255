"""A draft model beside a target, through the engine's loop: the text is that without, in fewer steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.gpu_worker.batch import Chunk, Engine
from services.gpu_worker.composer import Budget
from services.gpu_worker.draft_loading import draw_on_device
from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.gpu_step import GpuStep
from services.gpu_worker.metrics_defs import WorkerMetrics
from services.gpu_worker.running_set import Change, RunningSet
from services.gpu_worker.sampler import validate
from services.gpu_worker.speculative.draft_model import DraftModel
from services.gpu_worker.speculative.model_speculator import ModelSpeculator
from services.gpu_worker.speculative.vocab_map import MappedEngine, VocabMap
from services.gpu_worker.steps import starter
from shared import scripted_vocab as vocab
from shared.protocol import TokenChunk
from shared.speculative_config import SpeculativeConfig
from shared.worker_protocol import Extend
from tests.gpu_worker.any_engine import load_gpu, load_native, load_torch
from tests.gpu_worker.builders import make_engine, make_running
from tests.gpu_worker.engine_loops import run_joining, told_of
from tests.gpu_worker.overlapping_engine import OverlappingScripted
from tests.gpu_worker.tiny_models import VOCAB_SIZE, Runner, prompts, save

CONFIG = SpeculativeConfig(method="draft_model", model="a smaller one", num_speculative_tokens=4)
CONTROLS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 7, "logprobs": 2},
    {"temperature": 1.3, "seed": 8, "top_p": 0.9, "repetition_penalty": 1.2, "logit_bias": {5: 3.0}},
    {"frequency_penalty": 0.4, "min_tokens": 5, "stop_token_ids": (1, 2, 3)},
    {"temperature": 1.0, "seed": 9, "top_k": 20, "min_p": 0.05, "presence_penalty": 0.4},
]
NUM_OUTPUT = 30


def run(
    engine: Engine, draft: Engine | None, texts: list[list[int]], params: list[dict[str, Any]], overlap: bool = False,
    spare: int = 0,
) -> tuple[list[TokenChunk], EngineLoop]:  # fmt: skip
    """One joins every second step. No time passes, so as much is guessed as may be. spare: blocks that sequences take
    one by one, in place of the last ones of their own."""
    drafter = ModelSpeculator(CONFIG, DraftModel(draft, clock=lambda: 0.0), lambda: 0.0) if draft else None
    running = RunningSet(engine.info, Budget(64, 48, 16), validate, drafter)
    loop = EngineLoop(engine, running, overlap=overlap, clock=lambda: 0.0)
    size = -(-(max(map(len, texts)) + NUM_OUTPUT) // engine.info.block_size)
    first_spare = size * len(texts)
    granted = tuple(range(first_spare, first_spare + spare))
    loop.submit(Change("run", 1, Extend(sid="", epoch=0, pool_term=0, block_ids=granted)))
    counts = [-(-len(text) // engine.info.block_size) if spare else size for text in texts]
    run_joining(loop, texts, params, [range(size * n, size * n + count) for n, count in enumerate(counts)], NUM_OUTPUT)
    return told_of(running, len(texts)), loop


def speculator(loop: EngineLoop) -> ModelSpeculator:
    drafter = loop.running.drafting.drafter
    assert isinstance(drafter, ModelSpeculator)
    return drafter


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("spare", [0, 60])
def test_of_right_guesses_none_is_rejected(overlap: bool, spare: int) -> None:
    """The scripted engine would not compute on with a pool that does not hold what it should."""
    running = make_running(160, max_model_len=200)
    texts = [[n, *range(7, 17 + 3 * n)] for n in range(4)]
    params = [{"temperature": 0.5, "seed": n} for n in range(4)]
    got, loop = run(OverlappingScripted(make_engine(running)), make_engine(running), texts, params, overlap, spare)
    assert [list(c.ids) for c in got] == [vocab.answer(t, NUM_OUTPUT, seed=n) for n, t in enumerate(texts)]
    counts = speculator(loop).counts["draft_model"]
    assert counts.accepted.total() == counts.num_draft_tokens > 80 and speculator(loop)._num_failures == 0
    assert counts.num_draft_tokens / counts.num_drafts > 3.5  # also where a sequence's last block is full


def drawn_of(chunks: list[TokenChunk], load: Any) -> list[Any]:
    """Without log-probabilities where a GPU's kernels are stood in for: torch's products round by how many rows."""
    return [list(chunk.ids) for chunk in chunks] if load is load_gpu else list(chunks)


@pytest.mark.parametrize("load", [load_torch, load_native, load_gpu])
@pytest.mark.parametrize("seed", [0, 5], ids=["right", "wrong"])
def test_answers_are_the_same_as_without(tmp_path: Path, load: Any, seed: int) -> None:
    """The draft model is the same one, in another pool, or another one."""
    save("llama", tmp_path / "target")
    save("llama", tmp_path / "draft", seed=seed, **({"num_hidden_layers": 1} if seed else {}))
    settings = {"kv_cache_bytes": 8 << 20, "block_size": 8}
    engine = load(tmp_path / "target", **settings)
    draft = load(tmp_path / "draft", block_size=8, num_blocks=engine.info.num_blocks)
    texts = prompts(6, seed=4, low=10, high=40)
    params = [CONTROLS[n % 5] for n in range(6)]
    want, slow = run(engine, None, texts, params)
    for overlap in (False, True):
        got, loop = run(engine, draft, texts, params, overlap)
        assert drawn_of(got, load) == drawn_of(want, load)
        counts = speculator(loop).counts["draft_model"]
        assert speculator(loop)._num_failures == 0 and counts.num_draft_tokens > 100
        if seed == 0:
            assert counts.accepted.total() > 0.97 * counts.num_draft_tokens  # all but those behind an end
            assert loop.num_steps < 0.6 * slow.num_steps


@pytest.mark.parametrize("load", [load_torch, load_gpu])
def test_a_draft_model_of_another_vocabulary_draws_the_targets_tokens(tmp_path: Path, load: Any) -> None:
    """The same model with its tokens in another order, of which the last ten are no tokens of the target."""
    import torch
    from transformers import LlamaForCausalLM

    model = save("llama", tmp_path / "target", vocab_size=VOCAB_SIZE)
    order = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    assert isinstance(model, LlamaForCausalLM)
    with torch.no_grad():
        for matrix in (model.model.embed_tokens.weight, model.lm_head.weight):
            matrix.copy_(matrix[order].clone())
    model.save_pretrained(tmp_path / "draft")
    engine = load(tmp_path / "target", kv_cache_bytes=8 << 20, block_size=8)
    other = load(tmp_path / "draft", block_size=8, num_blocks=engine.info.num_blocks)
    drawn = (torch.device("cpu"), draw_on_device) if load is load_gpu else ()
    places = order.argsort().tolist()  # of the target's tokens in the draft model's vocabulary
    mapped = MappedEngine(other, VocabMap(places, tuple(enumerate(places))), *drawn)
    texts = prompts(5, seed=4, low=10, high=40)
    want, _ = run(engine, None, texts, CONTROLS)
    got, loop = run(engine, mapped, texts, CONTROLS)
    counts = speculator(loop).counts["draft_model"]
    assert drawn_of(got, load) == drawn_of(want, load)
    assert counts.accepted.total() > 0.97 * counts.num_draft_tokens > 100
    part = MappedEngine(other, VocabMap(places, tuple((i, p) for i, p in enumerate(places) if i % 2)), *drawn)
    got, loop = run(engine, part, texts, CONTROLS)
    counts = speculator(loop).counts["draft_model"]
    assert drawn_of(got, load) == drawn_of(want, load)
    assert 0 < counts.accepted.total() < 0.8 * counts.num_draft_tokens


@pytest.mark.parametrize("params", [{}, {"repetition_penalty": 1.2}])
def test_a_gpus_guess_begins_before_the_one_is_known_that_it_reads(
    tmp_path: Path, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no penalty must know them all."""
    save("llama", tmp_path)
    engine = load_gpu(tmp_path, kv_cache_bytes=1 << 20, block_size=8)
    runner, events, begin = Runner(engine), [], engine.begin

    def told(chunks: list[Chunk]) -> GpuStep:
        step = begin(chunks)
        results = step.results
        monkeypatch.setattr(step, "results", lambda: events.append("take") or results())
        events.append("begin")
        return step

    one_by_one, ahead = DraftModel(engine), DraftModel(engine)
    one_by_one._start = starter(engine, overlap=False)
    sequences = [runner.sequence(text, 8, temperature=0.7, **params) for text in prompts(3, low=9, high=12)]
    want = one_by_one.propose(sequences, [4, 4, 3], 100)
    monkeypatch.setattr(engine, "begin", told)
    assert ahead.propose(sequences, [4, 4, 3], 100) == want and [len(p.ids) for p in want] == [4, 4, 3]
    overlapping = ["begin", "begin", "take", "begin", "take", "begin", "take", "take"]
    assert events == (["begin", "take"] * 4 if params else overlapping)


async def test_metrics_tell_what_was_drafted_accepted_and_saved() -> None:
    running = make_running(160, max_model_len=200)
    _, loop = run(make_engine(running), make_engine(running), [[1, 2, 3]], [{"max_tokens": 21}])
    speculator(loop).counts["draft_model"].saved_s = -0.25
    metrics = WorkerMetrics()
    for _ in range(2):
        metrics.observe(loop)

    def value(name: str, **labels: str) -> float:
        got = metrics.registry.get_sample_value(f"headrace_spec_decode_{name}", {"method": "draft_model"} | labels)
        return got or 0.0

    assert value("num_accepted_tokens_total") == value("num_draft_tokens_total") == 16
    assert value("num_accepted_tokens_per_pos_total", position="3") == value("num_drafts_total") == 4
    assert value("time_saved_seconds") == -0.25


def test_a_request_that_wants_no_drafts_has_none() -> None:
    running = make_running(160, max_model_len=200)
    _, loop = run(make_engine(running), make_engine(running), [[1, 2, 3]], [{"num_speculative_tokens": 0}])
    assert speculator(loop).counts["draft_model"].num_draft_tokens == 0


@pytest.mark.parametrize("num_logprobs", [0, 2])
def test_log_probabilities_of_a_prompt_are_the_targets_to_tell(num_logprobs: int) -> None:
    """The draft model reads such a prompt like others, in pieces too."""
    running = make_running(160, max_model_len=200)
    texts, params = [list(range(3, 90)), [5, 6, 7]], [{"prompt_logprobs": num_logprobs}] * 2
    want, _ = run(make_engine(running), None, texts, params)
    got, loop = run(make_engine(running), make_engine(running), texts, params)
    counts = speculator(loop).counts["draft_model"]
    assert got == want and speculator(loop)._num_failures == 0
    assert counts.accepted.total() == counts.num_draft_tokens > 40


def test_the_draft_models_context_is_where_it_stops_guessing() -> None:
    running = make_running(160, max_model_len=200)
    short = make_engine(running)
    short.info = replace(short.info, max_model_len=20)
    (chunk,), loop = run(make_engine(running), short, [[1, 2, 3]], [{}])
    assert list(chunk.ids) == vocab.answer([1, 2, 3], NUM_OUTPUT)
    assert 0 < speculator(loop).counts["draft_model"].num_draft_tokens <= 20 and speculator(loop)._num_failures == 0
