"""Conversions there and back: the same logits and tokens, our files read by others, and what cannot be said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from kernels.packed_weight import dequantize
from services.gateway.tokenization import Tokenizer
from services.gpu_worker.commands.convert import convert, main
from services.gpu_worker.model.config import ConfigError
from services.gpu_worker.weights import to_folder
from services.gpu_worker.weights.loader import open_source
from services.gpu_worker.weights.quant_layout import dequantize as dequantize_blocks
from services.gpu_worker.weights.quant_layout import encode
from services.gpu_worker.weights.quantizers import TYPES, quantize
from services.gpu_worker.weights.source import WeightsError
from shared.gguf_header import read_gguf
from shared.model_source import resolve
from tests.gateway.mixed_strings import mixed_strings
from tests.gpu_worker.any_engine import last_logits, load_torch
from tests.gpu_worker.quantized_folders import quantize as quantize_folder
from tests.gpu_worker.test_default_model import model_path
from tests.gpu_worker.tiny_models import ARCHITECTURES, MORE_ARCHITECTURES, YARN, prompts, save
from tests.kernels.threads import torch_threads

ALL = ARCHITECTURES | MORE_ARCHITECTURES
# What GGUF files have no words for, as llama.cpp computes it.
UNSAID = {
    "llama-yarn-mscale": "truncate false",
    "qwen2-windows": "layers",
    "smollm3": "layers",
    "smollm3-untied": "layers",
    "deepseek3-yarn": "latent",
    "gemma2": "attention_scale",
    "qwen3-moe-tied": "experts",
}
GGUF_CHANGES = {
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 4},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma2-untied": {"query_pre_attn_scalar": 16},
    "gemma3": {"num_hidden_layers": 6, "sliding_window_pattern": 6, "query_pre_attn_scalar": 16},
    "gemma3-linear": {"num_hidden_layers": 6, "sliding_window_pattern": 6, "query_pre_attn_scalar": 16},
    "qwen3-moe-tied": {"norm_topk_prob": True},
    "deepseek3-yarn": {
        "rope_interleave": True,
        "rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.8},
    },
}


def logits_of(path: Path, texts: list[list[int]]) -> torch.Tensor:
    return last_logits(load_torch(path, kv_cache_bytes=8 << 20), texts)


@pytest.mark.parametrize("name", sorted(set(ALL) - {n for n in UNSAID if n not in GGUF_CHANGES}))
def test_there_and_back(tmp_path: Path, name: str) -> None:
    with torch_threads(1):
        save(name, tmp_path / "hf", **GGUF_CHANGES.get(name, {}))
        convert(tmp_path / "hf", tmp_path / "model.gguf", "f32", weights_only=True)
        convert(tmp_path / "model.gguf", tmp_path / "back", "f32", weights_only=True)
        texts = prompts(3, low=33, high=90)
        want = logits_of(tmp_path / "hf", texts)
        for path in (tmp_path / "model.gguf", tmp_path / "back"):
            torch.testing.assert_close(logits_of(path, texts), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["llama-rope3", "gemma2", "mixtral", "phi3-longrope", "qwen3-moe-tied", "olmo2", "deepseek2-groups"]
)
def test_transformers_reads_our_folder(tmp_path: Path, name: str) -> None:
    with torch_threads(1):
        model = save(name, tmp_path / "hf", **GGUF_CHANGES.get(name, {}))
        convert(tmp_path / "hf", tmp_path / "model.gguf", "f32", weights_only=True)
        convert(tmp_path / "model.gguf", tmp_path / "back", "f32", weights_only=True)
        found = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "back", dtype=torch.float32, attn_implementation="eager"
        )
        ids = torch.tensor([prompts(1, low=50, high=51)[0]])
        with torch.no_grad():
            torch.testing.assert_close(found(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", UNSAID)
def test_what_a_file_has_no_words_for_is_named(tmp_path: Path, name: str) -> None:
    save(name, tmp_path / "hf")
    with pytest.raises(ConfigError, match=UNSAID[name]):
        convert(tmp_path / "hf", tmp_path / "model.gguf", "f32", weights_only=True)
    assert not list(tmp_path.glob("*gguf*"))


@pytest.mark.parametrize("type_name", TYPES)
def test_blocks_are_those_of_ggml(type_name: str) -> None:
    weight = torch.randn(7, 96, generator=torch.Generator().manual_seed(0))
    blocks = encode(quantize(weight, type_name))
    kind = gguf.GGMLQuantizationType[type_name]
    np.testing.assert_array_equal(blocks.numpy(), gguf.quantize(weight.numpy(), kind))
    size = gguf.GGML_QUANT_SIZES[kind][1]
    values = dequantize_blocks(type_name, blocks.view(-1, size)).view(7, 96)
    assert torch.equal(values, dequantize(quantize(weight, type_name)))


WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
                        "head_dim": 16}  # fmt: skip


@pytest.mark.parametrize("outtype", ["f16", "bf16", "q8_0", "q4_1"])
def test_types_of_gguf_files(tmp_path: Path, outtype: str) -> None:
    with torch_threads(1):
        save("llama", tmp_path / "hf", **WIDE)
        convert(tmp_path / "hf", tmp_path / "model.gguf", outtype, weights_only=True)
        texts = prompts(3)
        want, got = (logits_of(tmp_path / path, texts) for path in ("hf", "model.gguf"))
    types = {t.name: t.type for t in read_gguf(tmp_path / "model.gguf").tensors.values()}
    assert types["blk.0.attn_q.weight"] == outtype.upper() and types["blk.0.attn_norm.weight"] == "F32"
    assert types["token_embd.weight"] == ("Q8_0" if outtype == "q4_1" else outtype.upper())
    error = (got - want).std() / want.std(-1).mean()
    assert error < {"f16": 0.005, "bf16": 0.03, "q8_0": 0.12, "q4_1": 0.7}[outtype]


def test_a_quantised_folder_is_dequantised(tmp_path: Path) -> None:
    with torch_threads(1):
        quantize_folder(save("llama", tmp_path / "hf", **WIDE), tmp_path / "hf", "awq")
        convert(tmp_path / "hf", tmp_path / "plain", "f32", weights_only=True)
        texts = prompts(2)
        want, got = (logits_of(tmp_path / path, texts) for path in ("hf", "plain"))
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_large_models_are_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_folder, "MAX_SHARD_BYTES", 100_000)
    with torch_threads(1):
        save("llama", tmp_path / "hf")
        convert(tmp_path / "hf", tmp_path / "many", "f32", weights_only=True)
        assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
        texts = prompts(2)
        assert torch.equal(logits_of(tmp_path / "many", texts), logits_of(tmp_path / "hf", texts))


# --- tokenizers -----------------------------------------------------------------------------------------------------

TEXTS = [*mixed_strings()[:60], "<|im_start|>user\nIt's 1234 o'clock<|im_end|>"]


def write_tokenizer(folder: Path, digits: bool) -> None:
    """Byte-level BPE with a few merges and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["th", "he", "Ġt", "1", "12", "123", "er", "Ġa"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys([*alphabet, *pieces]))}
    merges = [("t", "h"), ("h", "e"), ("Ġ", "t"), ("1", "2"), ("12", "3"), ("e", "r"), ("Ġ", "a")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    cut = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cut, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")


def tokenizer_of(path: Path) -> Tokenizer:
    return Tokenizer.from_source(resolve(str(path), path))


@pytest.mark.parametrize("digits", [False, True])
def test_tokenizers_go_along(tmp_path: Path, digits: bool) -> None:
    with torch_threads(1):
        save("llama", tmp_path / "hf")
        write_tokenizer(tmp_path / "hf", digits)
        assert main([str(tmp_path / "hf"), str(tmp_path / "model.gguf")]) == 0
        assert main([str(tmp_path / "model.gguf"), str(tmp_path / "back")]) == 0
    assert read_gguf(tmp_path / "model.gguf").metadata["tokenizer.ggml.pre"] == ("smollm" if digits else "gpt-2")
    want, *others = (tokenizer_of(tmp_path / path) for path in ("hf", "model.gguf", "back"))
    assert want.eos_token_ids and want.bos_token_id is not None
    for found in others:
        assert (found.bos_token_id, found.add_bos) == (want.bos_token_id, want.add_bos)
        assert set(want.eos_token_ids) <= set(found.eos_token_ids)
        for text in TEXTS:
            assert found.encode(text, add_special_tokens=False) == want.encode(text, add_special_tokens=False), text
    template = (tmp_path / "back" / "chat_template.jinja").read_text()
    assert template == (tmp_path / "hf" / "chat_template.jinja").read_text()


def test_other_tokenizers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("llama", tmp_path / "hf")
    backend = Backend(models.BPE(vocab={"▁a": 0, "▁": 1, "a": 2}, merges=[("▁", "a")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.save(str(tmp_path / "hf" / "tokenizer.json"))
    assert main([str(tmp_path / "hf"), str(tmp_path / "model.gguf")]) == 1
    assert "no byte-level BPE tokenizer: no other can be converted (--weights-only" in capsys.readouterr().err
    assert not (tmp_path / "model.gguf").exists()


# --- refusals -------------------------------------------------------------------------------------------------------


def test_nothing_is_overwritten_or_left_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save("llama", tmp_path / "hf")
    (tmp_path / "there").mkdir()
    assert main([str(tmp_path / "hf"), str(tmp_path / "there"), "--weights-only"]) == 1
    assert "exists already" in capsys.readouterr().err
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = 1e6
    model.save_pretrained(tmp_path / "hf")
    for target, outtype in (("new.gguf", "f16"), ("new", "f16")):
        with pytest.raises(WeightsError, match="beyond what"):
            convert(tmp_path / "hf", tmp_path / target, outtype, weights_only=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "there"]


@pytest.mark.parametrize("options", [["x", "y", "--outtype", "q4_0"], ["x", "y.gguf", "--outtype", "q4_k"]])
def test_types_of_the_other_format_are_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(options)


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.slow
def test_the_default_model_there_and_back(tmp_path: Path) -> None:
    with torch_threads(1):
        assert main([str(model_path()), str(tmp_path / "hf"), "--outtype", "f32"]) == 0
        assert main([str(tmp_path / "hf"), str(tmp_path / "model.gguf"), "--outtype", "f32"]) == 0
        assert read_gguf(tmp_path / "model.gguf").metadata["tokenizer.ggml.pre"] == "smollm"
        texts = prompts(2, vocab_size=49152)
        want = logits_of(model_path(), texts)
        for path in ("hf", "model.gguf"):
            torch.testing.assert_close(logits_of(tmp_path / path, texts), want, atol=1e-3, rtol=1e-4)
    found, known = tokenizer_of(tmp_path / "model.gguf"), tokenizer_of(model_path())
    for text in mixed_strings():
        assert found.encode(text, add_special_tokens=False) == known.encode(text, add_special_tokens=False), text
    assert open_source(tmp_path / "hf").config.tied
