"""The dense product: right, and the same bits for a row whatever rows it is with."""

from __future__ import annotations

import pytest
import torch

from kernels.matmul_dense import (
    FIXED_ROWS,
    DensePacker,
    DenseWeight,
    can_pack,
    matmul_dense,
    matmul_dense_reference,
    padded_rows,
    rows_are_independent,
)
from tests.kernels.threads import torch_threads

SHAPES = [(1, 1), (63, 100), (100, 63), (192, 576), (576, 1536)]


def weights_of(w: torch.Tensor) -> dict[str, DenseWeight]:
    """Every way to multiply with w."""
    n, k = w.shape
    kinds = {
        "plain": DenseWeight(w, n, k, packed=False),
        "fixed": DenseWeight(w, n, k, packed=False, fixed_rows=FIXED_ROWS),
    }
    if can_pack():
        kinds["packed"] = DensePacker().pack(w)
    return kinds


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 63, 100])
def test_against_the_reference(shape: tuple[int, int], num_rows: int) -> None:
    torch.manual_seed(0)
    w, x, bias = torch.randn(shape), torch.randn(num_rows, shape[1]), torch.randn(shape[0])
    for kind, weight in weights_of(w).items():
        for b in (None, bias):
            got = matmul_dense(x, weight, b)
            assert got.shape == (num_rows, shape[0]), kind
            torch.testing.assert_close(got, matmul_dense_reference(x, w, b), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_one_result(shape: tuple[int, int]) -> None:
    """Alone, in every place of calls with other row counts, with other threads; bits, not closeness."""
    torch.manual_seed(1)
    weight, bias = DensePacker().pack(torch.randn(shape)), torch.randn(shape[0])
    rows = torch.randn(16, shape[1])
    alone = torch.cat([matmul_dense(row[None], weight, bias) for row in rows])
    for threads in (1, 2, 3):
        with torch_threads(threads):
            for count in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 129, 512, 515, 1000):
                index = torch.randint(0, 16, (count,))
                assert torch.equal(matmul_dense(rows[index], weight, bias), alone[index]), (threads, count)


def test_rows_may_be_views() -> None:
    weight = DensePacker().pack(torch.randn(40, 24))
    x = torch.randn(9, 48)
    assert torch.equal(matmul_dense(x[:, ::2], weight), matmul_dense(x[:, ::2].contiguous(), weight))
    assert torch.equal(matmul_dense(x[::2, :24], weight), matmul_dense(x[::2, :24].contiguous(), weight))


def test_padding_does_not_reach_the_rows() -> None:
    weight = DensePacker().pack(torch.randn(8, 8))
    x = torch.randn(5, 8)
    x[4] = torch.nan
    y = matmul_dense(x, weight)
    assert y[:4].isfinite().all() and y[4].isnan().all()


def test_dependent_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose products show the row count gets calls of one size."""
    product = "kernels.matmul_dense._product"
    monkeypatch.setattr(product, lambda x, weight, bias: x @ weight.tensor.t() + (x.shape[0] > 20) * 1e-3)
    weight = DenseWeight(torch.randn(8, 8), 8, 8, packed=False)
    assert not rows_are_independent(weight)
    fixed = DenseWeight(weight.tensor, 8, 8, packed=False, fixed_rows=FIXED_ROWS)
    assert rows_are_independent(fixed)


def test_packer_tries_a_shape_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr("kernels.matmul_dense.rows_are_independent", lambda weight: bool(tried.append(weight)))
    packer = DensePacker()
    assert [packer.pack(torch.randn(8, 16)).fixed_rows for _ in range(3)] == [FIXED_ROWS] * 3
    assert len(tried) == 1
    packer.pack(torch.randn(16, 8))
    assert len(tried) == 2


@pytest.mark.parametrize("num_rows", [1, 4, 5, 31, 32, 33, 100, 512])
def test_padded_rows_need_no_more_padding(num_rows: int) -> None:
    assert padded_rows(num_rows) >= num_rows
    assert padded_rows(num_rows) % DensePacker().pack(torch.randn(4, 4)).row_multiple == 0
    assert padded_rows(padded_rows(num_rows)) == padded_rows(num_rows)


def test_refuses_other_types_and_shapes() -> None:
    weight = DensePacker().pack(torch.randn(4, 6))
    with pytest.raises(TypeError, match="float32"):
        matmul_dense(torch.randn(2, 6).half(), weight)
    with pytest.raises(ValueError, match="matmul_dense"):
        matmul_dense(torch.randn(2, 5), weight)
    with pytest.raises(TypeError, match="float32 matrix"):
        DensePacker().pack(torch.randn(4, 6).half())
