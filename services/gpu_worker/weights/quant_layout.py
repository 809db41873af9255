"""What the blocks of GGUF's quantised types mean: bytes to float32, exactly as ggml defines them. *Pure.*

Every function takes blocks as uint8 [num_blocks, bytes a block] and gives float32 [num_blocks, elements a block].
Scales are little-endian float16. The packed in-memory layouts that native kernels multiply with will live here too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def dequantize(type_name: str, blocks: torch.Tensor) -> torch.Tensor:
    """KeyError for a type that is not in `DEQUANTIZERS`."""
    return DEQUANTIZERS[type_name](blocks)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at this byte of every block, as float32 [num_blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[n, b] bytes -> [n, 2 b]: first all low nibbles, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _fifth_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Bit e of the 32-bit word at this byte, as 16 or 0, for e = 0 to 31."""
    bits = blocks[:, start : start + 4].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)
    return ((bits & 1) << 4).flatten(1)


def _f32(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.float32)


def _f16(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.float16).float()


def _bf16(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.bfloat16).float()


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8.0)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    q = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (q.float() - 16.0)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * q.float() + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eight 6-bit scales and minimums in the 12 bytes of a Q4_K or Q5_K block, each [n, 8] float32."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), dim=1)
    minimums = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), dim=1)
    return scales.float(), minimums.float()


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    # Each run of 32 bytes holds sub-block 2c in its low nibbles and 2c + 1 in its high ones.
    return _k_quant(blocks, _nibbles(blocks[:, 16:].reshape(-1, 32)).view(-1, 8, 32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks[:, 48:].reshape(-1, 32)).view(-1, 8, 32)
    high = blocks[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    return _k_quant(blocks, low | (high & 1) << 4)


def _k_quant(blocks: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    scales, minimums = _k_scales(blocks[:, 4:16])
    d, dmin = _half(blocks, 0) * scales, _half(blocks, 2) * minimums
    return (d.unsqueeze(-1) * q.float() - dmin.unsqueeze(-1)).flatten(1)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = blocks[:, :128].reshape(-1, 2, 64)  # two halves of 128 elements
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    q = torch.cat((low & 15, low >> 4), dim=2).view(-1, 2, 4, 32) | (high & 3) << 4
    scales = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return (scales.unsqueeze(-1) * (q.view(-1, 16, 16).float() - 32.0)).flatten(1)


DEQUANTIZERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
