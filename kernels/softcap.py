"""Soft capping: y = cap tanh(x / cap), as cap (1 - 2 / (exp(2 x / cap) + 1)): no bits that depend on x's place."""

from __future__ import annotations

import torch


def softcap_(x: torch.Tensor, cap: float) -> torch.Tensor:
    """In place, float32; cap > 0. What is minus infinity becomes -cap."""
    if x.dtype != torch.float32 or not cap > 0:
        raise TypeError(f"softcap_: float32 and a positive cap expected, got {x.dtype} and {cap}")
    return softcap_reference_(x, cap)


def softcap_reference_(x: torch.Tensor, cap: float) -> torch.Tensor:
    # exp overflows to infinity, whose reciprocal is the zero that is wanted
    return x.mul_(2.0 / cap).exp_().add_(1.0).reciprocal_().mul_(-2.0 * cap).add_(cap)
