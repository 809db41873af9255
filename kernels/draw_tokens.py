"""Draw a token a row of logits on a GPU: `sample_tokens` without its log-probabilities, and without a host that waits.

The cut, which is where top-k, top-p and min-p end, is a value and a token id: kept is what lies above the value, and
of what is equal to it the ids up to that one. It is found digit by digit of the value, by sums of exact integers, so
that nothing is sorted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.dispatch import uses_triton
from kernels.philox import MASK
from kernels.sample_tokens import TokenChoice, sample_tokens_reference

NOT_FINITE = -1


@dataclass(frozen=True, slots=True)
class DrawRows:
    """How the rows' tokens are chosen. Made on the host by `draw_rows`; a GPU needs the tensors there."""

    choices: tuple[TokenChoice, ...]  # [B]
    keys: torch.Tensor  # int32 [B, 4]: seed (low and high half), position, choice, bit by bit
    temperature: torch.Tensor  # float32 [B]
    top_k: torch.Tensor  # int32 [B]: 0 for all
    top_p: torch.Tensor  # float64 [B]
    least: torch.Tensor  # float32 [B]: of scaled logits, by min-p

    def tensors(self) -> list[torch.Tensor]:
        return [self.keys, self.temperature, self.top_k, self.top_p, self.least]

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> DrawRows:
        return DrawRows(self.choices, *tensors)


def draw_rows(choices: Sequence[TokenChoice]) -> DrawRows:
    fields = [(c.key.seed & MASK, c.key.seed >> 32, c.key.position, c.key.choice) for c in choices]
    return DrawRows(
        tuple(choices),
        torch.tensor(fields, dtype=torch.int64).to(torch.uint32).view(torch.int32).view(-1, 4),
        torch.tensor([c.temperature for c in choices], dtype=torch.float32),
        torch.tensor([c.top_k for c in choices], dtype=torch.int32),
        torch.tensor([c.top_p for c in choices], dtype=torch.float64),
        torch.tensor([math.log(c.min_p) if c.min_p > 0.0 else -math.inf for c in choices], dtype=torch.float32),
    )


def draw_tokens(logits: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    """logits float32 [B, V], minus infinity for tokens not to be drawn → token ids, int64 [B].

    NOT_FINITE where a logit is not a number or none is finite. The largest of equal ones is the lowest id.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or len(rows.choices) != logits.shape[0]:
        raise ValueError(f"draw_tokens: {len(rows.choices)} rows for logits {logits.dtype} {tuple(logits.shape)}")
    if uses_triton(logits):
        from kernels.gpu.draw_tokens import draw_tokens_triton  # where there is no GPU, there need be no Triton

        return draw_tokens_triton(logits, rows)
    return draw_tokens_reference(logits, rows)


def draw_tokens_reference(logits: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    finite = logits.amax(-1).isfinite()  # a NaN anywhere in a row is its maximum
    numbers = finite.nonzero().flatten().tolist()
    chosen = sample_tokens_reference(list(logits[finite]), logits[finite], [rows.choices[i] for i in numbers])
    drawn = torch.full((len(finite),), NOT_FINITE, dtype=torch.int64)
    drawn[finite] = torch.tensor([c.token_id for c in chosen], dtype=torch.int64)
    return drawn
