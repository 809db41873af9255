"""Rotary position embedding, in the half-split form: pair (x[i], x[i + R/2]) of a head turns by the angle of position.

    y[i]       = x[i] cos_i       - x[i + R/2] sin_i
    y[i + R/2] = x[i + R/2] cos_i + x[i] sin_i          for i < R/2

cos and signed_sin hold whole rows of R: signed_sin is (-sin, sin), so that y = x cos + swapped(x) signed_sin.
"""

from __future__ import annotations

import torch


def rope(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """x [N, H, R]; cos and signed_sin [N, R]; float32. Does not modify x."""
    if not x.dtype == cos.dtype == signed_sin.dtype == torch.float32:
        raise TypeError("rope: float32 expected")
    if x.dim() != 3 or x.shape[-1] % 2 or cos.shape != (x.shape[0], x.shape[2]) or signed_sin.shape != cos.shape:
        raise ValueError(f"rope: x {tuple(x.shape)} with tables {tuple(cos.shape)}, {tuple(signed_sin.shape)}")
    return rope_reference(x, cos, signed_sin)


def rope_reference(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    # Three separately rounded steps: a fused multiply-add in one of torch's loops and not in another would show.
    turned = torch.roll(x, x.shape[-1] // 2, dims=-1).mul_(signed_sin.unsqueeze(1))
    return (x * cos.unsqueeze(1)).add_(turned)
