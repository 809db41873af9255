"""Rotary position embedding, in the half-split form: pair (x[i], x[i + R/2]) of a head turns by the angle of position.

    y[i]       = x[i] cos_i       - x[i + R/2] sin_i
    y[i + R/2] = x[i + R/2] cos_i + x[i] sin_i          for i < R/2

cos and signed_sin hold whole rows of R: signed_sin is (-sin, sin), so that y = x cos + swapped(x) signed_sin.
`rope_at` is the same for GPUs: in place, from whole tables, for other arrangements of the pairs too.
"""

from __future__ import annotations

import torch

from kernels.dispatch import uses_triton


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


def rope_at(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> None:
    """Turn the first R columns of each head in place. x [N, H, D], positions int32 [N], tables float32 [P, R / 2].

    interleaved: pairs are (x[2 i], x[2 i + 1]) instead. Whatever scaling a model has is in the tables, as are the
    factors that some multiply cosines and sines with. R may be less than D.
    """
    half = cos.shape[1]
    if x.dim() != 3 or not 0 < 2 * half <= x.shape[2] or cos.shape != sin.shape or positions.shape != x.shape[:1]:
        raise ValueError(
            f"rope_at: x {tuple(x.shape)} with {tuple(positions.shape)} positions, tables {tuple(cos.shape)}"
        )
    if cos.dtype != torch.float32 or sin.dtype != torch.float32 or positions.dtype != torch.int32:
        raise TypeError(f"rope_at: float32 tables and int32 positions expected, got {cos.dtype}, {positions.dtype}")
    if uses_triton(x):
        from kernels.gpu.rope import rope_at_triton  # where there is no GPU, there need be no Triton

        rope_at_triton(x, positions, cos, sin, interleaved)
    else:
        rope_at_reference(x, positions, cos, sin, interleaved)


def rope_at_reference(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> None:
    rotary = x[..., : 2 * cos.shape[1]]
    first, second = (rotary[..., 0::2], rotary[..., 1::2]) if interleaved else rotary.chunk(2, dim=-1)
    a, b = first.float(), second.float()
    c, s = cos[positions.long()].unsqueeze(1), sin[positions.long()].unsqueeze(1)
    turned = a * c - b * s, b * c + a * s  # both before either is written: a and b may be x itself
    first.copy_(turned[0])
    second.copy_(turned[1])
