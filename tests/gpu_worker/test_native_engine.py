"""The native engine against torch's: the same text and nearly the same numbers, for every architecture and type."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.native import build as native_build
from services.gpu_worker.batch import Chunk
from services.gpu_worker.engine import TorchEngine
from services.gpu_worker.engines import load_engine
from services.gpu_worker.model.config import ConfigError, NotNativeError
from services.gpu_worker.native_engine import NativeEngine
from services.gpu_worker.step_inputs import SequenceError
from services.gpu_worker.weights.source import WeightsError
from tests.gpu_worker.any_engine import last_logits, load_native, load_torch
from tests.gpu_worker.gguf_files import write_gguf
from tests.gpu_worker.tiny_models import ARCHITECTURES, Runner, build, prompts, save
from tests.kernels.native_libraries import FOLDER, best_library
from tests.kernels.threads import torch_threads

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
           "head_dim": 64, "initializer_range": 0.08}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(tmp_path: Path, name: str) -> None:
    """Weights in float32, so that only the cache in float16 differs."""
    with torch_threads(1):
        save(name, tmp_path)
        texts = prompts(6, high=200)
        want, got = (last_logits(load(tmp_path, kv_cache_bytes=8 << 20), texts) for load in (load_torch, load_native))
    torch.testing.assert_close(got, want, atol=0.03, rtol=0)


@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_types(tmp_path: Path, type_name: str) -> None:
    """Activations of 8 bits cost a few percent of a logit's spread in a random model."""
    write_gguf(build("llama", **WIDE), tmp_path / "model.gguf", type_name=type_name)
    with torch_threads(1):
        texts = prompts(6, high=60)
        want, got = (
            last_logits(load(tmp_path / "model.gguf", kv_cache_bytes=8 << 20), texts)
            for load in (load_torch, load_native)
        )
    spread = want.std(-1).mean()
    assert ((got - want).std() / spread) < (0.002 if type_name in ("F16", "BF16") else 0.08)


@pytest.mark.parametrize(
    "settings", [{"block_size": 1}, {"block_size": 8}, {"block_size": 64}, {"block_size": 256}], ids=str
)
def test_block_sizes_do_not_show(tmp_path: Path, settings: dict[str, Any]) -> None:
    save("llama", tmp_path)
    texts = prompts(3, low=80, high=300)
    want, got = (last_logits(load_native(tmp_path, kv_cache_bytes=8 << 20, **s), texts) for s in ({}, settings))
    assert torch.equal(got, want)


@pytest.mark.parametrize(("block_size", "head_dim"), [(8, 16), (16, 16), (1, 24), (64, 64)])
def test_a_cache_in_eight_bits_is_torch_s(tmp_path: Path, block_size: int, head_dim: int) -> None:
    """Codes and scales are the specification's, so logits differ by roundings, and from floats by a few percent."""
    with torch_threads(1):
        save("llama", tmp_path, head_dim=head_dim)
        texts = prompts(4, low=60, high=200)
        settings = {"kv_cache_bytes": 8 << 20, "block_size": block_size}
        floats = last_logits(load_torch(tmp_path, **settings), texts)
        native = load_native(tmp_path, kv_cache_dtype="int8", **settings)
        want, got = (last_logits(e, texts) for e in (load_torch(tmp_path, kv_cache_dtype="int8", **settings), native))
        variants = {native.info.variant, load_native(tmp_path, **settings).info.variant}
    torch.testing.assert_close(got, want, atol=0.03, rtol=0)
    assert 0.001 < (want - floats).std() / floats.std(-1).mean() < 0.05
    assert len(variants) == 2


