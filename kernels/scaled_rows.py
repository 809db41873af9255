"""Activations in eight bits with a scale for each row, or for each group of columns of a row: x = scale q.

    largest = max(|x|) of the group, at least SMALLEST;   scale = largest / limit
    q = x * (limit / largest), to the nearest, ties to even

limit is 127 for int8 and 448 for float8_e4m3fn. A group with a value that is not finite has the scale NaN, which
carries on into everything that is computed from it; its bytes mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.dispatch import uses_triton

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST = 2.0**-100  # keeps limit / largest finite


@dataclass(frozen=True, slots=True)
class ScaledRows:
    q: torch.Tensor  # int8 or float8_e4m3fn [M, K]
    scale: torch.Tensor  # float32 [M, K / group]

    def dequantized(self) -> torch.Tensor:
        """float32 [M, K]."""
        num_rows, columns = self.q.shape
        groups = self.q.float().view(num_rows, self.scale.shape[1], -1)
        return (groups * self.scale.unsqueeze(-1)).view(num_rows, columns)


def scale_rows(x: torch.Tensor, to: torch.dtype, group: int | None = None) -> ScaledRows:
    """x [M, K], float32, float16 or bfloat16; group columns share a scale, all of a row if None."""
    check_scaling("scale_rows", x.shape[-1], to, group)
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"scale_rows: {x.dtype} {tuple(x.shape)}")
    if uses_triton(x):
        from kernels.gpu.scaled_rows import scale_rows_triton  # where there is no GPU, there need be no Triton

        return scale_rows_triton(x, to, group)
    return scale_rows_reference(x, to, group)


def scale_rows_reference(x: torch.Tensor, to: torch.dtype, group: int | None = None) -> ScaledRows:
    groups = x.float().reshape(x.shape[0], -1, group or x.shape[1])
    largest = groups.abs().amax(-1).clamp_min(SMALLEST)
    q = groups * (LIMITS[to] / largest).unsqueeze(-1)
    q = torch.where(q.isnan(), 0.0, q).clamp(-LIMITS[to], LIMITS[to])
    scale = torch.where(largest.isfinite(), largest / LIMITS[to], torch.nan)
    return ScaledRows((q.round() if to is torch.int8 else q).to(to).view(x.shape), scale)


def check_scaling(op: str, columns: int, to: torch.dtype, group: int | None) -> None:
    """ValueError unless the op can quantise rows of so many columns like this."""
    if to not in LIMITS:
        raise ValueError(f"{op}: quantising to {to} is not possible; to int8 and float8_e4m3fn it is")
    if group is not None and (group < 16 or group & (group - 1) or columns % group):
        raise ValueError(f"{op}: groups of {group} in rows of {columns}; a power of two that divides them is needed")
