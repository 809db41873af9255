"""RMS normalisation: y = x / sqrt(mean(x^2) + eps) * weight over the last axis.

With a residual: residual += x, rounded to its type, and then y is the norm of residual; so a decoder's addition
costs no pass of its own, and the bits are those of an addition before. y may be quantised (see `scaled_rows`).
"""

from __future__ import annotations

import torch

from kernels.dispatch import uses_triton
from kernels.scaled_rows import ScaledRows, check_scaling, scale_rows_reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., D], weight [D]; a row's result does not depend on the other rows. Changes residual, of x's shape.

    Torch computes float32 alone; Triton also float16 and bfloat16, of which y is then too.
    """
    _check(x, weight, residual)
    if uses_triton(x):
        from kernels.gpu.rms_norm import rms_norm_triton  # where there is no GPU, there need be no Triton

        return rms_norm_triton(x, weight, eps, residual)
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        raise TypeError(f"rms_norm: float32 expected, got {x.dtype} and {weight.dtype}")
    return rms_norm_reference(x, weight, eps, residual)


def rms_norm_scaled(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    to: torch.dtype,
    group: int | None = None,
    residual: torch.Tensor | None = None,
) -> ScaledRows:
    """The norm of x [M, D] in eight bits, from its float32 values: for products that take such rows."""
    _check(x, weight, residual)
    check_scaling("rms_norm", x.shape[-1], to, group)
    if x.dim() != 2:
        raise ValueError(f"rms_norm: rows to be quantised are [M, D], not {tuple(x.shape)}")
    if uses_triton(x):
        from kernels.gpu.rms_norm import rms_norm_scaled_triton  # as above

        return rms_norm_scaled_triton(x, weight, eps, to, group, residual)
    return rms_norm_scaled_reference(x, weight, eps, to, group, residual)


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    return _normed(x, weight, eps, residual).to(x.dtype)


def rms_norm_scaled_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    to: torch.dtype,
    group: int | None = None,
    residual: torch.Tensor | None = None,
) -> ScaledRows:
    return scale_rows_reference(_normed(x, weight, eps, residual), to, group)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> torch.Tensor:
    if residual is not None:
        x = residual.copy_(residual.float() + x.float())
    x = x.float()
    # torch.rms_norm computes the same through three times as many operator calls.
    inverse = (x * x).sum(-1, keepdim=True).div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * inverse).mul_(weight)


def _check(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: weight {tuple(weight.shape)} for rows of {x.shape[-1]}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"rms_norm: residual {tuple(residual.shape)} for x {tuple(x.shape)}")
    if not x.is_floating_point() or x.dtype == torch.float64:
        raise TypeError(f"rms_norm: float32, float16 or bfloat16 expected, got {x.dtype}")
