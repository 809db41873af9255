"""Products with weights of floats, in Triton: against float64, in one program and in parts, alone and among others."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from kernels.matmul import join, matmul, prepare
from kernels.matmul_float import matmul_float
from tests.kernels.gpu.checks import assert_rows_alone, randn, same_bits, strided


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    y = x.double() @ weight.double().t()
    return y if bias is None else y + bias.double()


@pytest.fixture
def split_k(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """How products are cut, into splits of few columns here."""
    from kernels.gpu import split_k  # while the interpreter is on

    monkeypatch.setattr(split_k, "MIN_COLUMNS", 64)
    return split_k


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 1, 1), (3, 63, 100), (17, 100, 63), (1, 65, 130)])
@pytest.mark.usefixtures("split_k")
def test_against_float64(dtype: torch.dtype, tokens: int, rows: int, columns: int) -> None:
    x, w, bias = (randn(*s, dtype=dtype, seed=i) for i, s in enumerate([(tokens, columns), (rows, columns), (rows,)]))
    weight = prepare(w, dtype, "cpu")
    tolerance = 2e-5 if dtype is torch.float32 else 2e-3
    for given in (x, strided(x), strided(x.t().contiguous()).t()):
        got = matmul(given, weight, bias)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), exact(x, w, bias), atol=tolerance * 8, rtol=tolerance)
    logits = matmul(x, weight, to=torch.float32)
    torch.testing.assert_close(logits.double(), exact(x, w), atol=2e-5, rtol=2e-5)


def test_splits_are_added_in_one_order_by_one_program_and_by_two_kernels(
    split_k: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, bias = randn(3, 300), randn(40, 300, seed=1), randn(40, seed=2)
    weight = prepare(w, torch.float32, "cpu")
    assert split_k.splits_of(40, 300, 64).count > 2
    apart = matmul(x, weight, bias)
    monkeypatch.setattr(split_k, "ENOUGH_UNCUT", 1)
    assert same_bits(matmul(x, weight, bias), apart)


@pytest.mark.usefixtures("split_k")
def test_a_row_has_one_result() -> None:
    weight = prepare(randn(20, 130, seed=1), torch.float16, "cpu")
    assert_rows_alone(lambda x: (matmul(x, weight),), randn(4, 130, dtype=torch.float16), counts=(3, 18))


def test_the_cut_follows_from_the_weight_and_leaves_no_split_empty(
    split_k: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_k, "MIN_COLUMNS", 512)
    for rows, columns in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (576, 1536)):
        splits = split_k.splits_of(rows, columns, 64)
        count, width = splits.count, splits.columns
        assert width % 64 == 0 and (count - 1) * width < columns <= count * width
        assert count == 1 or width >= 512


def test_rows_of_several_weights_in_one() -> None:
    a, b = randn(5, 40), randn(9, 40, seed=1)
    x = randn(2, 40, seed=2)
    joined = join([prepare(a, torch.float32, "cpu"), prepare(b, torch.float32, "cpu")])
    assert same_bits(matmul(x, joined), matmul(x, prepare(torch.cat((a, b)), torch.float32, "cpu")))
    with pytest.raises(ValueError, match="join"):
        join([joined, prepare(a, torch.float16, "cpu")])


def test_no_rows_are_no_work() -> None:
    assert matmul(torch.zeros(0, 8), prepare(torch.zeros(3, 8), torch.float32, "cpu")).shape == (0, 3)


def test_refuses_what_does_not_fit() -> None:
    weight = prepare(randn(3, 8), torch.float32, "cpu")
    with pytest.raises(ValueError, match="x .2, 7. with"):
        matmul(randn(2, 7), weight)
    with pytest.raises(ValueError, match="bias"):
        matmul(randn(2, 8), weight, torch.zeros(4))
    with pytest.raises(TypeError, match="float16"):
        matmul_float(randn(2, 8, dtype=torch.float16), weight)
    with pytest.raises(TypeError, match="int8"):
        matmul(randn(2, 8), weight, to=torch.int8)
