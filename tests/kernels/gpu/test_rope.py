"""Rotary embedding in Triton: pairs turn by their angle, in place, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from kernels.rope import rope_at, rope_at_reference
from tests.kernels.gpu.checks import assert_rows_alone, randn, same_bits, strided

NUM_POSITIONS = 50


def tables(half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(NUM_POSITIONS)[:, None] * torch.logspace(0, -2, half)
    return angles.cos() * 1.25, angles.sin() * 1.25  # as with a factor on both


def turned(x: torch.Tensor, positions: torch.Tensor, half: int, interleaved: bool) -> torch.Tensor:
    """In complex float64."""
    cos, sin = (table[positions.long()].double().unsqueeze(1) for table in tables(half))
    rotary = x[..., : 2 * half].double()
    pairs = rotary.unflatten(-1, (half, 2) if interleaved else (2, half))
    a, b = pairs.unbind(-1 if interleaved else -2)
    product = torch.complex(a, b) * torch.complex(cos, sin)
    out = torch.stack((product.real, product.imag), dim=-1 if interleaved else -2).flatten(-2)
    return torch.cat((out, x[..., 2 * half :].double()), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_against_complex_numbers(interleaved: bool, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 49, 7], dtype=torch.int32)
    for heads, dim, half in ((1, 2, 1), (3, 64, 16), (17, 100, 50)):
        whole = randn(3, heads + 2, dim, dtype=dtype)
        want = turned(whole[:, :heads], positions, half, interleaved).to(dtype)
        for op in (rope_at, rope_at_reference):
            x = strided(whole)
            op(x[:, :heads], positions, *tables(half), interleaved)
            tolerance = 2e-6 if dtype is torch.float32 else 2e-3
            torch.testing.assert_close(x[:, :heads], want, atol=tolerance, rtol=tolerance)
            assert same_bits(x[:, heads:], whole[:, heads:])
            assert same_bits(x[..., 2 * half :], whole[..., 2 * half :])


def test_a_row_has_one_result() -> None:
    def op(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone()
        rope_at(x, torch.full(x.shape[:1], 31, dtype=torch.int32), *tables(16))
        return [x]

    assert_rows_alone(op, randn(4, 5, 40), counts=(5,))


def test_refuses_other_shapes_and_types() -> None:
    cos, sin = tables(16)
    positions = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="rope_at"):
        rope_at(randn(2, 1, 16), positions, cos, sin)
    with pytest.raises(ValueError, match="side by side"):
        rope_at(randn(2, 40, 3).transpose(1, 2), positions, cos, sin)
    with pytest.raises(TypeError, match="rope_at"):
        rope_at(randn(2, 1, 32), positions.long(), cos, sin)
