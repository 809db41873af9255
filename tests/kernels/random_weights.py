"""Random weights of every type, as codes and as floats."""

from __future__ import annotations

import torch

from kernels.packed_weight import DENSE, GROUP, SCHEMES, SUPER_GROUP, Codes, PackedWeight, dequantize, pack, pack_dense

TYPES = (*DENSE, *SCHEMES)


def random_codes(type_name: str, rows: int, columns: int) -> Codes:
    """Every integer that the type has, the largest and smallest included."""
    scheme = SCHEMES[type_name]
    low, high = (-128, 128) if type_name == "Q8_0" else (0, 1 << scheme.bits)
    q = torch.randint(low, high, (rows, columns)).to(torch.int8 if low else torch.uint8)
    shape = (rows, columns // (SUPER_GROUP if scheme.sub_columns else GROUP))
    m = torch.randn(shape).half() if scheme.has_m else None
    sub = sub_min = None
    if scheme.sub_columns:
        sub_shape = (rows, columns // scheme.sub_columns)
        if scheme.has_m:
            most = 16 if type_name == "Q2_K" else 64
            sub, sub_min = (torch.randint(0, most, sub_shape).to(torch.uint8) for _ in range(2))
        else:
            sub = torch.randint(-128, 128, sub_shape).to(torch.int8)
    return Codes(type_name, q, torch.randn(shape).half(), m, sub, sub_min)


def random_weight(type_name: str, rows: int, columns: int) -> tuple[PackedWeight, torch.Tensor]:
    """Packed, and the float32 numbers that it stands for."""
    if type_name in DENSE:
        dense = torch.randn(rows, columns).to(DENSE[type_name])
        return pack_dense(dense), dense.float()
    codes = random_codes(type_name, rows, columns)
    return pack(codes), dequantize(codes)
