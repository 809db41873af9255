"""Quantised files as products on a GPU take them: every format keeps its bits, and means what it meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.matmul import DeviceWeight, prepare
from kernels.matmul_float import FloatWeight
from kernels.matmul_w8a8 import ScaledWeight
from kernels.packed_weight import SCHEMES, dequantize
from kernels.planar_weight import PlanarWeight, grouped, pack_planes, unpack_planes
from kernels.routing import routing_of
from services.gpu_worker.model.layers import ExpertWeights, JoinedExperts, LayerWeights
from services.gpu_worker.weights.loader import load_weights, open_source
from services.gpu_worker.weights.on_device import DeviceExperts, DeviceLinear, OnDevice
from services.gpu_worker.weights.placement import InMemory
from services.gpu_worker.weights.source import Coded
from tests.gpu_worker.quantized_folders import FORMATS, quantize
from tests.gpu_worker.test_quantization import PLACES, SIZES
from tests.gpu_worker.tiny_models import save
from tests.kernels.random_weights import random_codes

CPU = torch.device("cpu")
AS_FLOATS = {"nf4", "nf4-nested", "fp8-block", "float-blocks"}  # blocks of 48 columns are in no product
AS_BYTES = {"fp8-tensor", "fp8-channel", "float-quantized"}


def values_of(codes: Coded) -> torch.Tensor:
    """float32 [N, K], of the weight as it is on the device."""
    weight: DeviceWeight = prepare(codes, torch.float32, "cpu")
    if isinstance(weight, PlanarWeight):
        return unpack_planes(weight)
    return weight.values() if isinstance(weight, ScaledWeight) else weight.tensor


@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_folders(tmp_path: Path, name: str) -> None:
    model = save("llama", tmp_path, **SIZES)
    quantize(model, tmp_path, name)
    source = open_source(tmp_path)
    for module, place in PLACES.items():
        want = model.get_submodule(f"model.layers.0.{module}").weight.detach()
        codes = source.coded(f"layers.0.{place}.weight")
        if name in AS_FLOATS:
            assert codes is None
            continue
        assert codes is not None and isinstance(codes, ScaledWeight) == (name in AS_BYTES)
        torch.testing.assert_close(values_of(codes), want, atol=want.abs().max().item() * 1e-3, rtol=0)
    assert source.coded("layers.0.attn_norm.weight") is None


def test_int8_with_activations_that_are_meant_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, writer = FORMATS["int-quantized"]
    [(name, group)] = config["config_groups"].items()
    changed = config | {"config_groups": {name: group | {"input_activations": {"num_bits": 8, "dynamic": True}}}}
    monkeypatch.setitem(FORMATS, "int-quantized", (changed, writer))
    model = save("llama", tmp_path, **SIZES)
    quantize(model, tmp_path, "int-quantized")
    codes = open_source(tmp_path).coded("layers.0.q.weight")
    assert isinstance(codes, ScaledWeight) and codes.q.dtype == torch.int8
    want = model.get_submodule("model.layers.0.self_attn.q_proj").weight
    torch.testing.assert_close(codes.values(), want.detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("method", ["int8", "int4", "fp8"])
def test_what_is_quantised_while_it_is_loaded(tmp_path: Path, method: str) -> None:
    save("llama", tmp_path, **SIZES)
    source = open_source(tmp_path, method)
    codes, want = source.coded("layers.0.up.weight"), torch.empty(source.shapes["layers.0.up.weight"])
    source.read_into("layers.0.up.weight", want)
    assert codes is not None and isinstance(codes, ScaledWeight) == (method == "fp8")
    torch.testing.assert_close(values_of(codes), want, atol=1e-4, rtol=1e-3)
    assert source.coded("embedding.weight") is None


@pytest.mark.parametrize("name", ["gptq-act-order", "packed-8-channel", "nf4"])
def test_products_of_a_model_that_is_loaded(tmp_path: Path, name: str) -> None:
    quantize(save("llama", tmp_path, **SIZES), tmp_path, name)
    want = load_weights(open_source(tmp_path), placement=InMemory()).layers[0]
    got = load_weights(open_source(tmp_path), placement=OnDevice(CPU, torch.float32)).layers[0]
    x = torch.randn(3, SIZES["hidden_size"])
    for mine, other in ((got.qkv, want.qkv), (got.out, want.out)):
        torch.testing.assert_close(mine(x), other(x), atol=5e-3, rtol=0)
    assert isinstance(got.out, DeviceLinear)
    assert isinstance(got.out.parts[0], FloatWeight if name == "nf4" else PlanarWeight)


EXPERTS, SIZE = 6, 32


def experts_on_device(folder: Path, method: str) -> tuple[ExpertWeights, ExpertWeights, LayerWeights]:
    """The same layer's for torch and for a GPU, and all of the latter."""
    torchs, gpus = (
        load_weights(open_source(folder, method), placement=placement).layers[-1]
        for placement in (InMemory(), OnDevice(CPU, torch.float32))
    )
    assert isinstance(torchs.ffn, ExpertWeights) and isinstance(gpus.ffn, ExpertWeights)
    return torchs.ffn, gpus.ffn, gpus


