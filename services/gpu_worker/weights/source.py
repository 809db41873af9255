"""What a file of weights must offer the loader, whatever its format. *Pure.*

Tensors go by their places in the decoder (see `names`), in Hugging Face order of rows, and are read as float32 or as
they are stored. A tensor that has no place keeps the name that its file gives it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import torch

from kernels.matmul_w8a8 import ScaledWeight
from kernels.packed_weight import Codes
from kernels.planar_weight import GroupedCodes
from services.gpu_worker.model.config import ModelConfig
from services.gpu_worker.model.families import Family

Coded = Codes | GroupedCodes | ScaledWeight
CHUNK_BYTES = 32 << 20  # of float32 converted at a time
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


class WeightsError(ValueError):
    """The weights cannot be used; the message names the file or tensor."""


class WeightSource(Protocol):
    config: ModelConfig
    family: Family
    shapes: dict[str, tuple[int, ...]]
    identity: str  # equal for equal weights, see `file_identity`

    def file_name(self, place: str) -> str:
        """What the file calls the tensor, there or not."""
        ...

    def quantized_as(self, name: str) -> str:
        """How the file has quantised the tensor, as it calls that; empty for floats."""
        ...

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill out (float32, of the tensor's shape) with the tensor."""
        ...

    def stored(self, name: str, start: int, end: int) -> Codes | torch.Tensor:
        """Rows [start, end) of a matrix as the file has them: codes, or float32, float16 or bfloat16."""
        ...

    def coded(self, name: str) -> Coded | None:
        """A quantised matrix as products on a GPU take it; None where it is to be read as floats."""
        ...

    def release(self, name: str) -> None:
        """The tensor will not be read again: the memory that reading it took may go."""
        ...


def file_identity(path: Path, header_bytes: int) -> bytes:
    """A hash of the file's size, its first header_bytes and samples spread over the rest.

    Two fine-tunes of one model share header and size, so the samples tell them apart; reading all of a large file
    would cost more than loading it.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with open(path, "rb") as file:
        digest.update(file.read(header_bytes))
        for i in range(_NUM_SAMPLES):
            file.seek(header_bytes + (size - header_bytes) * i // _NUM_SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()
