"""Quantised folders: their matrices are what the codes mean, and the model computes what transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.packed_weight import Codes, dequantize
from services.gpu_worker.engine import TorchEngine
from services.gpu_worker.model.config import ConfigError
from services.gpu_worker.weights.loader import load_weights, open_source
from services.gpu_worker.weights.source import WeightsError
from services.gpu_worker.weights.stored_tensors import unpack_fields
from tests.gpu_worker.any_engine import last_logits, load_native, load_torch
from tests.gpu_worker.quantized_folders import FORMATS, quantize
from tests.gpu_worker.tiny_models import prompts, save
from tests.kernels.threads import torch_threads

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "num_hidden_layers": 1}  # fmt: skip
PLACES = {"self_attn.q_proj": "q", "self_attn.v_proj": "v", "mlp.up_proj": "up", "mlp.down_proj": "down"}


CODES_OF = {
    "awq": "Q4_1", "gptq-4": "Q4_1", "gptq-4-v2": "Q4_1", "gptq-format": "Q4_1", "gptq-symmetric": "Q4_0",
    "gptq-mislabelled": "Q4_0", "packed-4": "Q4_0", "packed-4-zeros": "Q4_1", "packed-8-channel": "Q8_0",
}  # fmt: skip


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("shape", [(5,), (5, 3)])
def test_fields_are_unpacked_lowest_bits_first(bits: int, shape: tuple[int, ...]) -> None:
    """Words may be negative as stored, lie apart, and have room for more fields than there are."""
    words = torch.randint(-(1 << 31), 1 << 31, shape, generator=torch.Generator().manual_seed(bits)).int()
    count = 5 * 32 // bits - 1
    got = unpack_fields(words.t().contiguous().t(), bits, count)
    assert got.dtype == torch.int32 and got.shape == (count, *shape[1:])
    columns = words.view(5, -1).t().tolist()
    for column, fields in zip(columns, got.view(count, -1).t().tolist(), strict=True):
        stream = sum((word & 0xFFFFFFFF) << 32 * n for n, word in enumerate(column))
        assert fields == [stream >> bits * n & (1 << bits) - 1 for n in range(count)]


@pytest.mark.parametrize("name", FORMATS)
def test_formats(tmp_path: Path, name: str) -> None:
    with torch_threads(1):
        model = save("llama", tmp_path, **SIZES)
        quantize(model, tmp_path, name)
        source = open_source(tmp_path)
        for module, place in PLACES.items():
            want = model.get_submodule(f"model.layers.0.{module}").weight
            got = torch.full(want.shape, torch.nan)
            source.read_into(f"layers.0.{place}.weight", got)
            assert want.std() > 0.01
            torch.testing.assert_close(got, want.detach(), atol=1e-6, rtol=1e-5)
            start, end = 5, want.shape[0] - 3  # runs that begin and end within a word
            part = source.stored(f"layers.0.{place}.weight", start, end)
            type_name = part.type_name if isinstance(part, Codes) else ""
            assert type_name == (CODES_OF.get(name, "") if want.shape[1] % 32 == 0 else "")
            values = dequantize(part) if isinstance(part, Codes) else part.float()
            torch.testing.assert_close(values, want.detach()[start:end], atol=3e-4, rtol=1e-3)
        texts = prompts(2)
        got = last_logits(TorchEngine.load(tmp_path, kv_cache_bytes=1 << 20), texts)
        with torch.no_grad():
            want = torch.stack([model(torch.tensor([text])).logits[0, -1] for text in texts])
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "packed-4", "packed-8-channel", "fp8-block", "nf4"])
def test_native_kernels_compute_with_them(tmp_path: Path, name: str) -> None:
    """Codes stay codes; activations of 8 bits cost a few percent of a logit's spread in a random model."""
    with torch_threads(1):
        quantize(save("llama", tmp_path, **SIZES), tmp_path, name)
        texts = prompts(4)
        want, got = (last_logits(load(tmp_path, kv_cache_bytes=1 << 20), texts) for load in (load_torch, load_native))
    assert (got - want).std() / want.std(-1).mean() < (0.08 if name in CODES_OF else 0.002)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "aqlm"}, "quantization_config.quant_method: 'aqlm' is not supported"),
        ({"quant_method": None}, "quantization_config.quant_method is missing"),
        ({"quant_method": "awq", "version": "gemv"}, "quantization_config.version: 'gemv'"),
        ({"quant_method": "awq", "bits": 3}, "quantization_config.bits: 3"),
        ({"quant_method": "awq", "zero_point": False}, "quantization_config.zero_point"),
        ({"quant_method": "gptq"}, "quantization_config.bits is missing"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format: 'marlin'"),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 8}}},
            r"quantization_config.dynamic: '\+:.\*down",
        ),
        ({"quant_method": "gptq", "bits": 4, "format": "bitblas"}, "quantization_config.format: 'bitblas'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format: 'marlin-24'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups is missing"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "quantization_config.sparsity_config.format: 'sparse-24-bitmask'",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_key(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save("llama", tmp_path, **SIZES)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": changes}))
    with pytest.raises(ConfigError, match=message):
        open_source(tmp_path)


Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("name", "part", "tensor", "message"),
    [
        ("awq", "qzeros", None, "q_proj.qzeros' is missing"),
        ("awq", "qweight", torch.zeros(64, 8), "q_proj.qweight': F32 is not supported"),
        ("awq", "scales", torch.ones(3, 64), "3 groups do not divide 64"),
        ("awq", "g_idx", torch.zeros(64), "q_proj.g_idx' has no place in this quantisation"),
        ("gptq-4", "qzeros", torch.zeros(2, 7, dtype=torch.int32), "q_proj.qzeros': shape"),
        ("gptq-4", "g_idx", torch.full((64,), 2, dtype=torch.int32), "g_idx': a group is not one of the 2"),
        ("gptq-3", "qweight", torch.zeros(7, 64, dtype=torch.int32), "not whole fields of 3 bits"),
        ("gptq-symmetric", "bias", torch.ones(64), "no place in this architecture: .*q_proj.bias"),
        ("packed-4", "weight_shape", torch.tensor([64, 1 << 40]), "weight_shape'"),
        ("packed-4", "weight_scale", torch.ones(64, 0), "0 groups"),
        ("fp8-block", "weight_scale_inv", torch.ones(3, 3), "are no scales for"),
        ("fp8-tensor", "weight_scale", torch.ones(1, dtype=torch.int64), "weight_scale': I64"),
        ("nf4", "weight.absmax", torch.ones(3), "absmax': shape"),
        ("nf4", "weight.quant_map", torch.ones(17), "quant_map': shape"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", torch.ones(9, dtype=torch.uint8), "quant_state"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", None, "quant_state.bitsandbytes__nf4' is missing"),
        ("int8", "SCB", torch.ones(3), "SCB': shape"),
        ("int8", "weight_format", torch.tensor(2, dtype=torch.uint8), "weight_format': rows for a kind of GPU"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, name: str, part: str, tensor: torch.Tensor | None, message: str
) -> None:
    quantize(save("llama", tmp_path, **SIZES), tmp_path, name)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(Q + part, None)
    save_file(tensors | ({} if tensor is None else {Q + part: tensor}), tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=message):
        load_weights(open_source(tmp_path))
