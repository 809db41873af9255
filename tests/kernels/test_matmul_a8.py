"""Products of packed weights with 8-bit activations: right, and the same bits for a row whatever rows it is with."""

from __future__ import annotations

import ctypes

import pytest
import torch

from kernels.matmul_a8 import matmul_a8, matmul_a8_reference
from kernels.native.build import Isa
from kernels.native.library import NativeLibrary, Pool
from kernels.packed_weight import DENSE, PackedWeight, pack, pack_dense
from kernels.quantize_a8 import quantize_a8, quantize_a8_reference
from tests.kernels.native_libraries import ISAS, best_library, library_for
from tests.kernels.random_weights import TYPES, random_codes, random_weight

NUM_ROWS = 23


@pytest.fixture(scope="module", params=ISAS, ids=lambda isa: isa.name)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    isa: Isa = request.param
    return library_for(isa)


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("shape", [(63, 256), (100, 768)], ids=str)
def test_against_the_reference(library: NativeLibrary, type_name: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = random_codes(type_name, *shape) if type_name not in DENSE else torch.randn(shape).to(DENSE[type_name])
    packed = pack_dense(weight) if isinstance(weight, torch.Tensor) else pack(weight)
    x = quantize_a8(torch.randn(NUM_ROWS, shape[1]), library)
    pool = Pool(library, 2)
    got, want = matmul_a8(x, packed, library, pool), matmul_a8_reference(x, weight)
    scale = want.abs().max()
    torch.testing.assert_close(got / scale, want / scale, atol=3e-6, rtol=0)


@pytest.mark.parametrize("type_name", TYPES)
def test_a_row_has_one_result(library: NativeLibrary, type_name: str) -> None:
    """Alone, in every company, on any number of threads; bits, not closeness."""
    torch.manual_seed(1)
    weight, _ = random_weight(type_name, 100, 512)
    x = torch.randn(NUM_ROWS, 512)
    single = Pool(library, 1)
    alone = torch.cat([matmul_a8(quantize_a8(row[None], library), weight, library, single) for row in x])
    for threads in (1, 2, 3):
        pool = Pool(library, threads)
        for count in (1, 2, 3, 5, 8, 9, 15, 16, 23):
            index = torch.randperm(NUM_ROWS)[:count]
            assert torch.equal(matmul_a8(quantize_a8(x[index], library), weight, library, pool), alone[index])


@pytest.mark.parametrize("type_name", TYPES)
def test_packed_weights_hold_their_numbers(library: NativeLibrary, type_name: str) -> None:
    torch.manual_seed(2)
    weight, want = random_weight(type_name, 37, 512)
    assert torch.equal(rows_of(weight, library), want)


def rows_of(weight: PackedWeight, library: NativeLibrary) -> torch.Tensor:
    out = torch.full((weight.rows, weight.columns), torch.nan)
    library.weight_rows(
        weight.matrix(), (ctypes.c_int32 * weight.rows)(*range(weight.rows)), weight.rows, out.data_ptr()
    )
    return out


def test_packed_weights_take_little_more_than_a_file() -> None:
    bits = {"Q4_0": 4.5, "Q4_1": 5, "Q5_0": 5.5, "Q5_1": 6, "Q8_0": 8.5, "Q2_K": 2.625, "Q3_K": 3.4375, "Q4_K": 4.5,
            "Q5_K": 5.5, "Q6_K": 6.5625, "F32": 32, "F16": 16, "BF16": 16}  # fmt: skip
    assert set(bits) == set(TYPES)
    for type_name in TYPES:
        weight, _ = random_weight(type_name, 64, 1024)
        assert weight.num_bytes * 8 / (64 * 1024) <= 1.15 * bits[type_name], type_name


@pytest.mark.parametrize("columns", [32, 96, 576])
def test_quantised_rows_are_the_references(library: NativeLibrary, columns: int) -> None:
    torch.manual_seed(3)
    x = torch.randn(40, columns) * torch.logspace(-30, 30, 40).unsqueeze(1)
    x[0] = 0.0
    x[1, 5] = 1e-44  # a denormal has a scale too
    got, want = quantize_a8(x, library), quantize_a8_reference(x)
    for name in ("q", "d", "s", "sums"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


def test_what_is_not_finite_shows() -> None:
    library = best_library()
    for bad in (torch.nan, torch.inf, -torch.inf):
        for column in range(32):
            x = torch.ones(1, 32)
            x[0, column] = bad
            assert not quantize_a8(x, library).d.isfinite().all(), (bad, column)
    weight, _ = random_weight("Q4_1", 16, 32)
    x = torch.ones(2, 32)
    x[1, 3] = torch.nan
    y = matmul_a8(quantize_a8(x, library), weight, library, Pool(library, 1))
    assert y[0].isfinite().all() and y[1].isnan().all()


def test_refuses_other_shapes() -> None:
    library = best_library()
    weight, _ = random_weight("Q4_0", 16, 64)
    with pytest.raises(ValueError, match="matmul_a8"):
        matmul_a8(quantize_a8(torch.randn(2, 32), library), weight, library, Pool(library, 1))
    with pytest.raises(ValueError, match="quantize_a8"):
        quantize_a8(torch.randn(2, 33), library)
    with pytest.raises(ValueError, match="whole blocks"):
        random_weight("Q4_K", 16, 64)
    with pytest.raises(TypeError, match="pack_dense"):
        pack_dense(torch.zeros(2, 2, dtype=torch.int8))
