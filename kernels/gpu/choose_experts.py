"""Triton: which experts a token passes, and with which weights (see `kernels.choose_experts`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.choose_experts import ChoiceRule, choose_experts
from kernels.gpu.launch import CompileCase, launch, on_paper


@triton.jit
def _choose_experts_kernel(
    logits_ptr,  # float32 [M, experts], rows stride apart
    bias_ptr,  # float32 [experts], or None
    chosen_ptr,  # int64 [M, USED]
    weights_ptr,  # float32 [M, USED]
    stride,
    group_size,
    num_groups,
    scale,
    USED: tl.constexpr,
    USED_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOP2: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """One token; its experts lie as [GROUPS, SIZE]."""
    token = tl.program_id(0).to(tl.int64)
    group, place = tl.arange(0, GROUPS), tl.arange(0, SIZE)
    free = (group < num_groups)[:, None] & (place < group_size)[None, :]
    number = tl.where(free, group[:, None] * group_size + place[None, :], GROUPS * SIZE)
    logits = tl.load(logits_ptr + token * stride + number, mask=free, other=0.0)
    poison = tl.sum(logits * 0.0)  # 0, or NaN where a logit is not finite
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        largest = tl.max(tl.where(free & (logits == logits), logits, -float("inf")))
        scores = tl.where(free, tl.exp(logits - largest), 0.0)
        scores = scores / tl.sum(scores)
    ranks = scores
    if bias_ptr is not None:
        ranks += tl.load(bias_ptr + number, mask=free, other=0.0)
    ranks = tl.where(free & (ranks == ranks), ranks, -float("inf"))
    if GROUPS > 1:
        best = tl.max(ranks, 1)
        if TOP2:
            first = tl.min(tl.where(ranks == best[:, None], place[None, :], SIZE), 1)
            second = tl.max(tl.where(place[None, :] == first[:, None], -float("inf"), ranks), 1)
            best += tl.where(second == -float("inf"), 0.0, second)  # of a group of one
        left, kept = group < num_groups, group < 0
        for _ in range(USED_GROUPS):
            top = tl.max(tl.where(left, best, -float("inf")))
            taken = group == tl.min(tl.where(left & (best == top), group, GROUPS))
            left, kept = left & ~taken, kept | taken
        ranks = tl.where(kept[:, None], ranks, -float("inf"))
    choice = tl.arange(0, CHOICES)
    chosen, weights = tl.zeros([CHOICES], tl.int32), tl.zeros([CHOICES], tl.float32)
    total = 0.0
    for i in range(USED):
        top = tl.max(tl.where(free, ranks, -float("inf")))
        expert = tl.min(tl.where(free & (ranks == top), number, GROUPS * SIZE))
        weight = tl.sum(tl.where(number == expert, scores, 0.0))
        free = free & (number != expert)
        chosen = tl.where(choice == i, tl.minimum(expert, num_groups * group_size - 1), chosen)
        weights = tl.where(choice == i, weight, weights)
        total += weight
    if RENORMALIZE:
        weights = tl.where(total == 0.0, float("nan"), weights / tl.where(total == 0.0, 1.0, total))
    places = token * USED + choice
    tl.store(chosen_ptr + places, chosen.to(tl.int64), mask=choice < USED)
    tl.store(weights_ptr + places, weights * scale + poison, mask=choice < USED)


def choose_experts_triton(
    logits: torch.Tensor, bias: torch.Tensor | None, rule: ChoiceRule
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_tokens, num_experts = logits.shape
    chosen = torch.empty(num_tokens, rule.num_used, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num_tokens, rule.num_used, dtype=torch.float32, device=logits.device)
    size = num_experts // rule.num_groups
    groups, padded = triton.next_power_of_2(rule.num_groups), triton.next_power_of_2(size)
    args = (logits, bias, chosen, weights, logits.stride(0), size, rule.num_groups, float(rule.scale))
    launch(
        _choose_experts_kernel, (num_tokens,), args, num_warps=1 if groups * padded <= 256 else 4, USED=rule.num_used,
        USED_GROUPS=rule.num_used_groups, SIGMOID=rule.scoring == "sigmoid", RENORMALIZE=rule.renormalize,
        TOP2=rule.group_score == "top2", GROUPS=groups, SIZE=padded, CHOICES=triton.next_power_of_2(rule.num_used),
    )  # fmt: skip
    return chosen, weights


def _case(name: str, num_experts: int, rule: ChoiceRule, biased: bool = False) -> CompileCase:
    logits = on_paper(64, num_experts, dtype=torch.float32)
    bias = on_paper(num_experts, dtype=torch.float32) if biased else None
    return CompileCase(f"{name}, {rule.num_used} of {num_experts}", lambda: choose_experts(logits, bias, rule))


COMPILE_CASES = (
    _case("softmax", 8, ChoiceRule(2, "softmax", True)),
    _case("softmax", 512, ChoiceRule(10, "softmax", True)),
    _case("softmax, groups", 160, ChoiceRule(6, "softmax", False, 16.0, 8, 3)),
    _case("sigmoid, groups by two", 256, ChoiceRule(8, "sigmoid", True, 2.5, 8, 4, "top2"), True),
)
