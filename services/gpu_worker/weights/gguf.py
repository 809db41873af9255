"""A GGUF file as a `WeightSource`: names translated, rotary rows put in halves, blocks turned into float32.

Factors of rotary frequencies, which are tensors here, become part of the configuration. The file is memory-mapped; a
tensor is converted a run of rows at a time.
"""

from __future__ import annotations

import mmap
from math import prod
from pathlib import Path

import numpy as np
import torch

from kernels.packed_weight import DENSE, Codes
from services.gpu_worker.model.config import ModelConfig
from services.gpu_worker.model.gguf_config import ROPE_FACTORS, config_from_gguf, gguf_family, with_rope_factors
from services.gpu_worker.weights.names import gguf_names, place_parts
from services.gpu_worker.weights.quant_layout import TYPES, decode_rows, dequantize
from services.gpu_worker.weights.source import CHUNK_BYTES, Coded, WeightsError, file_identity
from shared.gguf_header import GGML_TYPES, GGUFTensor, read_gguf

_BLOCKS = {name: (elements, num_bytes) for name, elements, num_bytes in GGML_TYPES.values()}


class GGUFSource:
    def __init__(self, path: Path) -> None:
        header = read_gguf(path)
        tensors = dict(header.tensors)
        for tensor in tensors.values():
            if tensor.type not in TYPES:
                known = ", ".join(TYPES)
                raise WeightsError(f"tensor {tensor.name!r}: type {tensor.type} is not supported (known: {known})")
        header_bytes = min((t.offset_bytes for t in tensors.values()), default=0)
        self.identity = file_identity(path, header_bytes).hex()
        # Copy-on-write: torch wants a writable array, the file stays as it is.
        with open(path, "rb") as file:
            self._file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._data = np.frombuffer(self._file, dtype=np.uint8)
        self.family = family = gguf_family(header.metadata)
        self._in_pairs = family.gguf_pairs
        config = config_from_gguf(header.metadata, {t.name: t.shape for t in tensors.values()})
        self.config = with_rope_factors(
            config, self._rope_factors(config, {name: tensors.pop(name, None) for name in ROPE_FACTORS})
        )
        names = gguf_names(family, self.config)
        self.file_name = names.name
        self._tensors = tensors
        self._parts = place_parts(names, self.config, {t.name: t.shape for t in tensors.values()})
        self.shapes = {place: part.shape for place, part in self._parts.items()}

    def read_into(self, name: str, out: torch.Tensor) -> None:
        tensor = self._tensors[self._parts[name].name]
        elements, num_bytes = _BLOCKS[tensor.type]
        blocks, flat = self._bytes(*self._extent(name)).view(-1, num_bytes), out.view(-1, elements)
        step = max(1, CHUNK_BYTES // (4 * elements))
        for start in range(0, len(blocks), step):
            flat[start : start + step] = dequantize(tensor.type, blocks[start : start + step])
        if self._is_in_pairs(name):
            out.copy_(pairs_to_halves(out, self.config.head_dim))

    def stored(self, name: str, start: int, end: int) -> Codes | torch.Tensor:
        part = self._parts[name]
        tensor, rows = self._tensors[part.name], self._bytes(*self._extent(name)).view(part.shape[0], -1)
        if self._is_in_pairs(name):
            rows = pairs_to_halves(rows, self.config.head_dim)
        rows = rows[start:end]
        if tensor.type in DENSE:
            return rows.contiguous().view(DENSE[tensor.type])
        return decode_rows(tensor.type, rows, _BLOCKS[tensor.type][1])

    def type_of(self, place: str) -> str:
        """What the file stores it as."""
        return self._tensors[self._parts[place].name].type

    def coded(self, name: str) -> Coded | None:
        stored = self.stored(name, 0, self.shapes[name][0]) if self.quantized_as(name) else None
        return stored if isinstance(stored, Codes) else None

    def quantized_as(self, name: str) -> str:
        stored_type = self.type_of(name)
        return "" if stored_type in DENSE else stored_type

    def release(self, name: str) -> None:
        start, end = self._extent(name)
        first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            self._file.madvise(mmap.MADV_DONTNEED, first, end - first)

    def _rope_factors(self, config: ModelConfig, tensors: dict[str, GGUFTensor | None]) -> dict[str, tuple[float, ...]]:
        found = {}
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if tensor.type != "F32" or tensor.shape != (config.turned // 2,):
                raise WeightsError(f"tensor {name!r}: {config.turned // 2} factors in F32 expected")
            start = tensor.offset_bytes
            found[name] = tuple(self._bytes(start, start + tensor.num_bytes).view(torch.float32).tolist())
        return found

    def _extent(self, name: str) -> tuple[int, int]:
        """From which byte of the file to which the place's rows lie."""
        part = self._parts[name]
        tensor = self._tensors[part.name]
        num_rows = tensor.shape[0] if len(tensor.shape) == 1 else prod(tensor.shape[:-1])
        first, end = part.first_row, part.first_row + part.shape[0]
        start, end = (tensor.offset_bytes + tensor.num_bytes * row // num_rows for row in (first, end))
        return start, end

    def _bytes(self, start: int, end: int) -> torch.Tensor:
        return torch.from_numpy(self._data[start:end])

    def _is_in_pairs(self, name: str) -> bool:
        return self._in_pairs and name.split(".")[-2] in ("q", "k")


def pairs_to_halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of each head from rotary pairs (0, 1), (2, 3), ... to two halves: all first members, then all second."""
    heads = rows.shape[0] // head_dim
    return rows.view(heads, head_dim // 2, 2, -1).transpose(1, 2).reshape(rows.shape)


def halves_to_pairs(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The way back."""
    heads = rows.shape[0] // head_dim
    return rows.view(heads, 2, head_dim // 2, -1).transpose(1, 2).reshape(rows.shape)
