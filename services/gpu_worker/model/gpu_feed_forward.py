"""The feed-forward half of a layer on a GPU's ops, as `feed_forward` computes it. Nothing here waits for the device.

The experts of all tokens are computed at once, and a token's are added in the order of its choices.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.choose_experts import choose_experts, sigmoid
from kernels.gated_activation import gated_activation
from kernels.matmul_experts import add_experts
from kernels.routing import routing_of
from services.gpu_worker.model.config import ExpertConfig, ModelConfig
from services.gpu_worker.model.feed_forward import rule_of
from services.gpu_worker.model.layers import ExpertWeights, FeedForwardWeights, JoinedExperts


def gpu_feed_forward(x: torch.Tensor, ffn: FeedForwardWeights | ExpertWeights, config: ModelConfig) -> torch.Tensor:
    """x [N, hidden_size], normed -> the half's output."""
    if isinstance(ffn, FeedForwardWeights):
        return ffn.down(_activated(ffn.into(x), config))
    assert config.experts is not None
    return _mixture(x, ffn, config, config.experts)


def _mixture(x: torch.Tensor, ffn: ExpertWeights, config: ModelConfig, experts: ExpertConfig) -> torch.Tensor:
    assert isinstance(ffn.experts, JoinedExperts)
    chosen, weights = choose_experts(ffn.router(x), ffn.choice_bias, rule_of(experts))
    routing = routing_of(chosen, experts.num_experts)
    out = add_experts(ffn.experts.down(_activated(ffn.experts.into(x, routing), config), routing), weights)
    if ffn.shared is not None:
        shared = ffn.shared.down(_activated(ffn.shared.into(x), config))
        out += shared if ffn.shared_gate is None else shared * sigmoid(ffn.shared_gate(x)).to(x.dtype)
    return out


def _activated(inner: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    if not config.gated:
        return F.gelu(inner, approximate="tanh")
    return gated_activation(inner, config.activation)
