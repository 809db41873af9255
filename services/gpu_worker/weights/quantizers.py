"""Floats to codes by group of 32 columns, bit for bit as ggml's own quantisers round them. *Pure.*

A group's scale comes from its value furthest from zero (Q4_0, Q5_0, Q8_0) or from its smallest and largest (_1).
"""

from __future__ import annotations

import torch

from kernels.packed_weight import GROUP, SCHEMES, Codes

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def quantize(weight: torch.Tensor, type_name: str) -> Codes:
    """weight [N, K] of any float type, K a multiple of 32."""
    groups = weight.float().reshape(weight.shape[0], -1, GROUP)
    scheme = SCHEMES[type_name]
    if type_name == "Q8_0":
        d = groups.abs().amax(-1) / 127
        scaled = groups * _inverse(d)
        q = scaled.sign() * (scaled.abs() + 0.5).floor()
        return Codes(type_name, q.to(torch.int8).view(weight.shape), d.half())
    most = (1 << scheme.bits) - 1
    if scheme.has_m:
        low = groups.amin(-1)
        d = (groups.amax(-1) - low) / most
        q = (groups - low[..., None]) * _inverse(d) + 0.5
        return Codes(type_name, _cut(q, most).view(weight.shape), d.half(), low.half())
    furthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
    d = furthest / -scheme.centre
    q = (groups.double() * _inverse(d).double() + (scheme.centre + 0.5)).float()
    return Codes(type_name, _cut(q, most).view(weight.shape), d.half())


def _inverse(d: torch.Tensor) -> torch.Tensor:
    return torch.where(d == 0, 0.0, 1.0 / d)[..., None]


def _cut(q: torch.Tensor, most: int) -> torch.Tensor:
    return q.trunc().clamp(0, most).to(torch.uint8)
