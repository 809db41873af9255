"""What log-probabilities are made of, for GPUs: a row's largest logit, the sum of its weights, and its best tokens.

A token's log-probability is its logit less `log_sum` of these; weights are those of `token_filter`, so that the sum is
exact. The best are ranked by logit, equal ones by id.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernels.dispatch import uses_triton
from kernels.token_filter import WEIGHT_BITS, token_weights, top_ids

MAX_ELEMENTS = 1 << 22  # of logits whose weights are in memory at a time, several times over, if a row has not more


@dataclass(frozen=True, slots=True)
class LogSums:
    largest: torch.Tensor  # float32 [B]
    totals: torch.Tensor  # int64 [B]
    best_ids: torch.Tensor  # int64 [B, n]
    best: torch.Tensor  # float32 [B, n]: their logits

    def tensors(self) -> list[torch.Tensor]:
        return [self.largest, self.totals, self.best_ids, self.best]


def log_sums(logits: torch.Tensor, num_best: int) -> LogSums:
    """logits float32 [B, V]; num_best up to V. Of a row with one that is not finite any numbers."""
    if logits.dim() != 2 or logits.dtype != torch.float32 or not 0 <= num_best <= logits.shape[1]:
        raise ValueError(f"log_sums: the best {num_best} of logits {logits.dtype} {tuple(logits.shape)}")
    if uses_triton(logits):
        from kernels.gpu.log_sums import log_sums_triton  # where there is no GPU, there need be no Triton

        return log_sums_triton(logits, num_best)
    return log_sums_reference(logits, num_best)


def log_sums_reference(logits: torch.Tensor, num_best: int) -> LogSums:
    largest = logits.amax(-1)
    parts = zip(row_parts(logits), row_parts(largest[:, None], logits.shape[1]), strict=True)
    totals = torch.cat([token_weights(rows - most).sum(-1) for rows, most in parts])
    none = torch.empty(0, dtype=torch.int64)
    ids = torch.stack([top_ids(row.nan_to_num(), num_best) if num_best else none for row in logits])
    return LogSums(largest, totals, ids, logits.gather(1, ids))


def row_parts(rows: torch.Tensor, num_columns: int = 0) -> tuple[torch.Tensor, ...]:
    """Views of at most MAX_ELEMENTS, or of one row. num_columns: count so many a row, not as many as there are."""
    return torch.split(rows, max(1, MAX_ELEMENTS // (num_columns or rows.shape[1])))


def log_sum(largest: float, total: int) -> float:
    """Of a row's exponentials."""
    return largest + math.log(total) - WEIGHT_BITS * math.log(2.0)
