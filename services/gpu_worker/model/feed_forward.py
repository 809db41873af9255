"""The feed-forward half of a layer: one network for all tokens, or a few of many experts for each.

A token's result does not depend on the others: experts are added in ascending order whoever else passes them.
"""

from __future__ import annotations

import torch

from kernels.choose_experts import ChoiceRule, choose_experts, sigmoid
from kernels.gelu_tanh import gelu_tanh
from kernels.silu_mul import silu_mul
from services.gpu_worker.model.config import ExpertConfig, ModelConfig
from services.gpu_worker.model.layers import ExpertWeights, FeedForwardWeights


def feed_forward(x: torch.Tensor, ffn: FeedForwardWeights | ExpertWeights, config: ModelConfig) -> torch.Tensor:
    """x [N, hidden_size], normed -> the half's output."""
    if isinstance(ffn, FeedForwardWeights):
        return _dense(x, ffn, config)
    assert config.experts is not None
    return _mixture(x, ffn, config, config.experts)


def _dense(x: torch.Tensor, ffn: FeedForwardWeights, config: ModelConfig) -> torch.Tensor:
    inner = ffn.into(x)
    if config.gated and config.activation == "silu":
        return ffn.down(silu_mul(inner))
    if not config.gated:
        return ffn.down(gelu_tanh(inner))
    gate, up = inner.chunk(2, dim=-1)
    return ffn.down(gelu_tanh(gate).mul_(up))


def _mixture(x: torch.Tensor, ffn: ExpertWeights, config: ModelConfig, experts: ExpertConfig) -> torch.Tensor:
    chosen, weights = choose_experts(ffn.router(x), ffn.choice_bias, rule_of(experts))
    assert isinstance(ffn.experts, tuple)
    out = torch.zeros_like(x)
    for number in torch.unique(chosen).tolist():  # ascending
        rows, places = (chosen == number).nonzero(as_tuple=True)
        added = _dense(x.index_select(0, rows), ffn.experts[number], config) * weights[rows, places, None]
        out.index_add_(0, rows, added)  # each row once
    if ffn.shared is not None:
        shared = _dense(x, ffn.shared, config)
        out += shared if ffn.shared_gate is None else shared * sigmoid(ffn.shared_gate(x))
    return out


def rule_of(experts: ExpertConfig) -> ChoiceRule:
    return ChoiceRule(
        experts.num_used, experts.scoring, experts.renormalize, experts.scale, experts.num_groups,
        experts.num_used_groups, experts.group_score,
    )  # fmt: skip
