"""Quantisation while loading: ggml's own bits, close logits, less memory, another variant, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kernels.packed_weight import Codes, dequantize
from services.gpu_worker.model.config import ConfigError
from services.gpu_worker.planning import Limits, plan_cpu
from services.gpu_worker.weights.loader import open_source
from services.gpu_worker.weights.online import TYPES, is_quantized
from services.gpu_worker.weights.outline import outline
from services.gpu_worker.weights.quantizers import TYPES as QUANTIZERS
from services.gpu_worker.weights.quantizers import quantize
from services.gpu_worker.weights.source import WeightsError
from tests.gpu_worker.any_engine import last_logits, load_native, load_torch
from tests.gpu_worker.gguf_files import write_gguf
from tests.gpu_worker.quantized_folders import quantize as quantize_folder
from tests.gpu_worker.tiny_models import prompts, save
from tests.kernels.threads import torch_threads

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "num_hidden_layers": 2, "tie_word_embeddings": True}  # fmt: skip
ERRORS = {"int8": 0.05, "int4": 0.7, "fp8": 0.3}  # of a random model's logits, in their own spread


@pytest.mark.parametrize("type_name", QUANTIZERS)
def test_codes_are_those_of_ggml(type_name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 96, generator=generator)
    weight[3] = 0.0
    weight[4, 7] = 1000.0
    codes = quantize(weight, type_name)
    kind = gguf.GGMLQuantizationType[type_name]
    want = gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind)
    np.testing.assert_array_equal(dequantize(codes).numpy(), want)


@pytest.mark.parametrize("method", TYPES)
def test_matrices_are_rounded_and_others_stay(tmp_path: Path, method: str) -> None:
    save("llama-biases", tmp_path, **SIZES)
    plain, source = open_source(tmp_path), open_source(tmp_path, method)
    assert source.shapes == plain.shapes and source.identity != plain.identity
    for place, shape in source.shapes.items():
        want, got = torch.empty(shape), torch.empty(shape)
        plain.read_into(place, want)
        source.read_into(place, got)
        if not is_quantized(place):
            assert torch.equal(got, want)
            continue
        assert 0.002 < (got - want).std() / want.std() < {"int8": 0.01, "int4": 0.15, "fp8": 0.04}[method]
        stored = source.stored(place, 3, shape[0])
        values = dequantize(stored) if isinstance(stored, Codes) else stored.float()
        torch.testing.assert_close(
            values, got[3:], atol=1e-7 if method == "fp8" else 0, rtol=1e-3 if method == "fp8" else 0
        )


@pytest.mark.parametrize("method", TYPES)
@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_logits_stay_close_on_both_engines(tmp_path: Path, method: str, kind: str) -> None:
    with torch_threads(1):
        model, path = save("llama", tmp_path, **SIZES), tmp_path
        if kind == "gguf":
            path = tmp_path / "model.gguf"
            write_gguf(model, path, type_name="F16")
        texts = prompts(4)
        plain = load_torch(path, kv_cache_bytes=1 << 20)
        engines = [load(path, kv_cache_bytes=1 << 20, quantization=method) for load in (load_torch, load_native)]
        want = last_logits(plain, texts)
        spread = want.std(-1).mean()
        by_torch, by_native = (last_logits(engine, texts) for engine in engines)
        assert 0.002 < (by_torch - want).std() / spread < ERRORS[method]
        assert (by_native - by_torch).std() / spread < 0.08
        variants = {engine.info.variant for engine in (plain, *engines)}
        assert len(variants) == 3


@pytest.mark.parametrize(("method", "share"), [("int8", 0.54), ("int4", 0.28), ("fp8", 1.0)])
def test_native_weights_shrink_as_planned(tmp_path: Path, method: str, share: float) -> None:
    with torch_threads(1):
        save("llama", tmp_path, **SIZES).half().save_pretrained(tmp_path)
        plain = load_native(tmp_path, kv_cache_bytes=1 << 20)
        engine = load_native(tmp_path, kv_cache_bytes=1 << 20, quantization=method)
    embedding = 2 * 304 * SIZES["hidden_size"]
    matrices = plain.decoder.num_weight_bytes - embedding
    assert engine.decoder.num_weight_bytes - embedding == pytest.approx(share * matrices, rel=0.02)
    plan = plan_cpu(outline(tmp_path, method), Limits(16, 64, 4, kv_cache_bytes=1 << 20))
    assert plan.weight_bytes == pytest.approx(engine.decoder.num_weight_bytes, rel=0.03)


def test_what_is_quantised_already_is_refused_unless_it_is_the_same(tmp_path: Path) -> None:
    with torch_threads(1):
        model = save("llama", tmp_path / "hf", **SIZES | {"tie_word_embeddings": False})
        write_gguf(model, tmp_path / "8.gguf", type_name="Q8_0")
        quantize_folder(model, tmp_path / "hf", "awq")
    for path, how in ((tmp_path / "hf", "awq"), (tmp_path / "8.gguf", "Q8_0")):
        for open_it in (open_source, outline):
            with pytest.raises(ConfigError, match=rf"int4 is not possible, tensor .*is quantised already \({how}\)"):
                open_it(path, "int4")
    assert open_source(tmp_path / "8.gguf", "int8").shapes
    with pytest.raises(ConfigError, match="quantization: 'int3' is not supported"):
        open_source(tmp_path / "8.gguf", "int3")


def test_rows_that_are_no_whole_groups_are_refused(tmp_path: Path) -> None:
    save("llama", tmp_path)
    with pytest.raises(WeightsError, match=r"proj.weight': \d+ columns are not whole groups of 32"):
        open_source(tmp_path, "int8")
    assert open_source(tmp_path, "fp8").shapes


def test_experts_are_quantised_too(tmp_path: Path) -> None:
    with torch_threads(1):
        save(
            "qwen3-moe", tmp_path, hidden_size=64, num_attention_heads=8, moe_intermediate_size=32, intermediate_size=64
        )
        engine = load_torch(tmp_path, kv_cache_bytes=1 << 20, quantization="int8")
        want, got = (
            last_logits(e, prompts(3)) for e in (load_torch(tmp_path, kv_cache_bytes=1 << 20), engine)
        )  # fmt: skip
    assert 0.002 < (got - want).std() / want.std(-1).mean() < 0.2
