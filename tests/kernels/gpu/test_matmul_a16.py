"""Products with quantised weights in Triton: every type and bit width against the numbers that it stands for."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from kernels.matmul import join, matmul, prepare
from kernels.matmul_float import FloatWeight
from kernels.packed_weight import SCHEMES, dequantize
from kernels.planar_weight import GroupedCodes, PlanarWeight, pack_planes, unpack_planes
from tests.kernels.gpu.checks import assert_rows_alone, randn, same_bits, strided
from tests.kernels.random_weights import random_codes

HALF = torch.float16


def grouped_codes(bits: int, rows: int, columns: int, group: int, centre: int = 0, offset: bool = True) -> GroupedCodes:
    generator = torch.Generator().manual_seed(bits)
    q = torch.randint(0, 1 << bits, (rows, columns), generator=generator).to(torch.uint8)
    scale = randn(rows, columns // group, seed=1).half()
    return GroupedCodes(bits, q, scale, randn(rows, columns // group, seed=2).half() if offset else None, centre)


def assert_product(weight: PlanarWeight, values: torch.Tensor, num_tokens: int = 3) -> None:
    """values [N, K]: what the weight stands for, in float32."""
    bias = randn(len(values), seed=4)
    for dtype in (torch.float32, HALF):
        x = randn(num_tokens, values.shape[1], dtype=dtype, seed=5)
        want = x.double() @ values.to(dtype).double().t() + bias.double()
        got = matmul(strided(x), weight, bias, to=torch.float32)
        size = (x.double().abs() @ values.double().abs().t()).max().item()
        torch.testing.assert_close(got.double(), want, atol=size * (2e-6 if dtype is torch.float32 else 1e-4), rtol=0)


@pytest.fixture(autouse=True)
def split_k(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Cut into splits of few columns."""
    from kernels.gpu import split_k  # while the interpreter is on

    monkeypatch.setattr(split_k, "MIN_COLUMNS", 128)
    return split_k


@pytest.mark.parametrize("type_name", SCHEMES)
def test_types_of_gguf(type_name: str) -> None:
    codes = random_codes(type_name, 5, 256)
    weight = prepare(codes, HALF, "cpu")
    assert isinstance(weight, PlanarWeight)
    values = unpack_planes(weight)
    want = dequantize(codes)
    torch.testing.assert_close(values, want, atol=want.abs().max().item() * 2**-10, rtol=0)  # scales are float16
    assert_product(weight, values)


@pytest.mark.parametrize(
    ("bits", "columns", "group"), [(4, 384, 128), (4, 100, 100), (2, 192, 64), (3, 96, 48), (8, 512, 256), (5, 48, 16)]
)
def test_groups_of_any_size(bits: int, columns: int, group: int) -> None:
    for centre, offset in ((1 << bits - 1, False), (3, True)):
        codes = grouped_codes(bits, 3, columns, group, centre, offset)
        weight = pack_planes(codes)
        torch.testing.assert_close(unpack_planes(weight), codes.values(), atol=2e-2, rtol=1e-3)
        assert_product(weight, unpack_planes(weight), num_tokens=1)


@pytest.mark.parametrize("rows", [1, 63, 100])
def test_odd_sizes(rows: int) -> None:
    weight = pack_planes(grouped_codes(4, rows, 96, 32))
    assert_product(weight, unpack_planes(weight), num_tokens=17)


def test_every_code_is_exact() -> None:
    """A scale of 1 and a centre: the numbers are the codes, and a row of the unit matrix is a column of W."""
    for bits, group in ((2, 128), (3, 16), (4, 128), (4, 32), (5, 128), (6, 16), (8, 128)):
        codes = torch.arange(1 << bits).repeat(256 >> bits)[None].to(torch.uint8)
        weight = pack_planes(GroupedCodes(bits, codes, torch.ones(1, 256 // group), centre=1 << bits - 1))
        got = matmul(torch.eye(256)[::17], weight)
        assert torch.equal(got[:, 0], codes[0, ::17].float() - (1 << bits - 1))


def test_columns_in_another_order() -> None:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    codes = grouped_codes(4, 5, 256, 128)
    weight = prepare(GroupedCodes(4, codes.q, codes.scale, codes.offset, 0, order), HALF, "cpu")
    assert isinstance(weight, PlanarWeight)
    plain = pack_planes(codes)
    assert torch.equal(unpack_planes(weight)[:, order], unpack_planes(plain))
    x = randn(2, 256)
    assert same_bits(matmul(x, weight), matmul(x[:, order], plain))


def test_splits_are_added_in_one_order(split_k: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, bias = pack_planes(grouped_codes(4, 40, 384, 128)), randn(3, 384), randn(40, seed=2)
    assert split_k.splits_of(40, 384, 128).count == 3
    apart = matmul(x, weight, bias)
    monkeypatch.setattr(split_k, "ENOUGH_UNCUT", 1)
    assert same_bits(matmul(x, weight, bias), apart)


def test_a_row_has_one_result() -> None:
    weight = prepare(random_codes("Q4_K", 9, 256), HALF, "cpu")
    assert_rows_alone(lambda x: (matmul(x, weight),), randn(4, 256, dtype=HALF), counts=(3, 18))


def test_a_weight_written_out_is_the_weight() -> None:
    from kernels.gpu.matmul_a16 import write_out

    for bits, columns, group in ((4, 160, 32), (6, 256, 16), (8, 384, 128)):
        weight = pack_planes(grouped_codes(bits, 65, columns, group))
        torch.testing.assert_close(write_out(weight, HALF), unpack_planes(weight).half(), atol=2e-3, rtol=2**-10)


def test_rows_of_several_weights_in_one() -> None:
    a, b = grouped_codes(6, 5, 256, 16), grouped_codes(6, 9, 256, 16)
    joined, x = join([pack_planes(a), pack_planes(b)]), randn(2, 256)
    apart = torch.cat([matmul(x, pack_planes(c)) for c in (a, b)], 1)
    # numpy's products depend on a row's place in the tile
    torch.testing.assert_close(matmul(x, joined), apart, atol=1e-3, rtol=1e-5)
    with pytest.raises(ValueError, match="join"):
        join([joined, pack_planes(grouped_codes(6, 5, 256, 32))])
    with pytest.raises(ValueError, match="join"):
        join([joined, FloatWeight(randn(5, 256))])


def test_what_cannot_be_packed_becomes_floats() -> None:
    codes = grouped_codes(4, 3, 100, 10)
    with pytest.raises(ValueError, match="100 columns in 10 groups"):
        pack_planes(codes)
    weight = prepare(codes, torch.float32, "cpu")
    assert isinstance(weight, FloatWeight) and torch.equal(weight.tensor, codes.values())


def test_a_weight_takes_the_room_of_its_bits() -> None:
    weight = prepare(random_codes("Q6_K", 64, 1024), HALF, "cpu")
    assert weight.num_bytes == 64 * 1024 * (6 + 1) // 8
