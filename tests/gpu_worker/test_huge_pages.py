"""Memory for weights: what is kept there is what came, side by side, from the start of a huge page on."""

from __future__ import annotations

import pytest
import torch

from kernels.native.structs import address
from kernels.packed_weight import GROUP, Codes, PackedWeight, pack, pack_dense
from services.gpu_worker.weights.huge_pages import HUGE_PAGE, LINE, WeightMemory


def q4_1(rows: int, columns: int) -> PackedWeight:
    d = torch.rand(2, rows, columns // GROUP).half()
    return pack(Codes("Q4_1", torch.randint(0, 16, (rows, columns), dtype=torch.uint8), d[0], d[1]))


def test_what_is_kept_has_the_same_numbers_and_shapes() -> None:
    memory, weights = WeightMemory(), [q4_1(20, 64), pack_dense(torch.rand(17, 48)), q4_1(16, 96)]
    kept = [memory.keep(weight) for weight in weights]
    for old, new in zip(weights, kept, strict=True):
        assert (old.type_name, old.rows, old.columns) == (new.type_name, new.rows, new.columns)
        for name in ("codes", "d", "m"):
            before, after = getattr(old, name), getattr(new, name)
            assert (before is None) == (after is None)
            assert before is None or (before.dtype == after.dtype and torch.equal(before, after)), name
            assert before is None or address(before) != address(after)


def test_weights_lie_side_by_side_from_the_start_of_a_huge_page_on() -> None:
    memory = WeightMemory()
    first, second = (memory.keep(q4_1(20, 64)) for _ in range(2))
    at = (address(first.codes) or 0) + first.codes.numel()
    assert (address(first.codes) or 0) % HUGE_PAGE == 0
    assert all((address(plane) or 0) % LINE == 0 for w in (first, second) for plane in (w.codes, w.d, w.m))
    assert address(first.d) == at
    assert (address(second.codes) or 0) - at <= 3 * LINE * 4


@pytest.mark.parametrize("region_bytes", [64, 1 << 21])
def test_a_region_that_is_full_is_followed_by_another(region_bytes: int) -> None:
    memory, weights = WeightMemory(region_bytes), [q4_1(512, 4096) for _ in range(4)]  # 1.25 MiB each
    kept = [memory.keep(weight) for weight in weights]
    assert all(torch.equal(old.codes, new.codes) for old, new in zip(weights, kept, strict=True))
