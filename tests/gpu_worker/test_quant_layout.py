"""GGUF block types: the same float32 values, bit by bit, as the gguf package gives for random bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import packed_weight
from services.gpu_worker.weights.quant_layout import TYPES, decode_rows, dequantize
from shared.gguf_header import GGML_TYPES

gguf = pytest.importorskip("gguf")
TYPE_IDS = {name: type_id for type_id, (name, _, _) in GGML_TYPES.items() if name in TYPES}


def random_blocks(name: str, count: int) -> np.ndarray:
    _, _, num_bytes = GGML_TYPES[TYPE_IDS[name]]
    return np.random.default_rng(len(name)).integers(0, 256, (count, num_bytes), dtype=np.uint8)


@pytest.mark.parametrize("name", sorted(set(TYPES) - {"F32", "F16"}))
def test_against_the_gguf_package(name: str) -> None:
    raw = random_blocks(name, 300)
    with np.errstate(all="ignore"):
        want = gguf.dequantize(raw.reshape(1, -1), gguf.GGMLQuantizationType(TYPE_IDS[name])).reshape(300, -1)
    got = dequantize(name, torch.from_numpy(raw))
    assert got.shape == (300, GGML_TYPES[TYPE_IDS[name]][1])
    assert got.dtype == torch.float32
    np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize(("name", "dtype"), [("F32", np.float32), ("F16", np.float16)])
def test_plain_types(name: str, dtype: type) -> None:
    raw = random_blocks(name, 200)
    np.testing.assert_array_equal(
        dequantize(name, torch.from_numpy(raw)).numpy(), raw.view(dtype).astype(np.float32).reshape(200, 1)
    )


def test_weight_files_quantised_every_way_to_store_a_tensor_gives_its_values() -> None:
    """A BF16 tensor of 3 x 5 known values equals its F16 and F32 twins."""
    values = torch.tensor([[0.5, -1.0, 2.0, 3.0, -4.0], [0.25, 96.0, 0.0, 1.5, -0.125], [7.0, 6.0, 5.0, 4.0, 3.0]])
    for name, dtype in (("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)):
        size = torch.empty(0, dtype=dtype).element_size()
        raw = values.to(dtype).contiguous().view(torch.uint8).view(-1, size)
        assert torch.equal(dequantize(name, raw).view(3, 5), values), name


def test_rows_of_a_table_s_numbers_are_stored_as_signed_bytes() -> None:
    raw = random_blocks("IQ4_NL", 12)
    raw[:, 1] = 0x20  # scales that are finite
    rows = decode_rows("IQ4_NL", torch.from_numpy(raw).view(4, -1), 18)
    assert (rows.type_name, rows.q.dtype, rows.q.shape, rows.d.shape) == ("Q8_0", torch.int8, (4, 96), (4, 3))
    want = dequantize("IQ4_NL", torch.from_numpy(raw)).view(4, 96)
    assert torch.equal(packed_weight.dequantize(rows), want)
