"""Who guesses on a GPU, in an engine of a model there that computes row by row: are tokens those without any, and what
do steps cost in which each sequence has so many guesses, whether that pays or not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from services.gpu_worker.composer import Budget
from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.gpu_engine import GpuEngine, StepLimits
from services.gpu_worker.heads_loading import Heads, heads_of
from services.gpu_worker.running_set import RunningSet
from services.gpu_worker.sampler import validate
from services.gpu_worker.speculative.batch_proposer import BatchProposer
from services.gpu_worker.speculative.counts import Counts
from services.gpu_worker.speculative.draft_model import DraftModel
from services.gpu_worker.speculative.model_speculator import ModelSpeculator
from shared.protocol import TokenChunk
from shared.settings import WorkerSettings
from shared.speculative_config import SpeculativeConfig
from tests.gpu_worker.engine_loops import run_joining, told_of
from tests.gpu_worker.head_models import published, published_medusa
from tests.gpu_worker.tiny_models import prompts, save

Row = dict[str, Any]
NUM_GUESSES = 4
PARAMS: list[dict[str, Any]] = [
    {}, {"temperature": 0.7, "seed": 1}, {"temperature": 1.0, "seed": 2, "top_p": 0.9}, {"repetition_penalty": 1.1},
]  # fmt: skip
HEADS: tuple[Literal["eagle", "eagle3", "medusa"], ...] = ("eagle", "eagle3", "medusa")
AUTO = '{"method": "auto"}'
KV_BYTES = 1 << 30
BLOCK_SIZE = 16


def rows(model: Path, device: torch.device, num_texts: int, num_tokens: int, folder: Path) -> Iterator[Row]:
    """folder: for models that are made up."""
    limits = StepLimits(512, 64, 0.5)
    kv_cache_bytes = KV_BYTES if device.type == "cuda" else KV_BYTES >> 8
    engine = GpuEngine.load(model, device, kv_cache_bytes=kv_cache_bytes, block_size=BLOCK_SIZE, limits=limits)
    want, plain_s, _ = _timed(engine, None, num_texts, num_tokens)
    yield {"what": "guesses: none", "tok/s": num_texts * num_tokens / plain_s}
    for name, make in _guessers(engine, model, device, folder):
        got, seconds, counts = _timed(engine, make(), num_texts, num_tokens)
        engine.tap((), lambda chunks, taps: None)
        same = [chunk.ids for chunk in got] == [chunk.ids for chunk in want]
        yield {
            "what": f"guesses: {name}", "tok/s": num_texts * num_tokens / seconds, "of one": seconds / plain_s,
            "failed": not same,
            "note": f"{counts.accepted.total()} of {counts.num_draft_tokens} right",
        }  # fmt: skip


def _guessers(
    engine: GpuEngine, model: Path, device: torch.device, folder: Path
) -> Iterator[tuple[str, Callable[[], BatchProposer]]]:
    save("llama", folder / "other", vocab_size=engine.info.vocab_size, num_hidden_layers=1)

    def draft(path: Path) -> BatchProposer:
        own = GpuEngine.load(path, device, num_blocks=engine.info.num_blocks, block_size=BLOCK_SIZE)
        return DraftModel(own, clock=lambda: 0.0)

    yield "the model itself drafts", lambda: draft(model)
    yield "another model drafts", lambda: draft(folder / "other")
    for kind in HEADS:
        (published_medusa if kind == "medusa" else partial(published, kind))(model, folder / kind)
        yield f"{kind}, random", partial(_heads, Heads(folder / kind, kind, model, BLOCK_SIZE), engine)
    own = WorkerSettings(speculative_config=AUTO, block_size=BLOCK_SIZE)
    if (along := heads_of(own, model, folder)) is not None:
        yield f"{along.kind} that comes along", partial(_heads, along, engine)


def _heads(heads: Heads, engine: GpuEngine) -> BatchProposer:
    proposer = heads.load(engine)
    proposer._clock = lambda: 0.0
    return proposer


def _timed(
    engine: GpuEngine, proposer: BatchProposer | None, num_texts: int, num_tokens: int
) -> tuple[list[TokenChunk], float, Counts]:
    """No time passes for those who decide, so as much is guessed as may be. On a card once before, so that kernels are
    there."""
    if engine.device.type == "cuda":
        _run(engine, proposer, num_texts, num_tokens)
    started = time.perf_counter()
    told, counts = _run(engine, proposer, num_texts, num_tokens)
    return told, time.perf_counter() - started, counts


def _run(
    engine: GpuEngine, proposer: BatchProposer | None, num_texts: int, num_tokens: int
) -> tuple[list[TokenChunk], Counts]:
    config = SpeculativeConfig(method="draft_model", model="x", num_speculative_tokens=NUM_GUESSES)
    drafter = ModelSpeculator(config, proposer, lambda: 0.0) if proposer else None
    running = RunningSet(engine.info, Budget(512, 64, 512), validate, drafter)
    loop = EngineLoop(engine, running, overlap=True, clock=lambda: 0.0)
    texts = prompts(num_texts, seed=1, low=8, high=24, vocab_size=engine.info.vocab_size)
    size = -(-(24 + num_tokens) // BLOCK_SIZE)
    params = [PARAMS[n % len(PARAMS)] for n in range(num_texts)]
    run_joining(loop, texts, params, [range(size * n, size * n + size) for n in range(num_texts)], num_tokens)
    return told_of(running, num_texts), drafter.counts[config.method] if drafter else Counts()
