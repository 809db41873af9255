"""Change a few logits of some rows, for GPUs: biases, bans and penalties, token by token and each in this order:

    x + bias;   minus infinity if banned;   if seen x / r where x > 0, else x r;   if drawn n > 0 times x - n f - p

r is the row's repetition penalty, f its frequency and p its presence penalty; every operation is rounded to float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.dispatch import uses_triton

BANNED, SEEN = 1, 2


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """E edits, a token of a row once; penalties of all rows."""

    rows: torch.Tensor  # int32 [E]
    token_ids: torch.Tensor  # int32 [E]
    biases: torch.Tensor  # float32 [E]
    flags: torch.Tensor  # int32 [E]: BANNED, SEEN
    counts: torch.Tensor  # int32 [E]: times drawn
    penalties: torch.Tensor  # float32 [B, 3]: r, f, p

    def tensors(self) -> list[torch.Tensor]:
        return [self.rows, self.token_ids, self.biases, self.flags, self.counts, self.penalties]


def edit_logits_(logits: torch.Tensor, edits: LogitEdits) -> None:
    """logits float32 [B, V], in place."""
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"edit_logits_: logits {logits.dtype} {tuple(logits.shape)}")
    if len({t.shape for t in edits.tensors()[:5]}) != 1 or edits.penalties.shape != (logits.shape[0], 3):
        raise ValueError(f"edit_logits_: edits of other shapes, or penalties {tuple(edits.penalties.shape)}")
    if uses_triton(logits):
        from kernels.gpu.logit_edits import edit_logits_triton  # where there is no GPU, there need be no Triton

        edit_logits_triton(logits, edits)
    else:
        edit_logits_reference_(logits, edits)


def edit_logits_reference_(logits: torch.Tensor, edits: LogitEdits) -> None:
    rows, token_ids = edits.rows.long(), edits.token_ids.long()
    repetition, frequency, presence = edits.penalties[rows].unbind(1)
    x = logits[rows, token_ids] + edits.biases
    x = x.masked_fill(edits.flags & BANNED != 0, -torch.inf)
    x = torch.where(edits.flags & SEEN != 0, torch.where(x > 0, x / repetition, x * repetition), x)
    penalised = x - edits.counts.float() * frequency - presence
    logits[rows, token_ids] = torch.where(edits.counts > 0, penalised, x)
