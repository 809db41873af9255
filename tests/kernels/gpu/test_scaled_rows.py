"""Rows in eight bits, in Triton: bit by bit what the specification says."""

from __future__ import annotations

import pytest
import torch

from kernels.scaled_rows import ScaledRows, scale_rows, scale_rows_reference
from tests.kernels.gpu.checks import SIZES, assert_rows_alone, randn, same_bits, strided

FORMATS = (torch.int8, torch.float8_e4m3fn)


def assert_same(got: ScaledRows, want: ScaledRows) -> None:
    assert same_bits(got.q, want.q) and same_bits(got.scale, want.scale)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_against_the_specification(to: torch.dtype, dtype: torch.dtype) -> None:
    for columns in SIZES:
        x = randn(3, columns, dtype=dtype) * 5
        x[1] = 0
        assert_same(scale_rows(x, to), scale_rows_reference(x, to))
        assert_same(scale_rows(strided(x), to), scale_rows_reference(x, to))
        assert_same(scale_rows(strided(x.t()).t(), to), scale_rows_reference(x, to))
    x = randn(2, 96, dtype=dtype)
    assert_same(scale_rows(x, to, 32), scale_rows_reference(x, to, 32))


def test_every_code_of_e4m3_and_every_tie_between_two() -> None:
    codes = torch.arange(0, 0x7F, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    between = (values[1:] + values[:-1]) / 2
    x = torch.cat((values, between, between.nextafter(values[1:]), between.nextafter(values[:-1])))
    x = torch.cat((x, -x))[None]
    got = scale_rows(x, torch.float8_e4m3fn)  # the largest is 448, so the scale is 1
    assert got.scale.item() == 1.0
    assert same_bits(got.q, x.to(torch.float8_e4m3fn))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("to", FORMATS)
def test_what_is_not_finite_shows_in_the_scale_of_its_group_alone(to: torch.dtype) -> None:
    x = randn(3, 64)
    x[0, 3], x[1, 40] = torch.nan, -torch.inf
    for scales in (scale_rows(x, to, 32).scale, scale_rows_reference(x, to, 32).scale):
        assert scales.isnan().tolist() == [[True, False], [False, True], [False, False]]


@pytest.mark.parametrize("to", FORMATS)
def test_the_smallest_rows_stay_finite(to: torch.dtype) -> None:
    got = scale_rows(torch.full((1, 5), 1e-42), to)
    assert got.dequantized().abs().max() < 1e-30 and got.scale.isfinite().all()


@pytest.mark.parametrize("to", FORMATS)
def test_a_row_has_one_result(to: torch.dtype) -> None:
    def op(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = scale_rows(x, to)
        return out.q, out.scale

    assert_rows_alone(op, randn(4, 100))


def test_error_is_half_a_step() -> None:
    x = randn(4, 100)
    step = x.abs().amax(-1, keepdim=True) / 127
    assert ((scale_rows(x, torch.int8).dequantized() - x).abs() <= step * 0.5001).all()
    relative = (scale_rows(x, torch.float8_e4m3fn).dequantized() - x).abs() / x.abs()
    assert relative.median() < 1 / 16


def test_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="int16"):
        scale_rows(randn(1, 32), torch.int16)
    for group in (8, 48, 64):
        with pytest.raises(ValueError, match="groups of"):
            scale_rows(randn(1, 96), torch.int8, group)
    with pytest.raises(ValueError, match="scale_rows"):
        scale_rows(randn(96), torch.int8)