@pytest.mark.parametrize(
    ("method", "kind", "tolerance"),
    [("none", FloatWeight, 1e-5), ("int4", PlanarWeight, 5e-3), ("fp8", ScaledWeight, 0.06)],
)
def test_experts_are_one_weight_in_their_codes(tmp_path: Path, method: str, kind: type[Any], tolerance: float) -> None:
    save("qwen3-moe", tmp_path, hidden_size=64, moe_intermediate_size=SIZE, intermediate_size=96, num_hidden_layers=1,
         mlp_only_layers=[], head_dim=16)  # fmt: skip
    want, got, _ = experts_on_device(tmp_path, method)
    assert isinstance(want.experts, tuple) and isinstance(got.experts, JoinedExperts)
    routing = routing_of(torch.arange(EXPERTS).repeat(3, 1), EXPERTS)
    for name, x in (("into", torch.randn(3, 64)), ("down", torch.randn(3 * EXPERTS, SIZE))):
        product: Any = getattr(got.experts, name)
        assert [type(part) for part in product.parts] == [kind]
        y = product(x, routing).view(3, EXPERTS, -1)
        for number, expert in enumerate(want.experts):
            rows = x if name == "into" else x.view(3, EXPERTS, -1)[:, number].contiguous()
            other = getattr(expert, name)(rows)
            torch.testing.assert_close(y[:, number], other, atol=tolerance * other.abs().max().item(), rtol=0)


def test_what_leads_to_latents_stays_in_its_codes(tmp_path: Path) -> None:
    save("deepseek3", tmp_path)
    _, _, layer = experts_on_device(tmp_path, "fp8")
    assert layer.latent is not None
    products: list[Any] = [layer.qkv, layer.out, layer.latent.q_up]
    assert [type(part) for product in products for part in product.parts] == [ScaledWeight] * 3
    ups: list[Any] = [layer.latent.key_up, layer.latent.value_up]
    assert [type(part) for up in ups for part in up.parts] == [FloatWeight] * 2


def test_experts_of_different_formats_become_floats() -> None:
    class Expert:
        def __init__(self, part: Coded | torch.Tensor) -> None:
            self.part = part

        def floats(self) -> torch.Tensor:
            raise AssertionError("read once, as it is stored")

        def stored(self) -> list[Coded | torch.Tensor]:
            return [self.part]

    codes, floats = random_codes("Q4_K", 4, 256), torch.randn(4, 256)
    experts = [Expert(codes), Expert(floats)]
    product = OnDevice(CPU, torch.float32).experts(experts, experts).into
    assert isinstance(product, DeviceExperts) and isinstance(product.parts[0], FloatWeight)
    want = torch.cat((unpack_planes(pack_planes(grouped(codes))), floats))
    assert torch.equal(product.parts[0].tensor, want)


class ThreeParts:
    """Rows of two formats, as the loader gives them."""

    def __init__(self) -> None:
        self.parts = [random_codes(name, 4, 256) for name in ("Q4_K", "Q4_K", "Q6_K")]

    def stored(self) -> list[Coded | torch.Tensor]:
        return [*self.parts]

    def floats(self) -> torch.Tensor:
        return torch.cat([dequantize(part) for part in self.parts])


def test_neighbours_of_one_format_are_multiplied_at_once() -> None:
    rows, bias, x = ThreeParts(), torch.randn(12), torch.randn(2, 256)
    product = OnDevice(CPU, torch.float32).projection(rows, bias)
    assert [part.out_features for part in product.parts] == [8, 4]
    want = x @ rows.floats().t() + bias
    torch.testing.assert_close(product(x), want, atol=want.abs().max().item() * 2e-3, rtol=0)


def test_bits_of_every_type_are_kept() -> None:
    for name, scheme in SCHEMES.items():
        weight = prepare(random_codes(name, 4, 256), torch.float16, "cpu")
        assert isinstance(weight, PlanarWeight) and weight.bits == scheme.bits
