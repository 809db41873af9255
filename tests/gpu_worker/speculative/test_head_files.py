"""Files of heads with exactly the published names: what fits is loaded, everything else is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.gpu_worker.model.config import ModelConfig
from services.gpu_worker.native_engine import NativeEngine
from services.gpu_worker.speculative.native_eagle import NativeEagle, Wanted, load_eagle
from services.gpu_worker.weights.head_files import HeadFiles
from services.gpu_worker.weights.source import WeightsError
from tests.gpu_worker.head_models import DRAFT_VOCAB_SIZE, load_tiny, published, read_rows
from tests.gpu_worker.tiny_models import Runner, prompts

LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
         "mlp.up_proj", "mlp.down_proj")  # fmt: skip
EAGLE3_NAMES = {
    "d2t", "t2d", "fc.weight", "lm_head.weight", "norm.weight",
    *(f"midlayer.{n}.weight" for n in (*LAYER, "hidden_norm", "input_layernorm", "post_attention_layernorm")),
}  # fmt: skip
EAGLE_NAMES = {"fc.weight", *(f"layers.0.{n}.weight" for n in (*LAYER, "post_attention_layernorm"))}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> NativeEngine:
    return load_tiny(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def folder(engine: NativeEngine, tmp_path: Path, model: Path) -> Path:
    published("eagle3", model, tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def model(engine: NativeEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.gpu_worker.head_models import save_tiny

    path = tmp_path_factory.mktemp("same")
    save_tiny(path)
    return path


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any], config: dict[str, Any] | None = None) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    if config:
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | config))


def guesses(engine: NativeEngine, folder: Path, kind: str = "eagle3") -> list[list[int]]:
    config, weights = load_eagle(folder, kind, engine.config, engine.decoder.weights)
    info = engine.info
    eagle = NativeEagle(config, weights, engine.decoder, num_blocks=info.num_blocks, block_size=info.block_size,
                        max_model_len=info.max_model_len)  # fmt: skip
    runner = Runner(engine)
    wanted = []
    for text in prompts(4, low=6):
        seq = runner.sequence(text, 5)
        wanted.append(Wanted(seq, 0, read_rows(engine, text, config.tap_layers)[:-1], 4))
    return [[guess.token_id for guess in found] for found in eagle.guess(wanted)]


def test_names_are_the_published_ones(engine: NativeEngine, model: Path, tmp_path: Path) -> None:
    for kind, names in (("eagle3", EAGLE3_NAMES), ("eagle", EAGLE_NAMES)):
        published(kind, model, tmp_path / kind)
        tensors = load_file(tmp_path / kind / "model.safetensors")
        assert set(tensors) == names
    tensors = load_file(tmp_path / "eagle3" / "model.safetensors")
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert (tensors["fc.weight"].shape, tensors["lm_head.weight"].shape) == ((64, 192), (DRAFT_VOCAB_SIZE, 64))
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (64, 128)
    ids = tensors["d2t"] + torch.arange(DRAFT_VOCAB_SIZE)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), ids)


def test_vllms_names_of_the_layer_mean_the_same(engine: NativeEngine, folder: Path) -> None:
    want = guesses(engine, folder)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("midlayer.")]:
            tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)

    change(folder, rename)
    assert guesses(engine, folder) == want


def test_an_embedding_of_its_own_is_used(engine: NativeEngine, folder: Path) -> None:
    want = guesses(engine, folder)
    change(folder, lambda t: t.update({"embed_tokens.weight": torch.randn(300, 64).half()}))
    assert guesses(engine, folder) != want


def test_norm_before_residual_changes_what_is_computed(engine: NativeEngine, folder: Path) -> None:
    want = guesses(engine, folder)
    change(folder, lambda t: None, {"norm_before_residual": True})
    assert guesses(engine, folder) != want


def test_four_bits_guess_much_the_same(engine: NativeEngine, model: Path, tmp_path: Path) -> None:
    published("eagle3", model, tmp_path / "f16")
    published("eagle3", model, tmp_path / "int4", "int4")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("int4", "f16")]
    assert sizes[0] < 0.4 * sizes[1]
    first = [[ids[0] for ids in guesses(engine, tmp_path / name)] for name in ("int4", "f16")]
    assert sum(a == b for a, b in zip(*first, strict=True)) >= 2


@pytest.mark.parametrize(
    "edit, named",
    [
        (lambda t: t.pop("fc.weight"), "fc.weight"),
        (lambda t: t.pop("d2t"), "d2t"),
        (lambda t: t.update({"fc.weight": torch.zeros(64, 64)}), "fc.weight"),
        (lambda t: t.update({"midlayer.hidden_norm.weight": torch.ones(32)}), "midlayer.hidden_norm.weight"),
        (lambda t: t.update({"extra.weight": torch.ones(32)}), "extra.weight"),
        (lambda t: t.update({"d2t": t["d2t"] + 400}), "d2t"),
        (lambda t: t.update({"d2t": t["d2t"] - 400}), "d2t"),
        (lambda t: t.update({"d2t": t["d2t"][:-1]}), "d2t"),
        (lambda t: t.update({"d2t": t["d2t"].float()}), "d2t"),
        (lambda t: t.update({"t2d": torch.zeros(300, dtype=torch.bool)}), "t2d"),
        (lambda t: t.update({"lm_head.weight": torch.full((DRAFT_VOCAB_SIZE, 64), torch.inf)}), "lm_head.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    engine: NativeEngine, folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any], named: str
) -> None:
    change(folder, edit)
    with pytest.raises(WeightsError, match=named):
        load_eagle(folder, "eagle3", engine.config, engine.decoder.weights)


def test_a_tensor_without_rows_is_refused_by_name_and_counts_as_nothing_before(
    engine: NativeEngine, folder: Path
) -> None:
    """A card plans by what tensors take, before any is looked at."""
    change(folder, lambda t: t.update({"fc.weight": torch.zeros(0, 192)}))
    assert HeadFiles(folder).device_bytes(torch.float16) > 0
    with pytest.raises(WeightsError, match="fc.weight"):
        load_eagle(folder, "eagle3", engine.config, engine.decoder.weights)


def test_pickled_weights_are_not_looked_at(engine: NativeEngine, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        load_eagle(folder, "eagle3", engine.config, engine.decoder.weights)


def test_a_model_of_other_size_is_refused(engine: NativeEngine, folder: Path) -> None:
    from dataclasses import replace

    other: ModelConfig = replace(engine.config, hidden_size=128)
    with pytest.raises(ValueError, match="hidden_size"):
        load_eagle(folder, "eagle3", other, engine.decoder.weights)
