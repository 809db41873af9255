"""The feed-forward half of a layer: one network for all tokens, or a few of many experts for each.

A token's result does not depend on the others: experts are added in ascending order whoever else passes them, and
the scores of the router are written out, since torch's own functions compute the ends of a tensor otherwise.
"""

from __future__ import annotations

import torch

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
    chosen, weights = choose(ffn.router(x), ffn.choice_bias, experts)
    out = torch.zeros_like(x)
    for number in torch.unique(chosen).tolist():  # ascending
        rows, places = (chosen == number).nonzero(as_tuple=True)
        added = _dense(x.index_select(0, rows), ffn.experts[number], config) * weights[rows, places, None]
        out.index_add_(0, rows, added)  # each row once
    if ffn.shared is not None:
        shared = _dense(x, ffn.shared, config)
        out += shared if ffn.shared_gate is None else shared * sigmoid(ffn.shared_gate(x))
    return out


def choose(logits: torch.Tensor, bias: torch.Tensor | None, experts: ExpertConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [N, experts] -> the numbers of the experts used, [N, k], and their weights; of equal ones the first."""
    scores = sigmoid(logits) if experts.scoring == "sigmoid" else softmax(logits)
    ranked = scores if bias is None else scores + bias
    if experts.num_groups > 1:
        ranked = ranked.masked_fill(~_in_best_groups(ranked, experts), -torch.inf)
    chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : experts.num_used]
    weights = scores.gather(1, chosen)
    if experts.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights * experts.scale


def _in_best_groups(ranked: torch.Tensor, experts: ExpertConfig) -> torch.Tensor:
    """Which experts belong to one of a row's best groups, [N, experts]."""
    groups = ranked.view(ranked.shape[0], experts.num_groups, -1)
    best = groups.sort(dim=-1, descending=True).values
    scores = best[..., :2].sum(-1) if experts.group_score == "top2" else best[..., 0]
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, : experts.num_used_groups]
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)
    return kept[..., None].expand(groups.shape).reshape(ranked.shape)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return x.neg().exp_().add_(1.0).reciprocal_()


def softmax(x: torch.Tensor) -> torch.Tensor:
    weights = (x - x.amax(-1, keepdim=True)).exp_()
    return weights / weights.sum(-1, keepdim=True)
