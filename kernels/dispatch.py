"""Which implementation of an op computes: Triton's where the tensors are a GPU's, else torch's specification.

The native ops are no third answer here: they compute whole steps, so the worker chooses them once (see
`services/gpu_worker/engines.py`), and where a single one serves it is passed to the entry point.
"""

from __future__ import annotations

import os

import torch


def uses_triton(x: torch.Tensor) -> bool:
    """For tensors of a GPU; of no device at all, which only record what would be launched; and all if interpreted.

    Entry points import `kernels.gpu` when this has said yes, so that a worker on a CPU needs no Triton.
    """
    return x.is_cuda or x.is_meta or interpreted()


def interpreted() -> bool:
    """Whether Triton's own switch is on: kernels then run on the CPU, operation by operation, to be tested."""
    return os.environ.get("TRITON_INTERPRET") == "1"
