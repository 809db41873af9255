"""Architectures that only transformers describes, with our paged attention: its logits, one result a row, refusals."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from services.gpu_worker.engine import TorchEngine
from services.gpu_worker.engines import load_engine
from services.gpu_worker.model.config import ConfigError
from services.gpu_worker.model.transformers_decoder import TransformersDecoder
from tests.gpu_worker.any_engine import last_logits, logits_along
from tests.gpu_worker.gguf_files import write_gguf
from tests.gpu_worker.tiny_models import SIZES, VOCAB_SIZE, WINDOW, Runner, ids_of, prompts, save
from tests.kernels.threads import torch_threads

pytestmark = pytest.mark.timeout(300)  # whoever first imports all of torch and transformers pays for it

NUM_PROMPT = [3, 41, 70]
MODELS: dict[str, dict[str, Any]] = {
    "GPTNeoXForCausalLM": {"num_key_value_heads": 6},
    "PhiForCausalLM": {"num_key_value_heads": 6},
    "CohereForCausalLM": {"logit_scale": 0.5},
    "Cohere2ForCausalLM": {"num_hidden_layers": 4, "sliding_window": WINDOW, "logit_scale": 0.5, "head_dim": 8},
    "Glm4ForCausalLM": {"head_dim": 8},
    "GPT2LMHeadModel": {"num_key_value_heads": 6},
}


def write(name: str, folder: Path, **changes: Any) -> Any:
    config_class = getattr(transformers, name).config_class
    torch.manual_seed(0)
    config = config_class(**(SIZES | {"initializer_range": 0.2} | MODELS[name] | changes))
    model = getattr(transformers, name)(config).float().eval()
    model.save_pretrained(folder)
    return model


def load(path: Path, **settings: Any) -> TorchEngine:
    return TorchEngine.load(path, model_impl="transformers", **({"kv_cache_bytes": 8 << 20} | settings))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_alone(tmp_path: Path, name: str) -> None:
    with torch_threads(1):
        model = write(name, tmp_path)
        generator = torch.Generator().manual_seed(1)
        texts = [torch.randint(0, VOCAB_SIZE, (n + 8,), generator=generator) for n in NUM_PROMPT]
        engine = load(tmp_path)
        got = logits_along(engine, [t.tolist() for t in texts], NUM_PROMPT)
        for text, first, mine in zip(texts, NUM_PROMPT, got, strict=True):
            with torch.no_grad():
                want = model(text[None]).logits[0, first - 1 :]
            assert want.std() > 0.05
            torch.testing.assert_close(mine, want, atol=1e-4, rtol=1e-4)
        alone = [logits_along(engine, [t.tolist()], [n], chunk=32)[0] for t, n in zip(texts, NUM_PROMPT, strict=True)]
        assert torch.equal(torch.stack(alone), got)


def test_it_is_chosen_for_what_we_do_not_describe(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"num_threads": 1, "kv_cache_bytes": 8 << 20}
    with torch_threads(1), caplog.at_level(logging.WARNING):
        write("PhiForCausalLM", tmp_path / "phi")
        engine = load_engine("auto", tmp_path / "phi", tmp_path, **settings)
        assert isinstance(engine, TorchEngine) and isinstance(engine._decoder, TransformersDecoder)
        assert "computing with transformers' code" in caplog.text
        for kind, model_impl in (("auto", "headrace"), ("native", "auto")):
            with pytest.raises(ConfigError, match="architectures: PhiForCausalLM is not supported"):
                load_engine(kind, tmp_path / "phi", tmp_path, model_impl=model_impl, **settings)
        save("llama", tmp_path / "llama")
        ours = load_engine("torch", tmp_path / "llama", tmp_path, **settings)
        theirs = load_engine("torch", tmp_path / "llama", tmp_path, model_impl="transformers", **settings)
        assert isinstance(theirs, TorchEngine) and isinstance(theirs._decoder, TransformersDecoder)
        assert ours.info.variant != theirs.info.variant
        texts = prompts(3)
        torch.testing.assert_close(last_logits(theirs, texts), last_logits(ours, texts), atol=1e-4, rtol=1e-4)
        runners = [Runner(engine) for engine in (ours, theirs)]
        want, got = (ids_of(r.run([r.sequence(text, 6) for text in texts])) for r in runners)
        assert got == want
        with pytest.raises(ConfigError, match="model_impl: transformers computes with torch on a CPU"):
            load_engine("native", tmp_path / "llama", tmp_path, model_impl="transformers", **settings)


def test_the_cache_may_be_in_eight_bits(tmp_path: Path) -> None:
    with torch_threads(1):
        write("PhiForCausalLM", tmp_path)
        texts = prompts(3)
        want, got = (last_logits(load(tmp_path, kv_cache_dtype=name), texts) for name in ("auto", "int8"))
    assert 0 < (got - want).std() / want.std(-1).mean() < 0.1


def edit(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["NobodysForCausalLM"]}, "known neither here nor to transformers"),
        ({"architectures": ["os.system"]}, "known neither here nor to transformers"),
        ({"architectures": ["MambaForCausalLM"]}, "does not attend through transformers' registry"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization is not possible with model_impl"),
        ({"hidden_size": 96}, "transformers cannot compute this model here"),
    ],
)
def test_what_cannot_be_computed_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write("PhiForCausalLM", tmp_path)
    edit(tmp_path, **changes)
    with torch_threads(1), pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_it_reads_folders_alone(tmp_path: Path) -> None:
    with torch_threads(1):
        write_gguf(save("llama", tmp_path / "hf"), tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="reads Hugging Face folders alone"):
        load(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="quantization is not possible"):
        load(tmp_path / "hf", quantization="int8")


def test_attention_that_gives_other_numbers_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("PhiForCausalLM", tmp_path)
    monkeypatch.setattr("services.gpu_worker.model.transformers_decoder.attended", lambda q, *_: q)
    with torch_threads(1), pytest.raises(ConfigError, match="its logits are others than by transformers alone"):
        load(tmp_path)
