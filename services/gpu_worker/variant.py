"""The kernel variant: a name that two workers share only if they compute the same numbers (DESIGN, P2).

It hashes what the numbers follow from: the weights, the KV cache's layout and types, torch and its instruction set,
and, since libraries choose code by processor too, the very bits of a few products and functions on fixed inputs.
The tokenizer is not part of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import kernels
from kernels.matmul_dense import DensePacker, matmul_dense
from kernels.rms_norm import rms_norm
from kernels.silu_mul import silu_mul
from services.gpu_worker.kv_pool import LAYOUT


def kernel_variant(identity: str, *, block_size: int, dtype: str, kv_dtype: torch.dtype) -> str:
    isa = f"cpu-torch-{torch.backends.cpu.get_cpu_capability().lower()}"
    digest = hashlib.sha256()
    for part in (identity, isa, torch.__version__, dtype, str(kv_dtype), LAYOUT, str(block_size)):
        digest.update(part.encode() + b"\0")
    for numbers in _probe():
        digest.update(numbers.numpy().tobytes())
    return f"{isa}-{digest.hexdigest()[:32]}"


def native_variant(identity: str, library: str, *, block_size: int, layout: str) -> str:
    """library: the name of the native ops, and so what they were built from. Rotary tables are torch's."""
    torch_isa = torch.backends.cpu.get_cpu_capability()
    digest = hashlib.sha256()
    for part in (identity, library, torch_isa, torch.__version__, layout, str(block_size)):
        digest.update(part.encode() + b"\0")
    return f"cpu-native-{library.partition('-')[0]}-{digest.hexdigest()[:32]}"


def gpu_variant(
    identity: str, device: torch.device, *, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype,
    fast: bool = False,
) -> str:  # fmt: skip
    """The text of all that computes counts, as do Triton and the kind of GPU: which tiles are taken follows from it."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else kind_of(device)
    digest = hashlib.sha256()
    how = "fast" if fast else "row by row"
    for part in (identity, kind, torch.__version__, _triton(), str(dtype), str(kv_dtype), str(block_size), how):
        digest.update(part.encode() + b"\0")
    ops, here = Path(kernels.__file__).parent, Path(__file__).parent
    weights = (here / "weights" / name for name in ("on_device.py", "library_products.py"))
    own = (here / "gpu_inputs.py", *sorted((here / "model").glob("gpu_*.py")), *weights)
    for file in (*sorted(ops.glob("*.py")), *sorted((ops / "gpu").glob("*.py")), *own):
        digest.update(file.read_bytes())
    return f"gpu-{'-'.join(kind.lower().split())}-{digest.hexdigest()[:32]}"


def kind_of(device: torch.device) -> str:
    """Of a GPU engine: on a CPU its kernels are interpreted."""
    return "interpreted" if device.type == "cpu" else device.type


def _triton() -> str:
    """Its version; empty where torch brings one under another name, which its own version then tells."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def _probe() -> Iterator[torch.Tensor]:
    x, w = _numbers(8, 1536), _numbers(64, 1536)
    yield matmul_dense(x, DensePacker().pack(w))
    yield torch.bmm(x.view(8, 24, 64), w.view(-1, 64)[:512].view(8, 64, 64))
    yield rms_norm(x, w[0], 1e-5)
    yield silu_mul(x * 8.0)


def _numbers(rows: int, columns: int) -> torch.Tensor:
    """The same on every machine: a multiplicative sequence between -1 and 1."""
    index = torch.arange(1, rows * columns + 1, dtype=torch.int64)
    return ((index * 2654435761 % 65536).float() / 32768.0 - 1.0).view(rows, columns)
