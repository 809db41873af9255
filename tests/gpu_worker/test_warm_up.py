"""What is computed before anybody asks: all sizes, and nothing of it is seen afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from services.gpu_worker import heads_loading
from services.gpu_worker.gpu_engine import GpuEngine
from services.gpu_worker.heads_loading import Heads
from services.gpu_worker.speculative.gpu_eagle import GpuEagle
from services.gpu_worker.speculative.gpu_medusa import GpuMedusa
from services.gpu_worker.speculative.native_eagle import Wanted
from services.gpu_worker.warm_up import LONG, SIZES, sizes_on, warm_up_engine
from tests.gpu_worker.head_models import load_tiny_gpu, published, published_medusa
from tests.gpu_worker.tiny_models import Runner, ids_of, prompts


@pytest.fixture
def engine(tmp_path: Path) -> GpuEngine:
    return load_tiny_gpu(tmp_path / "model")


def test_where_nothing_is_compiled_one_sequence_will_do() -> None:
    assert (sizes_on(torch.device("cuda")), sizes_on(torch.device("cpu"))) == (SIZES, (1,))


def test_an_engine_draws_afterwards_what_it_did_before(engine: GpuEngine) -> None:
    def drawn() -> list[list[int]]:
        runner = Runner(engine)
        return ids_of(runner.run([runner.sequence(text, 4) for text in prompts(2, seed=3)]))

    want = drawn()
    warm_up_engine(engine, SIZES)
    assert drawn() == want


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa"])
def test_heads_guess_for_as_many_as_may_come(
    engine: GpuEngine, tmp_path: Path, kind: Literal["eagle", "eagle3", "medusa"], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "medusa":
        published_medusa(tmp_path / "model", tmp_path / "head")
    else:
        published(kind, tmp_path / "model", tmp_path / "head")
    made: Any = GpuMedusa if kind == "medusa" else GpuEagle
    told: list[tuple[int, list[int]]] = []
    guess = made.guess

    def guessed(self: Any, first: list[Any], *rest: Any) -> Any:
        found = guess(self, first, *rest)
        told.append((max(len(x.taps) for x in first if isinstance(x, Wanted)) if kind != "medusa" else 1,
                     [len(own) for own in found]))  # fmt: skip
        return found

    monkeypatch.setattr(made, "guess", guessed)
    monkeypatch.setattr(heads_loading, "sizes_on", lambda device: SIZES)
    Heads(tmp_path / "head", kind, tmp_path / "model", 16).load(engine)
    count = 3 if kind == "medusa" else 2
    long = [] if kind == "medusa" else [(n, [2]) for n in LONG if n + 2 < engine.info.max_model_len]
    assert told == [(1, [count] * size) for size in SIZES] + long
