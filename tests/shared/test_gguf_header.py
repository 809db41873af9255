"""GGUF headers: what is read back, and that every damage is one error which names its place."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.gguf_header import GGML_TYPES, GGUFError, read_gguf


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def key(name: str, type_id: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", type_id) + payload


def tensor(name: str, dims: list[int], type_id: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def gguf(keys: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3, alignment: int = 32) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data


@pytest.fixture
def parse(tmp_path: Path) -> Any:
    def parse_bytes(data: bytes) -> Any:
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return read_gguf(path)

    return parse_bytes


def test_metadata_of_every_type(parse: Any) -> None:
    array = struct.pack("<IQ", 8, 2) + text("ä") + text("")
    nested = struct.pack("<IQ", 9, 1) + struct.pack("<IQ3h", 3, 3, -1, 0, 7)
    keys = [
        key("u8", 0, b"\xff"),
        key("i8", 1, b"\xff"),
        key("u32", 4, struct.pack("<I", 1 << 31)),
        key("f32", 6, struct.pack("<f", 0.5)),
        key("yes", 7, b"\1"),
        key("text", 8, text("hello")),
        key("texts", 9, array),
        key("nested", 9, nested),
        key("u64", 10, struct.pack("<Q", 1 << 63)),
        key("f64", 12, struct.pack("<d", -2.25)),
    ]
    assert parse(gguf(keys, [])).metadata == {
        "u8": 255, "i8": -1, "u32": 1 << 31, "f32": 0.5, "yes": True, "text": "hello", "texts": ["ä", ""],
        "nested": [[-1, 0, 7]], "u64": 1 << 63, "f64": -2.25,
    }  # fmt: skip


@pytest.mark.parametrize("alignment", [32, 64])
def test_weight_files_quantised_tensor_table(parse: Any, alignment: int) -> None:
    keys = [key("general.alignment", 4, struct.pack("<I", alignment))]
    tensors = [tensor("a", [64, 3], 2, 0), tensor("b", [5], 0, 2 * alignment * 2)]
    data = b"\0" * (4 * alignment + 20)
    header = parse(gguf(keys, tensors, data, alignment=alignment))
    a, b = header.tensors["a"], header.tensors["b"]
    assert (a.shape, a.type, a.num_bytes) == ((3, 64), "Q4_0", 6 * 18)
    assert (b.shape, b.type, b.num_bytes) == ((5,), "F32", 20)
    assert b.offset_bytes - a.offset_bytes == 4 * alignment
    assert a.offset_bytes % alignment == 0
    assert header.alignment == alignment


DAMAGED = {
    "magic": (b"GGML" + b"\0" * 20, "GGUF"),
    "short": (b"GGUF", "too few"),
    "version": (gguf([], [], version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version"),
    "key count": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "key number 0"),
    "tensor count": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "tensor number 0"),
    "string length": (gguf([struct.pack("<Q", 1 << 63)], []), "key number 0"),
    "array length": (gguf([key("k", 9, struct.pack("<IQ", 4, 1 << 62))], []), "'k'"),
    "array of strings": (gguf([key("k", 9, struct.pack("<IQ", 8, 1 << 62))], []), "'k'"),
    "array of arrays": (gguf([key("k", 9, struct.pack("<IQ", 9, 1) * 9)], []), "'k'.*nested"),
    "value type": (gguf([key("k", 77, b"")], []), "'k'.*value type 77"),
    "not UTF-8": (gguf([key("k", 8, struct.pack("<Q", 1) + b"\xff")], []), "'k'.*UTF-8"),
    "key twice": (gguf([key("k", 0, b"\0")] * 2, []), "'k'.*twice"),
    "alignment": (gguf([key("general.alignment", 4, struct.pack("<I", 24))], []), "general.alignment"),
    "huge alignment": (gguf([key("general.alignment", 4, struct.pack("<I", 1 << 31))], []), "general.alignment"),
    "alignment zero": (gguf([key("general.alignment", 4, struct.pack("<I", 0))], []), "general.alignment"),
    "4 GB string": (gguf([key("k", 8, struct.pack("<Q", 1 << 32) + b"x" * 50)], []), "'k'.*past the end"),
    "overlap": (gguf([], [tensor("t", [16], 0, 0), tensor("u", [4], 0, 32)], b"\0" * 128), "'u' begins within 't'"),
    "same place": (gguf([], [tensor("t", [4], 0, 32), tensor("u", [4], 0, 32)], b"\0" * 128), "begins within"),
    "unknown type": (gguf([], [tensor("t", [4], 36, 0)]), "'t'.*type id 36"),
    "row length": (gguf([], [tensor("t", [33, 2], 8, 0)], b"\0" * 500), "'t'.*33"),
    "offset": (gguf([], [tensor("t", [4], 0, 1 << 40)], b"\0" * 64), "'t'.*past the end"),
    "size": (gguf([], [tensor("t", [1 << 40, 1 << 40], 0, 0)], b"\0" * 64), "'t'.*past the end"),
    "misaligned": (gguf([], [tensor("t", [4], 0, 8)], b"\0" * 64), "'t'.*alignment"),
    "empty": (gguf([], [tensor("t", [4, 0], 0, 0)], b"\0" * 64), "'t'.*empty"),
    "dimensions": (gguf([], [tensor("t", [1] * 5, 0, 0)], b"\0" * 64), "'t'.*5 dimensions"),
    "tensor twice": (gguf([], [tensor("t", [4], 0, 0)] * 2, b"\0" * 64), "'t'.*twice"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_weight_files_quantised_damage_is_named(parse: Any, name: str) -> None:
    data, message = DAMAGED[name]
    with pytest.raises(GGUFError, match=message):
        parse(data)


@given(cut=st.integers(0, 400), flip=st.integers(0, 400), value=st.integers(0, 255))
def test_no_damage_raises_anything_else(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flip: int, value: int
) -> None:
    keys = [key("k", 9, struct.pack("<IQ", 8, 2) + text("ab") + text("c")), key("n", 4, b"\1\0\0\0")]
    data = bytearray(gguf(keys, [tensor("t", [32, 2], 8, 0), tensor("u", [4], 0, 96)], b"\0" * 160))
    data[flip % len(data)] = value
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    path.write_bytes(bytes(data[: max(0, len(data) - cut)]))
    try:
        header = read_gguf(path)
    except GGUFError:
        return
    assert all(t.offset_bytes + t.num_bytes <= path.stat().st_size for t in header.tensors.values())


def test_types_agree_with_the_gguf_package() -> None:
    gguf_package = pytest.importorskip("gguf")
    for type_id, (name, elements, num_bytes) in GGML_TYPES.items():
        type_ = gguf_package.GGMLQuantizationType(type_id)
        assert (type_.name, gguf_package.GGML_QUANT_SIZES[type_]) == (name, (elements, num_bytes))


def test_a_file_of_the_gguf_package(tmp_path: Path) -> None:
    gguf_package = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "model.gguf"
    writer = gguf_package.GGUFWriter(path, "llama")
    writer.add_block_count(7)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("t", numpy.arange(12, dtype=numpy.float32).reshape(3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_gguf(path)
    assert header.metadata["llama.block_count"] == 7
    assert header.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
    found = header.tensors["t"]
    data = path.read_bytes()[found.offset_bytes : found.offset_bytes + found.num_bytes]
    assert numpy.frombuffer(data, numpy.float32).reshape(found.shape).tolist() == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11],
    ]  # fmt: skip
