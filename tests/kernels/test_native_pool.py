"""The pool of threads: no result lost in any interleaving, no work while idle."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from kernels.matmul_a8 import matmul_a8
from kernels.native.library import Pool
from kernels.quantize_a8 import quantize_a8
from tests.kernels.native_libraries import best_library
from tests.kernels.random_weights import random_weight


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_many_tasks_in_a_row(threads: int) -> None:
    """More threads than cores, so that some are taken off their core with a piece in hand."""
    library = best_library()
    pool = Pool(library, threads)
    weight, _ = random_weight("Q4_0", 700, 64)
    x = quantize_a8(torch.randn(3, 64), library)
    want = matmul_a8(x, weight, library, Pool(library, 1))
    for _ in range(400):
        assert torch.equal(matmul_a8(x, weight, library, pool), want)


def test_an_idle_pool_sleeps() -> None:
    library = best_library()
    pool = Pool(library, 4)
    weight, _ = random_weight("Q4_0", 700, 64)
    matmul_a8(quantize_a8(torch.randn(3, 64), library), weight, library, pool)
    before = time.process_time()
    threading.Event().wait(0.3)
    assert time.process_time() - before < 0.1


def test_a_pool_ends_with_its_threads() -> None:
    library = best_library()

    def num_threads() -> int:
        with open("/proc/self/status", encoding="ascii") as file:
            return int(next(line.split()[1] for line in file if line.startswith("Threads:")))

    before = num_threads()
    pools = [Pool(library, 3) for _ in range(5)]
    assert num_threads() == before + 10
    for pool in pools:
        pool.close()
        pool.close()
    assert num_threads() == before


@pytest.mark.parametrize("count", [0, -1, 1025])
def test_refuses_senseless_counts(count: int) -> None:
    with pytest.raises(ValueError, match="num_threads"):
        Pool(best_library(), count)
