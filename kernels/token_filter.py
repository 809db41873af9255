"""Which tokens may be drawn: top-k, top-p and min-p over one row of scaled logits, and what a token weighs.

A token's weight is its probability relative to the likeliest's, as an integer: 2^WEIGHT_BITS exp(x), so that sums are
exact in any order. With every operation rounded to float32 on its own, x <= 0:

    y = x log2(e), at least -100;   n = y rounded, ties to even;   f = y - n
    weight = (polynomial(f)) 2^(n + WEIGHT_BITS), without its fraction

Tokens are ranked by value, equal ones by id, the lowest first.
"""

from __future__ import annotations

import math

import torch

WEIGHT_BITS = 40
LOG2_E = 1.44269504
EXP2_POLYNOMIAL = (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)
_LIKELY = -12.0  # scaled logits that top-p looks at first: nearly always enough, and far fewer than the vocabulary


def token_weights(scaled: torch.Tensor) -> torch.Tensor:
    """int64, of float32 values up to 0."""
    y = (scaled * LOG2_E).clamp(min=-100.0)
    n = y.round()
    f = y - n
    p = torch.full_like(f, EXP2_POLYNOMIAL[0])
    for coefficient in EXP2_POLYNOMIAL[1:]:
        p = p * f + coefficient
    power = (n.to(torch.int32) + (WEIGHT_BITS + 127)) << 23
    return (p * power.view(torch.float32)).to(torch.int64)


def filtered_ids(scaled: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor | None:
    """Token ids that top-k (0: off), top-p and min-p leave, ascending; None for all. scaled: the largest is 0."""
    kept: torch.Tensor | None = None
    if 0 < top_k < scaled.numel():
        kept = top_ids(scaled, top_k)
    if top_p < 1.0:
        kept = _nucleus(scaled, kept, top_p)
    if min_p > 0.0:
        least = math.log(min_p)
        kept = (scaled >= least).nonzero().flatten() if kept is None else kept[scaled[kept] >= least]
    return None if kept is None else kept.sort().values


def top_ids(row: torch.Tensor, count: int) -> torch.Tensor:
    """The ids of the count largest values, ranked; which of several equal ones is so defined."""
    threshold = row.topk(count).values[-1]
    above = (row > threshold).nonzero().flatten()
    equal = (row == threshold).nonzero().flatten()[: count - above.numel()]
    return ranked(row, torch.cat((above, equal)))


def ranked(row: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """ids: ascending among equal values."""
    return ids[row[ids].argsort(descending=True, stable=True)]


def wanted_weight(total: int, top_p: float) -> int:
    """What the tokens that top-p keeps must weigh together, at least."""
    return max(1, min(total, math.ceil(top_p * float(total))))


def _nucleus(scaled: torch.Tensor, candidates: torch.Tensor | None, top_p: float) -> torch.Tensor:
    """Of the candidates (ranked; None: all), the fewest whose weights, from the best on, reach top_p of all."""
    weights = token_weights(scaled)
    if candidates is not None:
        reached = weights[candidates].cumsum(0)
        return candidates[: _prefix(reached, wanted_weight(int(reached[-1]), top_p))]
    wanted = wanted_weight(int(weights.sum()), top_p)
    for ids in ((scaled >= _LIKELY).nonzero().flatten(), torch.arange(scaled.numel())):
        ids = ranked(scaled, ids)
        reached = weights[ids].cumsum(0)
        if int(reached[-1]) >= wanted:
            break
    return ids[: _prefix(reached, wanted)]


def _prefix(reached: torch.Tensor, wanted: int) -> int:
    """How many come before the sum has reached what is wanted, and the one that reaches it."""
    return int((reached < wanted).sum()) + 1
