"""Product of weights and activations in eight bits, int8 or float8_e4m3fn: y = x W^T + bias.

    w[n, k] = scale[g, n] q[n, k]        g = k // (K / groups); one group, or groups of GROUP columns

x is quantised row by row with as many scales (see `scaled_rows`), or comes so. A row of y depends on that row of x and
on W alone, unless `fast` is given: then the vendor's library multiplies many rows of 8-bit floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.dispatch import uses_triton
from kernels.matmul_float import LIBRARY_ROWS, check_product
from kernels.scaled_rows import LIMITS, ScaledRows, scale_rows

GROUP = 128


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """W [out_features, in_features]."""

    q: torch.Tensor  # int8 or float8_e4m3fn [N, K]
    scale: torch.Tensor  # float32 [groups, N]

    def __post_init__(self) -> None:
        rows, columns = self.q.shape
        groups = self.scale.shape[0]
        if self.q.dtype not in LIMITS or self.scale.shape != (groups, rows) or groups not in (1, columns / GROUP):
            raise ValueError(f"ScaledWeight: {self.q.dtype} {tuple(self.q.shape)}, scales {tuple(self.scale.shape)}")

    @property
    def out_features(self) -> int:
        return self.q.shape[0]

    @property
    def in_features(self) -> int:
        return self.q.shape[1]

    @property
    def group(self) -> int | None:
        """Columns that share a scale; None: all of a row."""
        return None if self.scale.shape[0] == 1 else GROUP

    @property
    def num_bytes(self) -> int:
        return self.q.numel() + 4 * self.scale.numel()

    def values(self) -> torch.Tensor:
        """float32 [N, K]."""
        repeats = self.in_features // self.scale.shape[0]
        return self.q.float() * self.scale.t().repeat_interleave(repeats, 1)


def join_scaled(weights: Sequence[ScaledWeight]) -> ScaledWeight:
    """The rows of all, one after the other. ValueError unless they are quantised alike."""
    if len({(w.in_features, w.q.dtype, w.group) for w in weights}) != 1:
        raise ValueError("join: weights of eight bits in different formats")
    bytes_of_all = torch.cat([w.q.view(torch.uint8) for w in weights])
    return ScaledWeight(bytes_of_all.view(weights[0].q.dtype), torch.cat([w.scale for w in weights], 1))


def matmul_w8a8(
    x: torch.Tensor | ScaledRows, weight: ScaledWeight, bias: torch.Tensor | None = None,
    to: torch.dtype | None = None, fast: bool = False,
) -> torch.Tensor:  # fmt: skip
    """x [M, K] -> [M, N] of the type `to`, x's if None; where x is quantised already, `to` is to be given."""
    if isinstance(x, torch.Tensor):
        to = to or x.dtype
        check_product("matmul_w8a8", x, weight.out_features, weight.in_features, bias, to)
        x = scale_rows(x, weight.q.dtype, weight.group)
    if to is None or x.q.dtype != weight.q.dtype or x.scale.shape[1] != weight.scale.shape[0]:
        raise ValueError(
            f"matmul_w8a8: {x.q.dtype} rows, {x.scale.shape[1]} scales each, with {weight.q.dtype} to {to}"
        )
    if x.q.shape[1] != weight.in_features:
        raise ValueError(f"matmul_w8a8: x {tuple(x.q.shape)} with W {tuple(weight.q.shape)}")
    if fast and _library_multiplies(x.q, weight):
        bias = None if bias is None else bias.to(to)
        return torch._scaled_mm(x.q, weight.q.t(), x.scale, weight.scale, bias, out_dtype=to)
    if uses_triton(x.q):
        from kernels.gpu.matmul_w8a8 import matmul_w8a8_triton  # where there is no GPU, there need be no Triton

        return matmul_w8a8_triton(x, weight, bias, to)
    return matmul_w8a8_reference(x, weight, bias, to)


def _library_multiplies(x: torch.Tensor, weight: ScaledWeight) -> bool:
    """Can it, and are there rows enough? It has scales for whole rows alone, and no AMD GPU's form of e4m3."""
    if weight.q.dtype is not torch.float8_e4m3fn or weight.group is not None or torch.version.hip is not None:
        return False
    if x.shape[0] < LIBRARY_ROWS or weight.in_features % 16 or weight.out_features % 16 or x.is_meta:
        return False
    return not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (8, 9)


def matmul_w8a8_reference(
    x: ScaledRows, weight: ScaledWeight, bias: torch.Tensor | None, to: torch.dtype
) -> torch.Tensor:
    y = x.dequantized() @ weight.values().t()
    return (y if bias is None else y + bias.float()).to(to)