def test_contexts_of_several_splits(tmp_path: Path) -> None:
    """Attention merges runs of 512 keys."""
    save("llama", tmp_path, max_position_embeddings=2048)
    texts = prompts(2, low=1500, high=1600)
    with torch_threads(1):
        want = last_logits(load_torch(tmp_path, kv_cache_bytes=8 << 20), texts, 512)
        native = load_native(tmp_path, kv_cache_bytes=8 << 20)
        torch.testing.assert_close(last_logits(native, texts, 512), want, atol=0.03, rtol=0)
        assert torch.equal(last_logits(native, texts, 512), last_logits(native, texts, 100))


@pytest.mark.parametrize("threads", [1, 2])
def test_steps_of_very_many_pieces(tmp_path: Path, threads: int) -> None:
    """128 KV heads of 520 sequences: more pieces of attention than the 16 bits that count them."""
    sizes = {"num_attention_heads": 128, "num_key_value_heads": 128, "head_dim": 2, "hidden_size": 128}
    save("llama", tmp_path, num_hidden_layers=1, **sizes)
    engine = load_native(tmp_path, kv_cache_bytes=8 << 20, block_size=1)
    engine.decoder.set_num_threads(threads)
    texts = [[i % 290] for i in range(520)]
    want = torch.cat([last_logits(engine, texts[i : i + 260]) for i in (0, 260)])
    assert torch.equal(last_logits(engine, texts), want)


@pytest.mark.parametrize("other", ["gate_proj", "up_proj"])
def test_gate_and_up_of_different_types(tmp_path: Path, other: str) -> None:
    path, types = tmp_path / "model.gguf", {f"model.layers.{i}.mlp.{other}.weight": "F16" for i in range(3)}
    write_gguf(build("llama", **WIDE), path, type_name="Q8_0", types=types)
    with torch_threads(1):
        texts = prompts(6, high=60)
        want, got = (last_logits(load(path, kv_cache_bytes=8 << 20), texts) for load in (load_torch, load_native))
    assert (got - want).std() / want.std(-1).mean() < 0.08


def test_untied_heads_biases_and_left_over_tensors(tmp_path: Path) -> None:
    model = build("llama-biases")
    write_gguf(model, tmp_path / "model.gguf", changes={"model.layers.1.self_attn.o_proj.bias": None})
    with pytest.raises(WeightsError, match=r"blk.1.attn_output.bias.*expected, found None"):
        load_native(tmp_path / "model.gguf", kv_cache_bytes=1 << 20)
    write_gguf(model, tmp_path / "model.gguf", changes={"something.weight": torch.zeros(4, 4)})
    with pytest.raises(WeightsError, match="no place in this architecture: something"):
        load_native(tmp_path / "model.gguf", kv_cache_bytes=1 << 20)


def test_weights_stay_packed(tmp_path: Path) -> None:
    write_gguf(build("llama", **WIDE | {"vocab_size": 4096}), tmp_path / "model.gguf", type_name="Q4_1")
    engine = load_native(tmp_path / "model.gguf", kv_cache_bytes=1 << 20)
    assert engine.decoder.num_weight_bytes <= 1.15 * (tmp_path / "model.gguf").stat().st_size


def test_a_chunk_that_cannot_be_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    save("llama", tmp_path)
    engine = load_native(tmp_path, kv_cache_bytes=1 << 20)
    runner = Runner(engine)
    good, bad = runner.sequence([1, 2, 3], 2), runner.sequence([1, 2, 300], 2)
    with pytest.raises(SequenceError, match="vocabulary") as error:
        engine.step([Chunk(good, 0, 3, True), Chunk(bad, 0, 3, True)])
    assert error.value.sid == bad.sid
    assert engine.step([]) == []
    assert engine.step([Chunk(good, 0, 2, False)]) == [()]


