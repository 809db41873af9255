"""The gate of the feed-forward part for every activation: y = f(gate) * up, gate and up side by side in one row.

    silu: g / (1 + exp(-g));   gelu: g (1 + erf(g / sqrt 2)) / 2
    gelu_tanh: g / (1 + exp(-2 u)) with u = sqrt(2 / pi) (g + 0.044715 g^3), which is g (1 + tanh u) / 2

y may be quantised for the product that follows (see `scaled_rows`). The CPU engine's silu is `silu_mul`.
"""

from __future__ import annotations

import math

import torch

from kernels.dispatch import uses_triton
from kernels.scaled_rows import ScaledRows, check_scaling, scale_rows_reference

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
GELU_SCALE = math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """[M, 2 F] → [M, F] of the same type, float32 inside."""
    _check(gate_up, activation)
    if uses_triton(gate_up):
        from kernels.gpu.gated_activation import gated_activation_triton  # needs Triton, as a GPU has it

        return gated_activation_triton(gate_up, activation)
    return gated_activation_reference(gate_up, activation)


def gated_activation_scaled(
    gate_up: torch.Tensor, activation: str, to: torch.dtype, group: int | None = None
) -> ScaledRows:
    """The same in eight bits, from its float32 values."""
    _check(gate_up, activation)
    check_scaling("gated_activation", gate_up.shape[-1] // 2, to, group)
    if uses_triton(gate_up):
        from kernels.gpu.gated_activation import gated_activation_scaled_triton  # as above

        return gated_activation_scaled_triton(gate_up, activation, to, group)
    return gated_activation_scaled_reference(gate_up, activation, to, group)


def gated_activation_reference(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    return _gated(gate_up, activation).to(gate_up.dtype)


def gated_activation_scaled_reference(
    gate_up: torch.Tensor, activation: str, to: torch.dtype, group: int | None = None
) -> ScaledRows:
    return scale_rows_reference(_gated(gate_up, activation), to, group)


def _gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation == "gelu":
        return gate * (1.0 + torch.erf(gate * math.sqrt(0.5))) * 0.5 * up
    exponent = gate if activation == "silu" else 2.0 * GELU_SCALE * (gate + GELU_CUBIC * gate * gate * gate)
    return gate / (1.0 + torch.exp(-exponent)) * up


def _check(gate_up: torch.Tensor, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"gated_activation: {activation!r} is none of {', '.join(ACTIVATIONS)}")
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or not gate_up.is_floating_point():
        raise ValueError(f"gated_activation: {gate_up.dtype} {tuple(gate_up.shape)}, a pair of halves expected")
