"""The gate of the feed-forward part in Triton: against torch in float64, quantised, and row by row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from kernels.gated_activation import (
    ACTIVATIONS,
    gated_activation,
    gated_activation_reference,
    gated_activation_scaled,
    gated_activation_scaled_reference,
)
from tests.kernels.gpu.checks import SIZES, assert_rows_alone, randn, strided

TORCHS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_against_float64(activation: str, dtype: torch.dtype) -> None:
    for columns in SIZES:
        x = randn(2, 2 * columns, dtype=dtype) * 4
        want = (TORCHS[activation](x[:, :columns].double()) * x[:, columns:].double()).to(dtype)
        tolerance = 4e-6 if dtype is torch.float32 else 1e-3
        for got in (gated_activation(strided(x), activation), gated_activation_reference(x, activation)):
            assert got.dtype == dtype
            torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("to", [torch.int8, torch.float8_e4m3fn])
def test_quantised(to: torch.dtype) -> None:
    x = randn(2, 192) * 3
    for activation, group in (("silu", None), ("gelu_tanh", 32)):
        got = gated_activation_scaled(x, activation, to, group)
        want = gated_activation_scaled_reference(x, activation, to, group)
        torch.testing.assert_close(got.scale, want.scale, atol=0, rtol=1e-5)
        assert (got.q.view(torch.uint8) != want.q.view(torch.uint8)).sum() <= 2  # at the edge between two codes
        torch.testing.assert_close(got.dequantized(), want.dequantized(), atol=0.1, rtol=0.13)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_row_has_one_result(activation: str) -> None:
    assert_rows_alone(lambda x: [gated_activation(x, activation)], randn(4, 126), counts=(5,))


def test_more_columns_than_a_program_has(monkeypatch: pytest.MonkeyPatch) -> None:
    import kernels.gpu.gated_activation as op  # not before the interpreter is switched on

    monkeypatch.setattr(op, "COLUMNS", 32)
    x = randn(2, 200)
    torch.testing.assert_close(gated_activation(x, "silu"), gated_activation_reference(x, "silu"))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, in the interpreter
def test_extremes_are_zero_or_the_gate() -> None:
    x = torch.tensor([[-200.0, 200.0, 1.0, 1.0]])
    for activation in ACTIVATIONS:
        assert gated_activation(x, activation).tolist() == [[0.0, 200.0]]


def test_refuses_other_shapes_and_names() -> None:
    with pytest.raises(ValueError, match="relu"):
        gated_activation(randn(2, 4), "relu")
    with pytest.raises(ValueError, match="halves"):
        gated_activation(randn(2, 3), "silu")