def test_non_finite_numbers_of_logits_name_their_sequence(tmp_path: Path) -> None:
    model = build("llama")
    model.model.embed_tokens.weight.data[7] = torch.nan
    model.save_pretrained(tmp_path)
    engine = load_native(tmp_path, kv_cache_bytes=1 << 20)
    runner = Runner(engine)
    fine, sick = runner.sequence([1, 2, 3], 2), runner.sequence([1, 7, 3], 2)
    with pytest.raises(SequenceError, match="not finite") as error:
        engine.step([Chunk(fine, 0, 3, True), Chunk(sick, 0, 3, True)])
    assert error.value.sid == sick.sid
    assert len(engine.step([Chunk(fine, 0, 3, True)])[0]) == 1


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    save("llama", tmp_path)
    for settings in ({"block_size": 3}, {"kv_cache_dtype": "fp8_e4m3"}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            load_native(tmp_path, **settings)


# --- which engine ---------------------------------------------------------------------------------------------------


def test_native_is_chosen_where_it_can_be(tmp_path: Path) -> None:
    best_library()
    save("llama", tmp_path)
    with torch_threads(1):
        chosen = [
            load_engine(kind, tmp_path, FOLDER.parent, num_threads=1, kv_cache_bytes=1 << 20)
            for kind in ("auto", "native", "torch")
        ]
    assert [type(engine) for engine in chosen] == [NativeEngine, NativeEngine, TorchEngine]
    assert chosen[0].info.variant.startswith("cpu-native-") and chosen[0].info.variant == chosen[1].info.variant
    assert chosen[2].info.variant.startswith("cpu-torch-")
    assert [engine.info.is_native for engine in chosen] == [True, True, False]
    native, by_torch = (replace(e.info, variant="", num_blocks=0, is_native=False) for e in (chosen[0], chosen[2]))
    assert native == by_torch


def test_without_a_compiler_torch_computes_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save("llama", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(native_build, "BUILT", tmp_path / "not an image")
    with torch_threads(1), caplog.at_level(logging.WARNING):
        engine = load_engine("auto", tmp_path, tmp_path / "new", num_threads=1, kv_cache_bytes=1 << 20)
        assert isinstance(engine, TorchEngine)
        assert [r.message for r in caplog.records] == [
            "computing with torch, which is several times slower: no C compiler was found (cc, gcc, clang)"
        ]
        with pytest.raises(ConfigError, match="native is not possible here: no C compiler"):
            load_engine("native", tmp_path, tmp_path / "new", num_threads=1)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("mistral-window", "sliding windows (sliding_window: 20; max_model_len up to that works)"),
        ("smollm3", "layers without rotary embedding"),
        ("granite", "a scaled embedding, scaled residuals"),
        ("olmo2", "norms after attention and feed-forward part, a norm of all query heads together"),
        ("mixtral", "a mixture of experts"),
        ("deepseek2", "a mixture of experts, latent attention, partial rotary embedding"),
        ("starcoder2", "layer norm, the activation gelu_tanh, a feed-forward part without a gate"),
        ("phi3-longrope", "rotary frequencies that follow from the context (longrope)"),
    ],
)
def test_what_native_kernels_do_not_compute_torch_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, what: str
) -> None:
    best_library()
    save(name, tmp_path)
    with torch_threads(1), caplog.at_level(logging.WARNING):
        engine = load_engine("auto", tmp_path, FOLDER.parent, num_threads=1, kv_cache_bytes=1 << 20)
        assert isinstance(engine, TorchEngine)
        reason = f"native kernels do not compute {what}"
        lines = [r.message for r in caplog.records if r.name.startswith("services.")]
        assert lines == [f"computing with torch, which is several times slower: {reason}"]
        with pytest.raises(NotNativeError, match=re.escape(reason)):
            load_engine("native", tmp_path, FOLDER.parent, num_threads=1, kv_cache_bytes=1 << 20)


def test_a_window_that_is_never_left_is_none(tmp_path: Path) -> None:
    save("mistral-window", tmp_path)
    with torch_threads(1):
        texts = prompts(3, high=19)
        got, want = (
            last_logits(load(tmp_path, kv_cache_bytes=1 << 20, max_model_len=20), texts)
            for load in (load_native, load_torch)
        )
    torch.testing.assert_close(got, want, atol=0.03, rtol=0)
