"""`headrace train-heads` from prompts to a folder that a worker can draft with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from services.gpu_worker.commands import train_heads
from services.gpu_worker.speculative.native_eagle import load_eagle
from services.gpu_worker.training import trainer
from tests.gpu_worker.any_engine import load_native
from tests.gpu_worker.head_models import published, published_medusa, save_tiny
from tests.gpu_worker.test_perplexity import write_tokenizer
from tests.kernels.native_libraries import best_library
from tests.kernels.threads import torch_threads

PROMPTS = "\n".join(f"Tell me about {n}" for n in range(60))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    best_library()  # or the test is skipped
    save_tiny(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    (tmp_path / "prompts").write_text(PROMPTS)
    return tmp_path / "model"


def run(model: Path, *options: str) -> int:
    with torch_threads(1):
        return train_heads.main([
            str(model), "--data", str(model.parent / "prompts"), "--output", str(model.parent / "out"), "--threads",
            "1", "--num-tokens", "400", "--max-tokens", "12", "--draft-vocab-size", "64", *options,
        ])  # fmt: skip


def state(model: Path) -> dict[str, float]:
    values: dict[str, float] = json.loads((model.parent / "out" / "training" / "state.json").read_text())
    return values


def test_a_run_ends_with_heads_and_goes_on_when_it_gets_more_time(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, "--hours", "0.001") == 0
    said = capsys.readouterr().out
    assert "held-out acceptance" in said and "  5: 0." in said
    num_steps = state(model)["num_steps"]
    engine = load_native(model, kv_cache_bytes=8 << 20)
    config, _ = load_eagle(model.parent / "out", "eagle3", engine.config, engine.decoder.weights)
    assert config.draft_vocab_size == 64
    assert run(model, "--hours", "0.001") == 0, "nothing of its time is left"
    assert state(model)["num_steps"] == num_steps > 0
    texts = (model.parent / "out" / "training" / "texts.jsonl").read_text()
    assert run(model, "--hours", "0.002") == 0
    assert state(model)["num_steps"] > num_steps
    assert (model.parent / "out" / "training" / "texts.jsonl").read_text() == texts
    assert run(model, "--hours", "0.002", "--seed", "5") == 1
    assert "has a run with another seed: 0" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["eagle3", "eagle", "medusa"])
def test_a_run_goes_on_from_published_heads(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """With steps of next to nothing they are what they were; those of another method are refused."""
    monkeypatch.setattr(trainer, "LEARNING_RATE", 1e-9)
    if method == "medusa":
        published_medusa(model, tmp_path / "old", num_blocks=1)
    else:
        published(method, model, tmp_path / "old")
    options = ("--hours", "0.0015", "--method", method, "--init-from", str(tmp_path / "old"), "--seed", "3")
    assert run(model, *options) == 0
    old, new = (load_file(folder / "model.safetensors") for folder in (tmp_path / "old", tmp_path / "out"))
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        assert tensor.shape == new[name].shape, "also of the draft vocabulary, whatever was asked for"
        if tensor.dim() == 2 and tensor.is_floating_point():
            assert F.cosine_similarity(tensor.float().flatten(), new[name].float().flatten(), dim=0) > 0.9999, name
        elif not tensor.is_floating_point():
            assert torch.equal(tensor, new[name])
    assert run(model, *options[:-2], "--seed", "4") == 1
    other = "medusa" if method != "medusa" else "eagle3"
    assert run(model, *options[:3], other, *options[4:]) == 1
    assert "--init-from: architectures: " in capsys.readouterr().err


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_other_methods(model: Path, method: str) -> None:
    assert run(model, "--hours", "0.0008", "--method", method) == 0
    values = json.loads((model.parent / "out" / "config.json").read_text())
    assert values["architectures"] == [{"eagle": "LlamaForCausalLM", "medusa": "MedusaModel"}[method]]


@pytest.mark.parametrize(
    "data, sentence",
    [("", "--data: {path}: there is no prompt in it"), ('{"prompt": 1}', "--data: {path}: line 1"),
     (None, "No such file")],
)  # fmt: skip
def test_what_cannot_be_learnt_from_is_said_in_a_sentence(
    model: Path, capsys: pytest.CaptureFixture[str], data: str | None, sentence: str
) -> None:
    path = model.parent / "prompts"
    path.unlink()
    if data is not None:
        path.write_text(data)
    assert run(model, "--hours", "0.001") == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("headrace train-heads: ") and sentence.format(path=path) in said
