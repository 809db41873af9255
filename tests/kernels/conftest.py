"""Ops are tested on one thread unless a test says otherwise. OpenMP is set up before anything imports torch: where
tests share cores, threads that spin stop each other."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "0")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    from tests.kernels.threads import torch_threads  # after the variable is set

    with torch_threads(1):
        yield
