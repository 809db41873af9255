"""Weights of 8-bit floats with activations as they are, in Triton: against the specification, alone and with others."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from kernels.matmul import matmul
from kernels.matmul_experts import matmul_experts
from kernels.matmul_w8a8 import ScaledWeight
from kernels.matmul_w8a16 import matmul_w8a16, matmul_w8a16_reference, takes_w8a16
from kernels.routing import routing_of
from kernels.scaled_rows import scale_rows_reference
from tests.kernels.gpu.checks import assert_rows_alone, randn, same_bits, strided


@pytest.fixture(autouse=True)
def split_k(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Cut into splits of few columns, on a device that does not multiply 8-bit floats."""
    from kernels.gpu import launch, split_k  # while the interpreter is on

    monkeypatch.setattr(split_k, "MIN_COLUMNS", 128)
    monkeypatch.setattr(launch, "_FALLBACK", launch.TARGETS["sm_80"])
    return split_k


def weight_of(rows: int, columns: int, group: int | None = None) -> ScaledWeight:
    scaled = scale_rows_reference(randn(rows, columns, seed=1), torch.float8_e4m3fn, group)
    return ScaledWeight(scaled.q, scaled.scale.t().contiguous())


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "group"),
    [(1, 1, 1, None), (3, 63, 100, None), (17, 3, 300, None), (5, 100, 256, 128)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_against_the_specification(tokens: int, rows: int, columns: int, group: int | None, dtype: torch.dtype) -> None:
    weight, x, bias = weight_of(rows, columns, group), randn(tokens, columns, dtype=dtype), randn(rows, seed=2)
    got = matmul(strided(x), weight, bias)
    want = matmul_w8a16_reference(x, weight, bias, torch.float32)
    assert got.dtype == dtype
    tolerance = want.abs().max().item() * (2e-6 if dtype == torch.float32 else 1e-3)
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=0)


@pytest.mark.parametrize("group", [None, 128])
def test_splits_are_added_in_one_order(split_k: ModuleType, monkeypatch: pytest.MonkeyPatch, group: int | None) -> None:
    weight, x, bias = weight_of(40, 384, group), randn(3, 384), randn(40, seed=2)
    apart = matmul_w8a16(x, weight, bias)
    monkeypatch.setattr(split_k, "ENOUGH_UNCUT", 1)
    assert same_bits(matmul_w8a16(x, weight, bias), apart)


def test_a_row_has_one_result() -> None:
    weight = weight_of(9, 256, 128)
    assert_rows_alone(lambda x: (matmul_w8a16(x, weight),), randn(4, 256, dtype=torch.float16), counts=(3, 18))


def test_experts() -> None:
    weight, x = weight_of(3 * 5, 256, 128), randn(4, 256)
    chosen = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]])
    got = matmul_experts(x, weight, routing_of(chosen, 3))
    whole = matmul_w8a16_reference(x, weight, None, torch.float32).view(4, 3, 5)
    for pair, expert in enumerate(chosen.flatten().tolist()):
        torch.testing.assert_close(got[pair], whole[pair // 2, expert], atol=1e-4, rtol=1e-5)


def test_only_floats_on_devices_without_them() -> None:
    from kernels.gpu import launch

    weight, x = weight_of(5, 64), randn(2, 64)
    integers = ScaledWeight(torch.zeros(5, 64, dtype=torch.int8), torch.ones(1, 5))
    assert takes_w8a16(x, weight) and not takes_w8a16(x, integers)
    with pytest.raises(TypeError, match="int8"):
        matmul_w8a16(x, integers)
    with pytest.MonkeyPatch.context() as newer:
        newer.setattr(launch, "_FALLBACK", launch.TARGETS["sm_89"])
        assert not takes_w8a16(x, weight)
