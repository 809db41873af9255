"""Ops are tested on one thread unless a test says otherwise: their threads would only wait for other tests' ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.threads import torch_threads


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield
