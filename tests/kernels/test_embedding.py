"""Single rows of weights in every format are those of the whole weight."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from kernels.embedding import embedding_rows
from kernels.matmul import DeviceWeight, prepare, same_weight, values_of
from kernels.matmul_float import FloatWeight
from kernels.matmul_w8a8 import ScaledWeight
from kernels.packed_weight import SCHEMES
from kernels.planar_weight import GroupedCodes, PlanarWeight
from kernels.scaled_rows import scale_rows
from tests.kernels.random_weights import random_codes

NUMBERS = torch.tensor([3, 0, 3, 6])


def weights() -> dict[str, DeviceWeight]:
    floats = torch.randn(7, 256, generator=torch.Generator().manual_seed(0))
    found: dict[str, DeviceWeight] = {"floats": prepare(floats, torch.float16, "cpu")}
    for dtype, group in ((torch.int8, None), (torch.float8_e4m3fn, 128)):
        scaled = scale_rows(floats, dtype, group)
        found[f"{dtype}"] = ScaledWeight(scaled.q, scaled.scale.t().contiguous())
    codes = torch.arange(7 * 256).view(7, 256).remainder(16).byte()
    order = torch.arange(256).flip(0)
    found["another order"] = prepare(GroupedCodes(4, codes, torch.ones(7, 2), None, 8, order), torch.float16, "cpu")
    return found | {name: prepare(random_codes(name, 7, 256), torch.float16, "cpu") for name in SCHEMES}


@pytest.mark.parametrize("to", [torch.float32, torch.float16], ids=str)
def test_rows_are_those_of_the_whole(to: torch.dtype) -> None:
    for name, weight in weights().items():
        got = embedding_rows(weight, NUMBERS, to)
        assert got.dtype == to and torch.equal(got, values_of(weight)[NUMBERS].to(to)), name
        assert embedding_rows(weight, NUMBERS[:0], to).shape == (0, 256), name


def test_weights_are_the_same_where_format_and_numbers_are() -> None:
    for name, weight in weights().items():
        assert same_weight(weight, copy.deepcopy(weight)), name
    codes, floats = weights()["another order"], weights()["floats"]
    assert isinstance(codes, PlanarWeight) and isinstance(floats, FloatWeight)
    assert not same_weight(codes, floats) and not same_weight(codes, replace(codes, order=None))
    assert not same_weight(floats, FloatWeight(floats.tensor.neg()))


def test_refuses_other_numbers() -> None:
    for numbers in (NUMBERS.int(), NUMBERS[None]):
        with pytest.raises(ValueError, match="embedding_rows: numbers"):
            embedding_rows(weights()["floats"], numbers, torch.float32)
