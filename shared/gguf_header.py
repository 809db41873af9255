"""The header of a GGUF file: metadata and tensor table, standard library only.

Every count, length and offset is checked as a Python int against the file's size before anything is allocated, and
a violation is a `GGUFError` that names the key or tensor. Knows nothing of what keys mean, and never reads tensor
data: the worker maps that itself from `offset_bytes` and `num_bytes`.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 1 << 28  # the largest vocabularies take about 16 MB; a table beyond this is not a model's
MAX_ARRAY_DEPTH = 4
MAX_DIMS = 4

# ggml type id -> (name, elements a block, bytes a block). Absent ids are unknown, removed, or never stored in files.
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}

# Metadata value type id -> struct code; 7 is bool, 8 string, 9 array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GGUFError(ValueError):
    """The file is not a readable GGUF file; the message names the key or tensor."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One row of the tensor table. shape is row-major, the reverse of the file's order: the last axis is contiguous."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset_bytes: int  # from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata values are int, float, bool, str or (nested) lists of them."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    alignment: int
    version: int


def read_gguf(path: str | Path) -> GGUFHeader:
    """Parse the header of the file; OSError if it cannot be read, GGUFError if it is malformed."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        if size < 24:
            raise GGUFError(f"{path}: {size} bytes are too few for a GGUF header")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data, size))


class _Cursor:
    """A position in the mapped file; `what` names, for errors, the key or tensor being read."""

    def __init__(self, data: mmap.mmap, file_size: int) -> None:
        self.data = data
        self.file_size = file_size
        self.end = min(file_size, MAX_HEADER_BYTES)
        self.pos = 0
        self.what = "header"

    def fail(self, reason: str) -> GGUFError:
        return GGUFError(f"{self.what}: {reason}")

    def take(self, num_bytes: int) -> int:
        """The position of the next num_bytes, which are then consumed."""
        start = self.pos
        if num_bytes > self.end - start:
            raise self.fail(f"{num_bytes} bytes at {start} reach past the end of the file or of a sane header")
        self.pos = start + num_bytes
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.take(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as e:
            raise self.fail("a string is not UTF-8") from e

    def value(self, type_id: int, depth: int = 0) -> Any:
        if type_id in _SCALARS:
            return self.scalar(_SCALARS[type_id])
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            return self.array(depth + 1)
        raise self.fail(f"unknown value type {type_id}")

    def array(self, depth: int) -> list[Any]:
        if depth > MAX_ARRAY_DEPTH:
            raise self.fail(f"arrays nested deeper than {MAX_ARRAY_DEPTH}")
        type_id, count = self.scalar("I"), self.scalar("Q")
        if type_id in _SCALARS:
            code = _SCALARS[type_id]
            start = self.take(count * struct.calcsize(f"<{code}"))
            return list(struct.unpack_from(f"<{count}{code}", self.data, start))
        # A string takes at least its length field, an array its type and count.
        if count > (self.end - self.pos) // 8:
            raise self.fail(f"an array of {count} items does not fit in the file")
        return [self.value(type_id, depth) for _ in range(count)]


def _parse(cursor: _Cursor) -> GGUFHeader:
    if cursor.data[:4] != MAGIC:
        raise cursor.fail(f"starts with {cursor.data[:4]!r}, not with {MAGIC!r}")
    cursor.pos = 4
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise cursor.fail(f"version {version} is not supported (known: 2, 3; little-endian)")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = _metadata(cursor, num_keys)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
        raise GGUFError(f"general.alignment: {alignment!r} is not a power of two from 8 to 65536")
    tensors = _tensor_table(cursor, num_tensors, alignment)
    return GGUFHeader(metadata, tensors, alignment, version)


def _metadata(cursor: _Cursor, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for i in range(num_keys):  # each turn consumes bytes, so the file's end bounds a false count
        cursor.what = f"metadata key number {i}"
        key = cursor.string()
        cursor.what = f"metadata key {key[:200]!r}"
        if key in metadata:
            raise cursor.fail("appears twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    return metadata


def _tensor_table(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, GGUFTensor]:
    relative: dict[str, GGUFTensor] = {}
    for i in range(num_tensors):
        cursor.what = f"tensor number {i}"
        tensor = _tensor(cursor, alignment)
        if tensor.name in relative:
            raise cursor.fail("appears twice")
        relative[tensor.name] = tensor
    data_start = -(-cursor.pos // alignment) * alignment
    tensors = {}
    for name, t in relative.items():
        offset = data_start + t.offset_bytes
        if offset + t.num_bytes > cursor.file_size:
            raise GGUFError(
                f"tensor {name!r}: {t.num_bytes} bytes at {offset} reach past the end of the file ({cursor.file_size})"
            )
        tensors[name] = GGUFTensor(name, t.shape, t.type, offset, t.num_bytes)
    in_order = sorted(tensors.values(), key=lambda t: t.offset_bytes)
    for one, other in pairwise(in_order):
        if one.offset_bytes + one.num_bytes > other.offset_bytes:
            raise GGUFError(f"tensor {other.name!r} begins within {one.name!r}")
    return tensors


def _tensor(cursor: _Cursor, alignment: int) -> GGUFTensor:
    """One row of the table, its offset still relative to the data section."""
    name = cursor.string()
    cursor.what = f"tensor {name[:200]!r}"
    num_dims = cursor.scalar("I")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.fail(f"{num_dims} dimensions (1 to {MAX_DIMS} are possible)")
    dims = [cursor.scalar("Q") for _ in range(num_dims)]
    type_id, offset = cursor.scalar("I"), cursor.scalar("Q")
    if type_id not in GGML_TYPES:
        raise cursor.fail(f"unknown type id {type_id}")
    type_name, block_elements, block_bytes = GGML_TYPES[type_id]
    if dims[0] % block_elements:
        raise cursor.fail(f"rows of {dims[0]} elements are not whole {type_name} blocks of {block_elements}")
    if offset % alignment:
        raise cursor.fail(f"offset {offset} is not a multiple of the alignment {alignment}")
    num_elements = 1
    for dim in dims:
        if dim < 1:
            raise cursor.fail(f"shape {dims} has an empty dimension")
        num_elements *= dim
    num_bytes = num_elements // block_elements * block_bytes
    return GGUFTensor(name, tuple(reversed(dims)), type_name, offset, num_bytes)
