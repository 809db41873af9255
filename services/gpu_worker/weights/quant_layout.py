"""What the blocks of GGUF's types mean: bytes to integer codes with scales, exactly as ggml defines them. *Pure.*

Functions take blocks as uint8 [num_blocks, bytes a block]. Scales are little-endian float16. What codes and scales
amount to, and how they are packed for the native products, is `kernels.packed_weight`'s.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels import packed_weight
from kernels.packed_weight import DENSE, GROUP, SCHEMES, Codes


def dequantize(type_name: str, blocks: torch.Tensor) -> torch.Tensor:
    """float32 [num_blocks, elements a block]; KeyError for a type that is not in `TYPES`."""
    if type_name in DENSE:
        return blocks.contiguous().view(DENSE[type_name]).float()
    return packed_weight.dequantize(decode(type_name, blocks))


def decode(type_name: str, blocks: torch.Tensor) -> Codes:
    """A row of codes for each block, perhaps as another type that holds the same numbers."""
    return _DECODERS[type_name](blocks)


def decode_rows(type_name: str, rows: torch.Tensor, block_bytes: int) -> Codes:
    """rows: uint8 [N, bytes of a row's blocks] -> codes [N, K]."""
    codes, count = decode(type_name, rows.reshape(-1, block_bytes)), rows.shape[0]

    def by_row(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values.reshape(count, -1)

    return Codes(
        codes.type_name, codes.q.reshape(count, -1), codes.d.reshape(count, -1), by_row(codes.m), by_row(codes.sub),
        by_row(codes.sub_min),
    )  # fmt: skip


def encode(codes: Codes) -> torch.Tensor:
    """The blocks of rows of codes, uint8 [N, bytes of a row]; of types with a scale for 32 columns."""
    q = codes.q.view(codes.q.shape[0], -1, GROUP)
    parts = [codes.d[..., None].view(torch.uint8)]
    if codes.m is not None:
        parts.append(codes.m[..., None].view(torch.uint8))
    if SCHEMES[codes.type_name].bits == 5:
        shifts = torch.arange(8, dtype=torch.uint8)
        parts.append(((q >> 4).view(*q.shape[:2], 4, 8) << shifts).sum(-1, dtype=torch.uint8))
    if codes.type_name == "Q8_0":
        parts.append(q.view(torch.uint8))
    else:
        parts.append(q[..., :16] & 15 | q[..., 16:] << 4)
    return torch.cat(parts, dim=-1).flatten(1)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at this byte of every block, [num_blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[n, b] bytes -> [n, 2 b]: first all low nibbles, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _fifth_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Bit e of the 32-bit word at this byte, as 16 or 0, for e = 0 to 31."""
    bits = blocks[:, start : start + 4].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)
    return ((bits & 1) << 4).flatten(1)


def _q4_0(blocks: torch.Tensor) -> Codes:
    return Codes("Q4_0", _nibbles(blocks[:, 2:]), _half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> Codes:
    return Codes("Q4_1", _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> Codes:
    return Codes("Q5_0", _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2), _half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> Codes:
    return Codes("Q5_1", _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> Codes:
    return Codes("Q8_0", blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0))


# What IQ4_NL's four bits stand for, in place of equal steps.
_IQ4_VALUES = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)


def _iq4_nl(blocks: torch.Tensor) -> Codes:
    """As signed bytes, which every product with Q8_0 takes."""
    return Codes("Q8_0", _IQ4_VALUES[_nibbles(blocks[:, 2:]).long()], _half(blocks, 0))


def _quarters(packed: torch.Tensor) -> torch.Tensor:
    """[n, 64] bytes -> [n, 256]: of each half of 32 bytes first all lowest pairs of bits, then the next ones."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    return ((packed.reshape(-1, 2, 1, 32) >> shifts) & 3).flatten(1)


def _q2_k(blocks: torch.Tensor) -> Codes:
    packed = blocks[:, :16]
    return Codes("Q2_K", _quarters(blocks[:, 16:80]), _half(blocks, 80), _half(blocks, 82), packed & 15, packed >> 4)


def _q3_k(blocks: torch.Tensor) -> Codes:
    high = blocks[:, :32].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    packed = blocks[:, 96:108]
    low = torch.cat((packed[:, :8] & 15, packed[:, :8] >> 4), dim=1)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 4, 1)
    top = ((packed[:, 8:].unsqueeze(1) >> shifts) & 3).flatten(1)
    scales = (low | top << 4).view(torch.int8) - 32
    return Codes("Q3_K", _quarters(blocks[:, 32:96]) | ((high & 1) << 2).flatten(1), _half(blocks, 108), sub=scales)


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eight 6-bit scales and minimums in the 12 bytes of a Q4_K or Q5_K block, each uint8 [n, 8]."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), dim=1)
    minimums = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), dim=1)
    return scales, minimums


def _q4_k(blocks: torch.Tensor) -> Codes:
    # Each run of 32 bytes holds sub-block 2c in its low nibbles and 2c + 1 in its high ones.
    q = _nibbles(blocks[:, 16:].reshape(-1, 32)).view(-1, 256)
    return Codes("Q4_K", q, _half(blocks, 0), _half(blocks, 2), *_k_scales(blocks[:, 4:16]))


def _q5_k(blocks: torch.Tensor) -> Codes:
    low = _nibbles(blocks[:, 48:].reshape(-1, 32)).view(-1, 8, 32)
    high = blocks[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    q = (low | (high & 1) << 4).view(-1, 256)
    return Codes("Q5_K", q, _half(blocks, 0), _half(blocks, 2), *_k_scales(blocks[:, 4:16]))


def _q6_k(blocks: torch.Tensor) -> Codes:
    low = blocks[:, :128].reshape(-1, 2, 64)  # two halves of 128 elements
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    q = torch.cat((low & 15, low >> 4), dim=2).view(-1, 2, 4, 32) | (high & 3) << 4
    return Codes("Q6_K", q.view(-1, 256), _half(blocks, 208), sub=blocks[:, 192:208].contiguous().view(torch.int8))


_DECODERS: dict[str, Callable[[torch.Tensor], Codes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
TYPES = (*DENSE, *_DECODERS)
