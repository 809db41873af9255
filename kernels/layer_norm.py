"""Layer normalisation: y = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias over the last axis."""

from __future__ import annotations

import torch


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D], weight and bias [D], all float32; a row's result does not depend on the other rows."""
    if not x.dtype == weight.dtype == bias.dtype == torch.float32:
        raise TypeError(f"layer_norm: float32 expected, got {x.dtype}, {weight.dtype} and {bias.dtype}")
    if weight.shape != x.shape[-1:] or bias.shape != weight.shape:
        raise ValueError(f"layer_norm: weight {tuple(weight.shape)} for rows of {x.shape[-1]}")
    return layer_norm_reference(x, weight, bias, eps)


def layer_norm_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    centred = x - x.sum(-1, keepdim=True).div_(x.shape[-1])
    inverse = (centred * centred).sum(-1, keepdim=True).div_(x.shape[-1]).add_(eps).rsqrt_()
    return centred.mul_(inverse).mul_(weight).add_(bias)
