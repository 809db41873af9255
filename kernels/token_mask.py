"""Forbid tokens by a mask of bits, for GPUs: logits without a bit become minus infinity."""

from __future__ import annotations

import torch

from kernels.dispatch import uses_triton

WORD_BITS = 32


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // WORD_BITS)


def forbid_(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """logits float32 [B, V], in place; rows int32 [M], each once; masks int32 [M, num_words(V)]: token i of the row is
    allowed if bit i % 32 of word i // 32 is 1."""
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"forbid_: logits {logits.dtype} {tuple(logits.shape)}")
    if rows.dtype != torch.int32 or masks.dtype != torch.int32:
        raise ValueError(f"forbid_: rows {rows.dtype}, masks {masks.dtype}")
    if masks.shape != (rows.shape[0], num_words(logits.shape[1])) or not masks.is_contiguous():
        raise ValueError(f"forbid_: masks {tuple(masks.shape)} for {rows.shape[0]} rows of {logits.shape[1]}")
    if uses_triton(logits):
        from kernels.gpu.token_mask import forbid_triton  # where there is no GPU, there need be no Triton

        forbid_triton(logits, rows, masks)
    else:
        forbid_reference_(logits, rows, masks)


def forbid_reference_(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    bits = masks[:, :, None] >> torch.arange(WORD_BITS, dtype=torch.int32) & 1
    forbidden = bits.view(len(rows), -1)[:, : logits.shape[1]] == 0
    logits[rows.long()] = logits[rows.long()].masked_fill(forbidden, -torch.inf)
