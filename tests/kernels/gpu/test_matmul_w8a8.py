"""Products in eight bits, in Triton: against the specification, by every way of multiplying, alone and among others."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from kernels.matmul import join, matmul, prepare
from kernels.matmul_w8a8 import ScaledWeight, matmul_w8a8, matmul_w8a8_reference
from kernels.scaled_rows import scale_rows, scale_rows_reference
from tests.kernels.gpu.checks import assert_rows_alone, randn, same_bits, strided

FORMATS = (torch.int8, torch.float8_e4m3fn)


@pytest.fixture(autouse=True)
def split_k(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Cut into splits of few columns."""
    from kernels.gpu import split_k  # while the interpreter is on

    monkeypatch.setattr(split_k, "MIN_COLUMNS", 128)
    return split_k


def scaled_weight(dtype: torch.dtype, rows: int, columns: int, group: int | None = None) -> ScaledWeight:
    scaled = scale_rows_reference(randn(rows, columns, seed=1), dtype, group)
    return ScaledWeight(scaled.q, scaled.scale.t().contiguous())


def assert_product(weight: ScaledWeight, num_tokens: int) -> None:
    """The codes of x are exact, so what is left is the rounding of sums."""
    x, bias = randn(num_tokens, weight.in_features), randn(weight.out_features, seed=2)
    scaled = scale_rows_reference(x, weight.q.dtype, weight.group)
    want = scaled.dequantized().double() @ weight.values().double().t() + bias.double()
    got = matmul(strided(x), weight, bias)
    torch.testing.assert_close(got.double(), want, atol=want.abs().max().item() * 2e-6, rtol=0)
    torch.testing.assert_close(matmul_w8a8_reference(scaled, weight, bias, torch.float32), got, atol=2e-4, rtol=0)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 1, 1), (3, 63, 100), (17, 3, 300)])
def test_one_scale_a_row(dtype: torch.dtype, tokens: int, rows: int, columns: int) -> None:
    assert_product(scaled_weight(dtype, rows, columns), tokens)


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_scale_for_each_group_of_columns(dtype: torch.dtype) -> None:
    assert_product(scaled_weight(dtype, 5, 256, 128), 3)


def test_floats_of_eight_bits_on_devices_that_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.gpu import launch

    monkeypatch.setattr(launch, "_FALLBACK", launch.TARGETS["sm_80"])
    for group in (None, 128):
        weight, scaled = scaled_weight(torch.float8_e4m3fn, 5, 256, group), scale_rows(randn(3, 256), FORMATS[1], group)
        want = matmul_w8a8_reference(scaled, weight, None, torch.float32)
        got = matmul_w8a8(scaled, weight, to=torch.float32)
        torch.testing.assert_close(got, want, atol=want.abs().max().item() * 2e-6, rtol=0)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("group", [None, 128])
def test_splits_are_added_in_one_order(
    split_k: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, group: int | None
) -> None:
    weight, x, bias = scaled_weight(dtype, 40, 384, group), randn(3, 384), randn(40, seed=2)
    apart = matmul(x, weight, bias)
    monkeypatch.setattr(split_k, "ENOUGH_UNCUT", 1)
    assert same_bits(matmul(x, weight, bias), apart)


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_row_has_one_result(dtype: torch.dtype) -> None:
    weight = scaled_weight(dtype, 9, 256, 128)
    assert_rows_alone(lambda x: (matmul(x, weight),), randn(4, 256, dtype=torch.float16), counts=(3, 18))


def test_rows_that_are_quantised_already() -> None:
    weight, x = scaled_weight(torch.int8, 9, 100), randn(3, 100)
    scaled = scale_rows(x, torch.int8)
    assert same_bits(matmul(scaled, weight, to=torch.float32), matmul(x, weight))
    with pytest.raises(ValueError, match="to None"):
        matmul(scaled, weight)
    with pytest.raises(ValueError, match="float8_e4m3fn rows"):
        matmul(scale_rows(x, torch.float8_e4m3fn), weight, to=torch.float32)
    with pytest.raises(TypeError, match="another format"):
        matmul(scaled, prepare(randn(9, 100), torch.float32, "cpu"))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in the interpreter
def test_a_row_that_is_not_finite_is_so_alone() -> None:
    x = randn(3, 100)
    x[1, 7] = torch.inf
    assert matmul(x, scaled_weight(torch.int8, 5, 100)).isnan().all(1).tolist() == [False, True, False]


def test_rows_of_several_weights_in_one() -> None:
    a, b, x = scaled_weight(torch.float8_e4m3fn, 5, 64), scaled_weight(torch.float8_e4m3fn, 9, 64), randn(2, 64)
    assert same_bits(matmul(x, join([a, b])), torch.cat((matmul(x, a), matmul(x, b)), 1))
    with pytest.raises(ValueError, match="join"):
        join([a, scaled_weight(torch.int8, 9, 64)])


def test_refuses_other_scales() -> None:
    with pytest.raises(ValueError, match="scales .2, 5."):
        ScaledWeight(torch.zeros(5, 384, dtype=torch.int8), torch.ones(2, 5))
    with pytest.raises(ValueError, match="int16"):
        ScaledWeight(torch.zeros(5, 384, dtype=torch.int16), torch.ones(1, 5))
