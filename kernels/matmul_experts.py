"""Products of a mixture of experts: each token with the weights of the experts that it passes, and their sum.

The weights of all experts are one weight, rows of expert e after those of e - 1 (see `matmul.join`). A row's result
depends on that row, its experts and their weights alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.dispatch import uses_triton
from kernels.matmul import DeviceWeight
from kernels.matmul_a16 import matmul_a16_reference
from kernels.matmul_float import FLOATS, FloatWeight, matmul_float_reference
from kernels.matmul_w8a8 import ScaledWeight, matmul_w8a8_reference
from kernels.matmul_w8a16 import takes_w8a16
from kernels.planar_weight import PlanarWeight
from kernels.routing import Routing
from kernels.scaled_rows import scale_rows


def matmul_experts(
    x: torch.Tensor, weight: DeviceWeight, routing: Routing, to: torch.dtype | None = None
) -> torch.Tensor:
    """x [M, K], a row for each token, or [pairs, K], one for each pair -> [pairs, N] of the type `to`, x's if None.

    weight: of [experts N, K], see `matmul.stack`.
    """
    to = to or x.dtype
    _check(x, weight, routing, to)
    if isinstance(weight, PlanarWeight) and weight.order is not None:
        x, weight = _in_order(x, weight.order, routing), replace(weight, order=None)
    if not uses_triton(x):
        return matmul_experts_reference(x, weight, routing, to)
    from kernels.gpu.matmul_a16 import matmul_a16_triton  # where there is no GPU, there need be no Triton
    from kernels.gpu.matmul_float import matmul_float_triton  # as above
    from kernels.gpu.matmul_w8a8 import matmul_w8a8_triton  # as above
    from kernels.gpu.matmul_w8a16 import matmul_w8a16_triton  # as above

    if isinstance(weight, FloatWeight):
        return matmul_float_triton(x, weight.tensor, None, to, routing)
    if isinstance(weight, ScaledWeight):
        if takes_w8a16(x, weight):
            return matmul_w8a16_triton(x, weight, None, to, routing)
        return matmul_w8a8_triton(scale_rows(x, weight.q.dtype, weight.group), weight, None, to, routing)
    return matmul_a16_triton(x, weight, None, to, routing)


def _in_order(x: torch.Tensor, order: torch.Tensor, routing: Routing) -> torch.Tensor:
    """A row for each pair, its columns as the expert's codes lie."""
    pairs = x if x.shape[0] == routing.num_pairs else x.repeat_interleave(routing.choices, 0)
    return pairs.gather(1, order[routing.chosen.flatten()])


def matmul_experts_reference(x: torch.Tensor, weight: DeviceWeight, routing: Routing, to: torch.dtype) -> torch.Tensor:
    if isinstance(weight, FloatWeight):
        all_rows = matmul_float_reference(x, weight, None, to)
    elif isinstance(weight, ScaledWeight):
        all_rows = matmul_w8a8_reference(scale_rows(x, weight.q.dtype, weight.group), weight, None, to)
    else:
        all_rows = matmul_a16_reference(x, weight, None, to)
    of_expert = all_rows.view(x.shape[0], routing.num_experts, -1)
    chosen = routing.chosen.reshape(x.shape[0], -1)
    return of_expert[torch.arange(x.shape[0], device=x.device)[:, None], chosen].flatten(0, 1)


def add_experts(parts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What a token's experts give, weighted and added in the order of its choices.

    parts [M choices, N], weights float32 [M, choices] -> [M, N] of parts' type, rounded once.
    """
    if weights.dim() != 2 or parts.dim() != 2 or parts.shape[0] != weights.numel() or weights.dtype != torch.float32:
        raise ValueError(f"add_experts: parts {tuple(parts.shape)}, weights {weights.dtype} {tuple(weights.shape)}")
    if uses_triton(parts):
        from kernels.gpu.matmul_experts import add_experts_triton  # as above

        return add_experts_triton(parts.contiguous(), weights.contiguous())
    return add_experts_reference(parts, weights)


def add_experts_reference(parts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    of_token = parts.float().view(*weights.shape, -1)
    total = torch.zeros_like(of_token[:, 0])
    for choice in range(weights.shape[1]):
        total += of_token[:, choice] * weights[:, choice, None]
    return total.to(parts.dtype)


def _check(x: torch.Tensor, weight: DeviceWeight, routing: Routing, to: torch.dtype) -> None:
    if x.dim() != 2 or x.shape[1] != weight.in_features or x.shape[0] not in (len(routing.chosen), routing.num_pairs):
        raise ValueError(f"matmul_experts: x {tuple(x.shape)} with experts {tuple(routing.chosen.shape)}")
    if weight.out_features % routing.num_experts or (
        isinstance(weight, FloatWeight) and weight.tensor.dtype != x.dtype
    ):
        raise ValueError(f"matmul_experts: {weight.out_features} rows for {routing.num_experts} experts, x {x.dtype}")
    if x.dtype not in FLOATS or to not in FLOATS:
        raise TypeError(f"matmul_experts: float32, float16 or bfloat16 expected, got {x.dtype} and {to}")
    order = weight.order if isinstance(weight, PlanarWeight) else None
    if order is not None and order.shape != (routing.num_experts, weight.in_features):
        raise ValueError("matmul_experts: columns in an order that is not each expert's")
