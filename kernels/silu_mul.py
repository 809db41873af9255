"""The gate of the feed-forward part: y = silu(gate) * up, with gate and up side by side in one row.

silu is written out as g / (1 + exp(-g)): torch's own `silu` and `sigmoid` use another exp for the last elements of
a tensor than for the rest, so a row's bits would depend on where it lies.
"""

from __future__ import annotations

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2 F] -> [..., F], float32."""
    if gate_up.dtype != torch.float32:
        raise TypeError(f"silu_mul: float32 expected, got {gate_up.dtype}")
    if gate_up.shape[-1] % 2:
        raise ValueError(f"silu_mul: rows of {gate_up.shape[-1]} are not a pair of halves")
    return silu_mul_reference(gate_up)


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    denominator = gate.neg().exp_().add_(1.0)
    return torch.div(gate, denominator, out=denominator).mul_(up)
