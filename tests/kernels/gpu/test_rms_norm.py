"""RMS normalisation in Triton: against float64, with a residual, quantised, and row by row."""

from __future__ import annotations

import pytest
import torch

from kernels.rms_norm import rms_norm, rms_norm_scaled, rms_norm_scaled_reference
from tests.kernels.gpu.checks import SIZES, assert_rows_alone, randn, same_bits, strided

EPS = 1e-5


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("columns", SIZES)
def test_against_float64(dtype: torch.dtype, columns: int) -> None:
    x, weight = randn(3, columns, dtype=dtype) * 3, randn(columns, dtype=dtype, seed=1)
    x[1] = 0
    want = exact(x, weight).to(dtype)
    tolerance = 2e-6 if dtype is torch.float32 else 1e-3  # one step of float16
    for rows in (x, strided(x), x[:, None].expand(3, 1, columns)):
        got = rms_norm(rows, weight, EPS)
        assert got.dtype == dtype
        torch.testing.assert_close(got, want.view(rows.shape), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_residual_is_added_first_and_rounded(dtype: torch.dtype) -> None:
    for columns in SIZES:
        x, weight = randn(3, columns, dtype=dtype), randn(columns, dtype=dtype, seed=1)
        for residual in (randn(3, columns, dtype=dtype, seed=2), strided(randn(3, columns, dtype=dtype, seed=2))):
            total = residual + x
            got = rms_norm(x, weight, EPS, residual)
            assert same_bits(residual, total)
            assert same_bits(got, rms_norm(total, weight, EPS))


@pytest.mark.parametrize("to", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("group", [None, 32])
def test_quantised(to: torch.dtype, group: int | None) -> None:
    x, weight = randn(3, 96), randn(96, seed=1)
    residual, other = (randn(3, 96, seed=2) for _ in range(2))
    got = rms_norm_scaled(x, weight, EPS, to, group, residual)
    want = rms_norm_scaled_reference(x, weight, EPS, to, group, other)
    torch.testing.assert_close(residual, other, atol=0, rtol=0)
    torch.testing.assert_close(got.scale, want.scale, atol=0, rtol=1e-6)
    # a value at the edge between two codes may take either, by the last bit of the norm
    step = (want.q.float().abs() / 8).clamp_min(1) if to is torch.float8_e4m3fn else 1
    assert ((got.q.float() - want.q.float()).abs() <= step).all()
    assert (got.q.view(torch.uint8) != want.q.view(torch.uint8)).sum() <= 2


def test_a_row_has_one_result() -> None:
    weight = randn(100, seed=1)

    def op(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        residual = x.flip(-1)
        scaled = rms_norm_scaled(x, weight, EPS, torch.int8)
        return rms_norm(x, weight, EPS), rms_norm(x, weight, EPS, residual), residual, scaled.q, scaled.scale

    assert_rows_alone(op, randn(4, 100))


def test_no_rows_are_no_work() -> None:
    assert rms_norm(torch.zeros(0, 8), torch.ones(8), EPS).shape == (0, 8)


def test_refuses_other_shapes() -> None:
    x = randn(2, 8)
    with pytest.raises(ValueError, match="residual"):
        rms_norm(x, torch.ones(8), EPS, torch.zeros(1, 8))
    with pytest.raises(ValueError, match="weight"):
        rms_norm_scaled(x, torch.ones(7), EPS, torch.int8)
    with pytest.raises(TypeError, match="float64"):
        rms_norm(x.double(), torch.ones(8), EPS)
    with pytest.raises(ValueError, match="contiguous"):
        rms_norm(x, torch.ones(8), EPS, torch.zeros(8, 2).t())
