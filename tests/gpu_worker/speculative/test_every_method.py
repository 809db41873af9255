"""Every method on the default model, native path: tokens and log-probabilities are those without any, all controls."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from services.gpu_worker.batch import Engine
from services.gpu_worker.composer import Budget
from services.gpu_worker.drafters import AnySpeculator, make_auto
from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.heads_loading import Heads, heads_of
from services.gpu_worker.native_engine import NativeEngine
from services.gpu_worker.running_set import RunningSet
from services.gpu_worker.sampler import validate
from services.gpu_worker.speculative import speculator
from services.gpu_worker.speculative.acceptance import expected_of
from services.gpu_worker.speculative.draft_model import DraftModel
from services.gpu_worker.speculative.head_proposer import HeadProposer
from services.gpu_worker.speculative.model_speculator import ModelSpeculator
from services.gpu_worker.speculative.speculator import Speculator
from shared.protocol import TokenChunk
from shared.settings import WorkerSettings
from shared.speculative_config import HEADS, parse
from tests.gpu_worker.any_engine import engine_threads, load_native
from tests.gpu_worker.engine_loops import FreeRows, run_together, told_of
from tests.gpu_worker.head_models import published_medusa, trained
from tests.gpu_worker.test_default_model import model_path
from tests.gpu_worker.tiny_models import prompts, save

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

VOCAB_SIZE = 49152
BLOCK_SIZE = 8
NUM_BLOCKS = 800
CONTROLS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 7, "logprobs": 2},
    {"temperature": 1.3, "seed": 8, "top_p": 0.95, "repetition_penalty": 1.2},
    {"frequency_penalty": 0.5, "presence_penalty": 0.5, "min_tokens": 3, "stop_token_ids": (0, 2, 28, 30)},
    {"temperature": 1.3, "seed": 9, "top_k": 50, "min_p": 0.05, "logit_bias": {11: 4.0, 28: -2.0}},
    {"temperature": 0.7, "seed": 10, "top_p": 0.8, "min_tokens": 2, "stop_token_ids": (28, 30, 198), "logprobs": 0},
]
METHODS = {
    "ngram": '{"method": "ngram", "prompt_lookup_min": 1, "fleet": false}',
    "suffix": '{"method": "suffix", "fleet": false}',
    "right": '{"method": "draft_model", "model": "itself", "num_speculative_tokens": 4}',
    "wrong": '{"method": "draft_model", "model": "another", "num_speculative_tokens": 4}',
    "eagle3": '{"method": "eagle3", "num_speculative_tokens": 4}',
    "auto": '{"method": "auto", "fleet": false, "num_speculative_tokens": 4}',
    "medusa": '{"method": "medusa", "model": "random", "num_speculative_tokens": 4}',
    "trained eagle3": '{"method": "eagle3", "model": "trained", "num_speculative_tokens": 4}',
    "trained medusa": '{"method": "medusa", "model": "trained", "num_speculative_tokens": 4}',
}
PACKAGED = ("eagle3", "auto")


@pytest.fixture(scope="module")
def engine() -> NativeEngine:
    return load_native(model_path(), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NativeEngine]:
    folder: Path = tmp_path_factory.mktemp("another")
    save("llama", folder, vocab_size=VOCAB_SIZE, num_hidden_layers=1)
    paths = {"right": model_path(), "wrong": folder}
    return {name: load_native(path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE) for name, path in paths.items()}


@pytest.fixture(scope="module")
def heads(engine: NativeEngine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By method: Medusa heads with random weights, and such as our trainer has made in a few steps."""
    folder = tmp_path_factory.mktemp("heads")
    published_medusa(model_path(), folder / "medusa")
    texts = prompts(4, seed=9, low=20, high=40, vocab_size=VOCAB_SIZE)
    for kind in ("eagle3", "medusa"):
        trained(kind, engine, model_path(), texts, folder / f"trained {kind}")
    return {name: folder / name for name in ("medusa", "trained eagle3", "trained medusa")}


