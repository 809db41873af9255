"""Planned bytes of single matrices, against what is then prepared with all of their rows."""

from __future__ import annotations

import pytest
import torch

from kernels.matmul import prepare
from kernels.matmul_w8a8 import ScaledWeight
from kernels.packed_weight import SCHEMES
from kernels.planar_weight import GroupedCodes
from services.gpu_worker.weights.device_bytes import Grouping, Scaling, device_bytes
from tests.kernels.random_weights import random_codes


@pytest.mark.parametrize("type_name", SCHEMES)
def test_types_of_files(type_name: str) -> None:
    weight = prepare(random_codes(type_name, 5, 768), torch.bfloat16, "cpu")
    assert device_bytes(type_name, (5, 768), torch.bfloat16) == weight.num_bytes


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("columns", "group"), [(256, 128), (96, 32), (100, 0), (80, 8)])
@pytest.mark.parametrize("centred", [False, True])
def test_codes_with_groups(bits: int, columns: int, group: int, centred: bool) -> None:
    for order in (None, torch.arange(columns)):
        scale = torch.ones(7, columns // group if group else 1)
        codes = GroupedCodes(
            bits, torch.zeros(7, columns).byte(), scale, None if centred else scale, centred << bits - 1, order
        )
        form = Grouping(bits, group, centred, order is None)
        assert device_bytes(form, (7, columns), torch.float16) == prepare(codes, torch.float16, "cpu").num_bytes


def test_bytes_with_scales() -> None:
    q = torch.zeros(5, 256).to(torch.float8_e4m3fn)
    for group, groups in ((0, 1), (128, 2)):
        weight = ScaledWeight(q, torch.ones(groups, 5))
        assert device_bytes(Scaling(q.dtype, group), (5, 256), torch.bfloat16) == weight.num_bytes


def test_what_no_product_takes_is_floats() -> None:
    for form in (None, Scaling(torch.int8, 48), Scaling(torch.int8, 64), Grouping(4, 48, True)):
        assert device_bytes(form, (5, 256), torch.bfloat16) == 2 * 5 * 256
        assert device_bytes(form, (5, 256), torch.float32) == 4 * 5 * 256
    assert device_bytes(None, (256,), torch.bfloat16) == 4 * 256
