"""When a library is given a product, and that it computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernels.matmul import matmul
from kernels.matmul_float import FloatWeight
from kernels.matmul_w8a8 import ScaledWeight

HALF = torch.bfloat16


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the libraries' functions as they are called; they compute."""
    called: list[str] = []

    def heard(owner: Any, name: str) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: called.append(name) or real(*a, **k))

    heard(F, "linear")
    heard(torch, "_scaled_mm")
    return called


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def scaled(rows: int, columns: int, dtype: torch.dtype = torch.float8_e4m3fn, groups: int = 1) -> ScaledWeight:
    return ScaledWeight((randn(rows, columns) * 20).to(dtype), randn(groups, rows).abs() + 0.1)


@pytest.mark.parametrize(
    ("weight", "library"),
    [
        (FloatWeight(randn(48, 160).to(HALF)), "linear"),
        (scaled(48, 160), "_scaled_mm"),
        (scaled(48, 160, torch.int8), ""),  # their sums of integers are exact here
        (scaled(48, 256, groups=2), ""),  # it has a scale for all columns
        (scaled(40, 160), ""),  # it takes multiples of 16
        (scaled(48, 152), ""),
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_many_rows_are_a_librarys_where_rows_need_not_be_alone(
    weight: FloatWeight | ScaledWeight, library: str, with_bias: bool, calls: list[str]
) -> None:
    x = randn(64, weight.in_features).to(HALF)
    bias = randn(weight.out_features) if with_bias else None
    want = matmul(x, weight, bias)
    few, logits = matmul(x[:63], weight, bias, fast=True), matmul(x, weight, None, torch.float32, fast=True)
    assert [name for name in calls if name != library] == [] and torch.equal(few, want[:63])
    assert not (isinstance(weight, FloatWeight) and calls), "logits would be rounded"
    calls.clear()
    got = matmul(x, weight, bias, fast=True)
    assert calls == ([library] if library else [])
    assert (got - want).abs().max() < 0.01 * want.abs().max() and got.dtype == HALF
    assert torch.allclose(logits, matmul(x, weight, None, torch.float32), atol=float(want.abs().max()) * 1e-5)


@pytest.mark.parametrize(("capability", "library"), [((8, 0), []), ((8, 9), ["_scaled_mm"]), ((9, 0), ["_scaled_mm"])])
def test_a_card_without_units_for_8_bit_floats_has_no_library_for_them(
    capability: tuple[int, int], library: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels import matmul_w8a8

    class OnCard(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    x = torch.zeros(64, 160, dtype=torch.float8_e4m3fn).as_subclass(OnCard)
    assert matmul_w8a8._library_multiplies(x, scaled(48, 160)) == bool(library)