@pytest.fixture(autouse=True)
def believing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who believes short matches drafts more that may be wrong."""
    monkeypatch.setattr(speculator, "expected_of_match", expected_of)


def drafter_of(method: str, engine: NativeEngine, draft: Engine | None, folders: dict[str, Path]) -> AnySpeculator:
    config = parse(METHODS[method], is_native=True)
    assert config is not None
    if config.method == "auto" or config.method in HEADS:
        settings = WorkerSettings(speculative_config=METHODS[method], block_size=BLOCK_SIZE)
        kind: Literal["medusa", "eagle3"] = "medusa" if config.method == "medusa" else "eagle3"
        own, packaged = folders.get(method), heads_of(settings, model_path(), Path()) if method in PACKAGED else None
        heads = packaged if own is None else Heads(own, kind, model_path(), BLOCK_SIZE)
        assert heads is not None
        proposer = heads.load(engine)
        proposer._clock = lambda: 0.0
        if config.method == "auto":
            assert isinstance(proposer, HeadProposer)
            return make_auto(config, proposer, FreeRows(), float("inf"), None, lambda: 0.0)
        return ModelSpeculator(config, proposer, lambda: 0.0)
    if draft is None:
        return Speculator(config, FreeRows())
    return ModelSpeculator(config, DraftModel(draft, clock=lambda: 0.0), lambda: 0.0)


def run(
    engine: Engine, drafter: AnySpeculator | None, texts: list[list[int]], num_output: int, batch: int
) -> list[TokenChunk]:
    """Of so many at once, in prompts' order, which are cut into pieces and finish beside the decoding of others."""
    chunks: list[TokenChunk] = []
    for first in range(0, len(texts), batch):
        running = RunningSet(engine.info, Budget(64, 80, 33), validate, drafter)
        loop = EngineLoop(engine, running, overlap=False, clock=lambda: 0.0)
        some, size = texts[first : first + batch], NUM_BLOCKS // batch
        params = [CONTROLS[(first + n) % len(CONTROLS)] for n in range(len(some))]
        blocks = [range(size * n, size * (n + 1)) for n in range(len(some))]
        run_together(loop, some, params, blocks, num_output)
        chunks += told_of(running, len(some))
    return chunks


def check(
    engine: NativeEngine, drafts: dict[str, NativeEngine], heads: dict[str, Path], method: str, num_prompts: int,
    num_output: int, batches: list[int],
) -> None:  # fmt: skip
    """Half of the prompts repeat themselves, so that there is something to look up."""
    texts = [
        text * (1 + n % 2)
        for n, text in enumerate(prompts(num_prompts, seed=3, low=20, high=60, vocab_size=VOCAB_SIZE))
    ]
    draft = drafts.get(method)
    with engine_threads(engine, 2):
        want = run(engine, None, texts, num_output, 1)
        for batch in batches:
            drafter = drafter_of(method, engine, draft, heads)
            assert run(engine, drafter, texts, num_output, batch) == want
            *_, counts = drafter.counts.values()
            assert counts.num_draft_tokens > 2 * num_prompts
            if isinstance(drafter, ModelSpeculator):
                assert drafter._num_failures == 0
            engine.tap((), lambda chunks, taps: None)
            if method in PACKAGED:
                assert all(c.accepted for c in drafter.counts.values())
            if method == "right":
                assert counts.accepted.total() > 0.9 * counts.num_draft_tokens  # all but those behind an end


@pytest.mark.parametrize("method", METHODS)
def test_some_prompts(
    engine: NativeEngine, drafts: dict[str, NativeEngine], heads: dict[str, Path], method: str
) -> None:
    check(engine, drafts, heads, method, 8, 10, [8])


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("method", METHODS)
def test_200_prompts_alone_and_in_batches(
    engine: NativeEngine, drafts: dict[str, NativeEngine], heads: dict[str, Path], method: str
) -> None:
    check(engine, drafts, heads, method, 200, 16, [1, 16])


def test_the_packaged_head_says_what_its_blocks_take() -> None:
    """Its weights are quantised, which a worker meets before it loads them."""
    own = WorkerSettings(speculative_config='{"method": "eagle3"}', block_size=BLOCK_SIZE)
    heads = heads_of(own, model_path(), Path())
    assert heads is not None and heads.block_bytes() > 0
