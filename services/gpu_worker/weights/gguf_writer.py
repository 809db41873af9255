"""Writes GGUF files: header first, then tensors as their bytes come. What keys and tensors mean is the caller's."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from shared.gguf_header import GGML_TYPES, MAGIC

ALIGNMENT = 32
_TYPE_IDS = {name: (type_id, elements, num_bytes) for type_id, (name, elements, num_bytes) in GGML_TYPES.items()}
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64 = 4, 5, 6, 7, 8, 9, 10


@dataclass(frozen=True, slots=True)
class TensorHead:
    """shape is row-major: the last axis is contiguous."""

    name: str
    shape: tuple[int, ...]
    type_name: str

    @property
    def num_bytes(self) -> int:
        _, elements, num_bytes = _TYPE_IDS[self.type_name]
        return prod(self.shape) // elements * num_bytes


def write_gguf(path: Path, metadata: Mapping[str, Any], heads: Sequence[TensorHead],
               data: Iterable[Iterable[bytes | memoryview]]) -> None:  # fmt: skip
    """data: for each head, its bytes in pieces. The file appears when it is whole."""
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            file.write(MAGIC + struct.pack("<IQQ", 3, len(heads), len(metadata)))
            for key, value in metadata.items():
                _string(file, key)
                _typed(file, value)
            _table(file, heads)
            for head, pieces in zip(heads, data, strict=True):
                _pad(file)
                start = file.tell()
                for piece in pieces:
                    file.write(piece)
                if file.tell() - start != head.num_bytes:
                    raise ValueError(f"tensor {head.name!r}: {file.tell() - start} bytes for {head.num_bytes}")
            _pad(file)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _table(file: BinaryIO, heads: Sequence[TensorHead]) -> None:
    offset = 0
    for head in heads:
        _string(file, head.name)
        file.write(struct.pack(f"<I{len(head.shape)}Q", len(head.shape), *reversed(head.shape)))
        file.write(struct.pack("<IQ", _TYPE_IDS[head.type_name][0], offset))
        offset += -(-head.num_bytes // ALIGNMENT) * ALIGNMENT


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))


def _string(file: BinaryIO, text: str) -> None:
    data = text.encode("utf-8")
    file.write(struct.pack("<Q", len(data)) + data)


def _typed(file: BinaryIO, value: Any) -> None:
    kind = _kind(value)
    file.write(struct.pack("<I", kind))
    if kind != _ARRAY:
        _plain(file, kind, value)
        return
    items = [_INT32 if type(item) is int else _kind(item) for item in value] or [_INT32]
    if len(set(items)) > 1:
        raise TypeError(f"an array of several types: {str(value)[:100]}")
    file.write(struct.pack("<IQ", items[0], len(value)))
    for item in value:
        _plain(file, items[0], item)


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, int):
        return _UINT32 if 0 <= value < 1 << 32 else _UINT64
    return {float: _FLOAT32, str: _STRING, list: _ARRAY}[type(value)]


def _plain(file: BinaryIO, kind: int, value: Any) -> None:
    if kind == _STRING:
        _string(file, value)
    else:
        code = {_UINT32: "I", _INT32: "i", _FLOAT32: "f", _BOOL: "?", _UINT64: "Q"}[kind]
        file.write(struct.pack(f"<{code}", value))
