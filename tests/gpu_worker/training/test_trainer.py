"""Heads learn what a model foresees, and what is told of them is what a chain of drafts would find."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.gpu_worker.native_engine import NativeEngine
from services.gpu_worker.speculative.head_config import MedusaConfig, last_layer
from services.gpu_worker.training.corpus import Example
from services.gpu_worker.training.medusa import MedusaHeads
from services.gpu_worker.training.self_text import Text, write
from services.gpu_worker.training.trainer import (
    Acceptance,
    Batcher,
    Target,
    Trainer,
    frequent_tokens,
    hits_of,
    logits_at,
    measure,
)
from tests.gpu_worker.head_models import batch_of, load_tiny, random_head, read_rows
from tests.gpu_worker.speculative.test_native_eagle import chain_logits
from tests.gpu_worker.tiny_models import prompts
from tests.kernels.threads import torch_threads

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[NativeEngine]:
    with torch_threads(1):
        yield load_tiny(model)


@pytest.fixture(scope="module")
def texts(engine: NativeEngine) -> list[Text]:
    asked = dict(enumerate(prompts(40, low=4, high=9)))
    found = list(write(engine, asked, eos_token_ids=[7], max_tokens=20, concurrency=6, seed=3))
    return sorted(found, key=lambda text: text.number)


def test_texts_follow_from_prompts_and_seed_alone(engine: NativeEngine, texts: list[Text]) -> None:
    asked = dict(enumerate(prompts(40, low=4, high=9)))
    assert [t.number for t in texts] == list(range(40))
    for text in texts:
        answer = text.token_ids[text.num_prompt_tokens :]
        assert text.token_ids[: text.num_prompt_tokens] == asked[text.number]
        assert (len(answer) == 20) != (answer[-1] == 7) and 7 not in answer[:-1]
    some = {number: asked[number] for number in (30, 5, 12)}
    again = write(engine, some, eos_token_ids=[7], max_tokens=20, concurrency=2, seed=3)
    assert sorted(again, key=lambda t: t.number) == [texts[5], texts[12], texts[30]]


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_passes_are_the_places_of_chains(engine: NativeEngine, model: Path, texts: list[Text], kind: str) -> None:
    """What row t + p of pass p foresees is what a chain that begins at t foresees after p right drafts."""
    head, target = random_head(kind, model)
    ids = texts[0].token_ids
    rows = read_rows(engine, ids, (*head.config.tap_layers, 7) if kind == "eagle3" else head.config.tap_layers)
    hits = hits_of(head, batch_of(target, ids, rows), target, 4)
    for t in range(2, len(ids) - 6):
        drafts = ids[t + 2 : t + 5]
        taps = rows[:, :3] if kind == "eagle3" else rows
        best = target.token_ids[chain_logits(head, target, ids[: t + 2], taps, drafts).argmax(-1)]
        for place in range(4):
            came = ids[t + 2 + place]
            assert bool(hits[place][0, t]) == (came >= 0 and int(best[place]) == came), (t, place)


def test_medusa_heads_foresee_places_further_on(model: Path) -> None:
    config = MedusaConfig(64, 300, 300, 3, last_layer(6))
    head = MedusaHeads(config, torch.randn(300, 64))
    for parameter in head.parameters():
        parameter.data.normal_()
    target = Target(torch.randn(300, 64), torch.randn(300, 64), torch.arange(300), (torch.ones(1), torch.ones(1)))
    ids = torch.randint(0, 300, (12,)).tolist()
    rows = torch.randn(12, 1, 64)
    batch = batch_of(target, ids, rows)
    hits = hits_of(head, batch, target, 5)
    assert len(hits) == 3
    for place in range(3):
        guesses = logits_at(head, batch.taps, place).argmax(-1)[0]
        for t in range(10 - place):
            assert bool(hits[place][0, t]) == (int(guesses[t]) == ids[t + 2 + place])


def test_acceptance_counts_a_place_where_all_before_were_right() -> None:
    found = Acceptance()
    first = torch.tensor([[True, True, False, True]])
    second = torch.tensor([[True, False, True, False]])
    found.add([first, second], torch.tensor([[True, True, True, True]]))
    assert found.shares == [3 / 4, 1 / 2]  # of the last text no second place is left


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_learning_foresees_more(engine: NativeEngine, model: Path, texts: list[Text], kind: str) -> None:
    head, target = random_head(kind, model)
    layers = (*head.config.tap_layers, 7) if kind == "eagle3" else head.config.tap_layers
    examples = [Example(text, read_rows(engine, text.token_ids, layers)) for text in texts[:16]]
    batcher = Batcher(target, CPU)
    trainer = Trainer(head, target, batcher, 2, 0)
    losses: list[float] = []
    before = measure(head, examples, target, batcher)
    trainer.run(examples, lambda: 1.0 if len(losses) < 150 else 0.0, losses.append)
    assert trainer.num_steps == 150
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    after = measure(head, examples, target, batcher)
    assert len(after) == 5 and before[0] < 0.05 and after[0] > 0.12


def test_frequent_tokens_are_filled_up() -> None:
    assert frequent_tokens([[9, 9, 5], [5, 5, 7]], 2, 12).tolist() == [5, 9]
    assert frequent_tokens([[9, 5]], 4, 12).tolist() == [0, 1, 5, 9]
