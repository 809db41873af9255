"""RMS normalisation: y = x / sqrt(mean(x^2) + eps) * weight over the last axis."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D], weight [D], both float32; a row's result does not depend on the other rows."""
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        raise TypeError(f"rms_norm: float32 expected, got {x.dtype} and {weight.dtype}")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: weight {tuple(weight.shape)} for rows of {x.shape[-1]}")
    return rms_norm_reference(x, weight, eps)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    # torch.rms_norm computes the same through three times as many operator calls.
    inverse = (x * x).sum(-1, keepdim=True).div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * inverse).mul_(weight)
