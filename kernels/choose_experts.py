"""Which experts of a mixture a token passes, and with which weights: the best by the scores of a router.

    scores = softmax(logits) or 1 / (1 + exp(-logits));   ranks = scores + bias
    weights = the scores of the chosen, perhaps divided by their sum, times scale

With groups only experts of the best groups may be chosen; a group's score is its best rank, or the sum of its two
best. Of equal ones the first comes first. A token's choice depends on its logits alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.dispatch import uses_triton

SCORINGS = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2")


@dataclass(frozen=True, slots=True)
class ChoiceRule:
    num_used: int
    scoring: str
    renormalize: bool
    scale: float = 1.0
    num_groups: int = 1
    num_used_groups: int = 1
    group_score: str = "max"


def choose_experts(
    logits: torch.Tensor, bias: torch.Tensor | None, rule: ChoiceRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [M, experts] and bias [experts], float32 -> int64 [M, used], the best first, and float32 [M, used].

    Weights are not numbers where a score is none; the chosen are experts even then.
    """
    _check(logits, bias, rule)
    if uses_triton(logits):
        from kernels.gpu.choose_experts import choose_experts_triton  # where there is no GPU, there need be no Triton

        return choose_experts_triton(logits, bias, rule)
    return choose_experts_reference(logits, bias, rule)


def choose_experts_reference(
    logits: torch.Tensor, bias: torch.Tensor | None, rule: ChoiceRule
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = sigmoid(logits) if rule.scoring == "sigmoid" else softmax(logits)
    ranks = scores if bias is None else scores + bias
    if rule.num_groups > 1:
        ranks = ranks.masked_fill(~_in_best_groups(ranks, rule), -torch.inf)
    chosen = ranks.sort(dim=-1, descending=True, stable=True).indices[:, : rule.num_used]
    weights = scores.gather(1, chosen)
    if rule.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen.contiguous(), weights * rule.scale


def _in_best_groups(ranks: torch.Tensor, rule: ChoiceRule) -> torch.Tensor:
    """Which experts belong to one of a row's best groups, [M, experts]."""
    groups = ranks.view(ranks.shape[0], rule.num_groups, -1)
    best = groups.sort(dim=-1, descending=True).values
    scores = best[..., :2].sum(-1) if rule.group_score == "top2" else best[..., 0]
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, : rule.num_used_groups]
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)
    return kept[..., None].expand(groups.shape).reshape(ranks.shape)


# Written out, since torch's own functions compute the ends of a tensor otherwise.
def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return x.neg().exp_().add_(1.0).reciprocal_()


def softmax(x: torch.Tensor) -> torch.Tensor:
    weights = (x - x.amax(-1, keepdim=True)).exp_()
    return weights / weights.sum(-1, keepdim=True)


def _check(logits: torch.Tensor, bias: torch.Tensor | None, rule: ChoiceRule) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ValueError(f"choose_experts: logits {logits.dtype} {tuple(logits.shape)}")
    experts = logits.shape[1]
    if bias is not None and (bias.shape != (experts,) or bias.dtype != torch.float32):
        raise ValueError(f"choose_experts: bias {bias.dtype} {tuple(bias.shape)} for {experts} experts")
    if rule.scoring not in SCORINGS or rule.group_score not in GROUP_SCORES:
        raise ValueError(f"choose_experts: scores by {rule.scoring}, of groups by {rule.group_score}")
    if not 1 <= rule.num_used <= experts or experts % rule.num_groups:
        raise ValueError(f"choose_experts: {rule.num_used} of {experts} experts in {rule.num_groups} groups")
    if not 1 <= rule.num_used_groups <= rule.num_groups:
        raise ValueError(f"choose_experts: {rule.num_used_groups} of {rule.num_groups} groups")
