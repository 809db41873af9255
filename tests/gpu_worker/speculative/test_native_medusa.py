"""Medusa heads, native and on a GPU's ops, against the modules that learn, and files with the published names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.gumbel import NoiseKey, gumbel_noise_at
from services.gpu_worker.gpu_engine import GpuEngine
from services.gpu_worker.model.config import ConfigError
from services.gpu_worker.native_engine import NativeEngine
from services.gpu_worker.speculative.gpu_medusa import GpuMedusa, load_gpu_medusa
from services.gpu_worker.speculative.head_config import last_layer
from services.gpu_worker.speculative.native_eagle import Guess
from services.gpu_worker.speculative.native_medusa import NativeMedusa, load_medusa
from services.gpu_worker.weights.source import WeightsError
from tests.gpu_worker.head_models import DRAFT_VOCAB_SIZE, load_tiny, load_tiny_gpu, published_medusa, read_rows
from tests.gpu_worker.tiny_models import Runner, prompts

AnyEngine = NativeEngine | GpuEngine
Tensors = dict[str, torch.Tensor]
NUM_HEADS, NUM_BLOCKS = 3, 2
VLLM_NAMES = {
    "token_map", *(f"lm_heads.{i}.weight" for i in range(NUM_HEADS)),
    *(f"blocks.{i}.layers.{j}.{n}" for i in range(NUM_HEADS) for j in range(NUM_BLOCKS) for n in ("weight", "bias")),
}  # fmt: skip


@pytest.fixture(scope="module", params=[load_tiny, load_tiny_gpu], ids=["native", "gpu"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AnyEngine:
    found: AnyEngine = request.param(tmp_path_factory.mktemp("model"))
    return found


@pytest.fixture
def folder(engine: AnyEngine, tmp_path: Path) -> Path:
    from tests.gpu_worker.head_models import save_tiny

    save_tiny(tmp_path / "model")
    published_medusa(tmp_path / "model", tmp_path / "heads", NUM_HEADS, NUM_BLOCKS)
    return tmp_path / "heads"


def loaded(engine: AnyEngine, folder: Path) -> NativeMedusa | GpuMedusa:
    if isinstance(engine, GpuEngine):
        return GpuMedusa(*load_gpu_medusa(folder, engine.config, engine.device, engine.dtype), engine.device)
    config, weights = load_medusa(folder, engine.config)
    return NativeMedusa(config, weights, engine.decoder)


def guesses(engine: AnyEngine, folder: Path, count: int = NUM_HEADS, **params: Any) -> list[list[Guess]]:
    """After each of some texts, all at once."""
    runner, layers = Runner(engine), last_layer(engine.config.num_layers)
    sequences = [runner.sequence(text, 5, **params) for text in prompts(12, seed=5, low=3)]
    rows = torch.stack([read_rows(engine, seq.token_ids, layers)[-2, 0] for seq in sequences])
    heads = loaded(engine, folder)
    found = heads.guess(sequences, rows, [count] * len(sequences))
    for n, seq in enumerate(sequences):
        assert [g.token_id for g in heads.guess([seq], rows[n : n + 1], [count])[0]] == [g.token_id for g in found[n]]
    return found


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_head_i_draws_what_its_module_would_for_the_token_i_places_on(
    engine: AnyEngine, tmp_path: Path, folder: Path, temperature: float
) -> None:
    """Codes of 8 bits round, so a guess may be another where two are nearly as good."""
    heads = published_medusa(tmp_path / "model", folder, NUM_HEADS, NUM_BLOCKS)
    ids = load_file(folder / "model.safetensors")["token_map"]
    found = guesses(engine, folder, temperature=temperature, seed=4)
    num_equal = 0
    for text, own in zip(prompts(12, seed=5, low=3), found, strict=True):
        row = read_rows(engine, text, last_layer(engine.config.num_layers))[-2]
        for place, guess in enumerate(own):
            logits = heads.logits(row, place)[0]
            scores = logits
            if temperature:
                scores = logits / temperature + gumbel_noise_at([NoiseKey(4, 0, place)], [ids])[0]
            num_equal += int(ids[scores.argmax()]) == guess.token_id
            at = int(torch.searchsorted(ids, guess.token_id))
            assert guess.logprob == pytest.approx(float(logits.log_softmax(-1)[at]), abs=0.5)
    assert num_equal >= (1.0 if isinstance(engine, GpuEngine) else 0.75) * 12 * NUM_HEADS


def test_no_more_is_guessed_than_there_are_heads_or_than_is_asked(engine: AnyEngine, folder: Path) -> None:
    assert {len(own) for own in guesses(engine, folder, count=2)} == {2}
    assert {len(own) for own in guesses(engine, folder, count=9)} == {NUM_HEADS}


def change(folder: Path, edit: Callable[[Tensors], Any], config: dict[str, Any] | None = None) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: t.contiguous().clone() for name, t in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))


def fasterdecodings(tensors: Tensors) -> None:
    """Its names, and its output heads of the whole vocabulary."""
    ids = tensors.pop("token_map")
    for i in range(NUM_HEADS):
        for j in range(NUM_BLOCKS):
            for n in ("weight", "bias"):
                tensors[f"{i}.{j}.linear.{n}"] = tensors.pop(f"blocks.{i}.layers.{j}.{n}")
        whole = torch.zeros(300, 64, dtype=torch.float16)
        whole[ids] = tensors.pop(f"lm_heads.{i}.weight")
        tensors[f"{i}.{NUM_BLOCKS}.weight"] = whole


def test_both_published_layouts_mean_the_same(engine: AnyEngine, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert set(tensors) == VLLM_NAMES and tensors["lm_heads.0.weight"].shape == (DRAFT_VOCAB_SIZE, 64)
    want = guesses(engine, folder)
    values = {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": NUM_BLOCKS, "base_model_name_or_path": "org/model"}
    change(folder, fasterdecodings, values)
    got = guesses(engine, folder)
    assert [[g.token_id for g in own] for own in got] == [[g.token_id for g in own] for own in want]


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_one_output_head_may_serve_all(engine: AnyEngine, folder: Path, name: str) -> None:
    def share(tensors: Tensors) -> None:
        own = [tensors.pop(f"lm_heads.{i}.weight") for i in range(NUM_HEADS)]
        tensors[name] = own[0]

    first = [own[0].token_id for own in guesses(engine, folder)]
    values = json.loads((folder / "config.json").read_text())
    change(folder, share, {**values, "original_lm_head": True})
    assert [own[0].token_id for own in guesses(engine, folder)] == first


@pytest.mark.parametrize(
    "edit, named",
    [
        (lambda t: t.pop("lm_heads.1.weight"), "lm_heads.1.weight"),
        (lambda t: t.pop("blocks.2.layers.1.bias"), "blocks.2.layers.1.bias"),
        (lambda t: t.update({"blocks.0.layers.0.weight": torch.zeros(64, 32)}), "blocks.0.layers.0.weight"),
        (lambda t: t.update({"blocks.3.layers.0.weight": torch.zeros(64, 64)}), "blocks.3.layers.0.weight"),
        (lambda t: t.update({"lm_heads.0.weight": torch.full((DRAFT_VOCAB_SIZE, 64), torch.nan)}), "lm_heads.0.weight"),
        (lambda t: t.pop("token_map"), "token_map"),
        (lambda t: t.update({"token_map": t["token_map"] + 300}), "token_map"),
        (lambda t: t.update({"token_map": t["token_map"] - 300}), "token_map"),
        (lambda t: t.update({"token_map": t["token_map"].float()}), "token_map"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    engine: AnyEngine, folder: Path, edit: Callable[[Tensors], Any], named: str
) -> None:
    change(folder, edit)
    with pytest.raises(WeightsError, match=named):
        loaded(engine, folder)


def test_heads_of_another_model_are_refused(engine: AnyEngine, folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    change(folder, lambda t: None, {**values, "hidden_size": 128})
    with pytest.raises(ConfigError, match="hidden_size 128"):
        loaded(engine, folder)
