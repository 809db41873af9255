"""Triton's kernels are tested on the CPU, in its interpreter, with outputs that are garbage until they are written.

The switch is on only while one of these runs: for every other test of this process the entry points take torch, and
processes that it starts know nothing of it.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tests.interpreter import import_triton, interpret

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]
if not collect_ignore_glob:
    import_triton()

empty = torch.empty


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    monkeypatch.setattr(torch, "empty", garbage)


def garbage(*shape: Any, **options: Any) -> torch.Tensor:
    """What `torch.empty` gives, but surely of no use: NaN, or a number that nobody has computed."""
    tensor: torch.Tensor = empty(*shape, **options)
    if tensor.device.type == "meta":
        return tensor
    return tensor.fill_(torch.nan if tensor.is_floating_point() else 85)
