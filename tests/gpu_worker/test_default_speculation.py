"""What a worker does that is told nothing, on the default model: it guesses, and says what one says that does not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.gateway.tokenization import Tokenizer
from services.gpu_worker import __main__ as main
from services.gpu_worker import drafters
from services.gpu_worker.composer import Budget
from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.running_set import RunningSet
from services.gpu_worker.speculative.auto import AutoSpeculator
from shared import model_source
from shared.protocol import TokenChunk
from shared.settings import CommonSettings, DeviceSettings, ScriptedSettings, WorkerSettings
from tests.gpu_worker.engine_loops import FreeRows, run_together, told_of
from tests.gpu_worker.test_default_model import model_path

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

DATA = Path(__file__).parents[1] / "bench" / "data" / "speculation.json"
NUM_OUTPUT = 48
CONTROLS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "seed": 6, "top_p": 0.9},
    {"temperature": 0.0, "num_speculative_tokens": 0},
    {"temperature": 1.0, "seed": 7, "fleet": False},
]


def load(**own: Any) -> main.Loaded:
    settings = WorkerSettings(kv_cache_bytes=1 << 28, threads=2, engine="native", **own)
    return main._load(CommonSettings(model=str(model_path())), settings, DeviceSettings(), ScriptedSettings())


@pytest.fixture(scope="module")
def default() -> main.Loaded:
    """Whose rows cost nothing: where they are dear less is drafted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafters, "measure_rows", lambda engine: FreeRows())
        return load()


def texts() -> list[list[int]]:
    """Of the benchmark: what is copied, what repeats itself, and what does neither."""
    tokenizer = Tokenizer.from_source(model_source.resolve(str(model_path()), Path()))
    kinds = json.loads(DATA.read_text())
    prompts = [kinds[kind][n] for kind in ("edit", "code", "chat") for n in range(2)]
    return [tokenizer.encode(prompt, add_special_tokens=True) for prompt in prompts]


def answers(
    loaded: main.Loaded, prompts: list[list[int]], overlap: bool = False, controls: Sequence[dict[str, Any]] = CONTROLS
) -> list[TokenChunk]:
    """All beside each other."""
    engine, validate, cost, drafter = loaded
    running = RunningSet(engine.info, Budget(64, 64, 64), validate, drafter)
    loop = EngineLoop(engine, running, cost=cost, overlap=overlap)
    size = -(-(max(map(len, prompts)) + NUM_OUTPUT) // engine.info.block_size)
    params = [controls[n % len(controls)] for n in range(len(prompts))]
    run_together(loop, prompts, params, [range(size * n, size * (n + 1)) for n in range(len(prompts))], NUM_OUTPUT)
    return told_of(running, len(prompts))


def test_answers_are_those_without_guesses_and_some_guesses_are_right(default: main.Loaded) -> None:
    prompts, without, drafter = texts(), load(speculative_config="none"), default[3]
    assert isinstance(drafter, AutoSpeculator) and without[3] is None
    want = answers(without, prompts)
    for overlap in (False, True):
        assert answers(default, prompts, overlap) == want
    assert sum(counts.accepted.total() for counts in drafter.counts.values()) > NUM_OUTPUT


def test_a_request_can_do_without(default: main.Loaded) -> None:
    """Without guesses, or without what they have to do with other answers."""
    prompts, drafter = texts()[:2], default[3]
    assert isinstance(drafter, AutoSpeculator) and drafter.fleet is not None

    def seen(**asked: Any) -> tuple[bool, int]:
        """Was something guessed, and how many answers were kept to be told?"""
        assert drafter.fleet is not None
        drafted, told = sum(c.num_draft_tokens for c in drafter.counts.values()), drafter.fleet.num_ended
        answers(default, prompts, controls=[asked])
        now = sum(c.num_draft_tokens for c in drafter.counts.values())
        return now > drafted, drafter.fleet.num_ended - told

    assert seen() == (True, 2)
    assert seen(fleet=False) == (True, 0)
    assert seen(num_speculative_tokens=0) == (False, 0)
