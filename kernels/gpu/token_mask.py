"""Triton: forbid tokens by a mask of bits (see `kernels.token_mask`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import CompileCase, launch, on_paper
from kernels.token_mask import forbid_, num_words

TOKENS = 2048  # a program's part of a row


@triton.jit
def _forbid_kernel(
    logits_ptr,  # float32 [B, V], rows stride apart, changed
    rows_ptr,  # int32 [M]
    masks_ptr,  # int32 [M, words]
    num_tokens,  # V
    stride,
    words,
    TOKENS: tl.constexpr,
):
    """Minus infinity where a part of a row has no bit; nothing else is written."""
    number = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    mask = tokens < num_tokens
    word = tl.load(masks_ptr + number * words + tokens // 32, mask=mask, other=-1)
    forbidden = mask & (((word >> (tokens % 32)) & 1) == 0)
    row = tl.load(rows_ptr + number).to(tl.int64)
    tl.store(logits_ptr + row * stride + tokens, tl.full([TOKENS], -float("inf"), tl.float32), mask=forbidden)


def forbid_triton(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    num_tokens = logits.shape[1]
    grid = (rows.shape[0], triton.cdiv(num_tokens, TOKENS))
    args = (logits, rows, masks, num_tokens, logits.stride(0), masks.shape[1])
    launch(_forbid_kernel, grid, args, num_warps=4, TOKENS=TOKENS)


def _case(vocabulary: int) -> CompileCase:
    logits, rows = on_paper(8, vocabulary, dtype=torch.float32), on_paper(4, dtype=torch.int32)
    masks = on_paper(4, num_words(vocabulary), dtype=torch.int32)
    return CompileCase(f"vocabulary of {vocabulary}", lambda: forbid_(logits, rows, masks))


COMPILE_CASES = (_case(128256),)
