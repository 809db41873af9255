"""Triton: what log-probabilities are made of (see `kernels.log_sums`). Rows are summed in parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import CompileCase, launch, on_paper
from kernels.gpu.token_cut import token_weight
from kernels.log_sums import LogSums, log_sums

TOKENS = 4096  # at a time


@triton.jit
def _largest_kernel(
    logits_ptr,  # float32 [B, V], rows stride apart
    largest_ptr,  # float32 [B, parts]
    num_tokens,  # V
    stride,
    TOKENS: tl.constexpr,
):
    """The largest logit of a part."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = part * TOKENS + tl.arange(0, TOKENS)
    x = tl.load(logits_ptr + row * stride + tokens, mask=tokens < num_tokens, other=-float("inf"))
    tl.store(largest_ptr + row * tl.num_programs(1) + part, tl.max(x, 0))


@triton.jit
def _sum_kernel(
    logits_ptr,  # float32 [B, V], rows stride apart
    largest_ptr,  # float32 [B]
    sums_ptr,  # int64 [B, parts]
    num_tokens,  # V
    stride,
    TOKENS: tl.constexpr,
):
    """The sum of a part's weights."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = part * TOKENS + tl.arange(0, TOKENS)
    mask = tokens < num_tokens
    x = tl.load(logits_ptr + row * stride + tokens, mask=mask, other=0.0) - tl.load(largest_ptr + row)
    known = tl.where(x <= 0.0, x, -float("inf"))  # what is not a number has no weight
    weights = tl.where(mask, token_weight(known), 0)
    tl.store(sums_ptr + row * tl.num_programs(1) + part, tl.sum(weights, 0))


@triton.jit(do_not_specialize=("num_best",))
def _rank_kernel(
    logits_ptr,  # float32 [B, V], rows stride apart
    best_ids_ptr,  # int64 [B, n]
    best_ptr,  # float32 [B, n]
    num_tokens,  # V
    stride,
    num_best,  # n
    TOKENS: tl.constexpr,
):
    """The n best tokens of a row, one after the other: the best of those that come after the one before."""
    row = tl.program_id(0).to(tl.int64)
    last, last_id = tl.full([], float("inf"), tl.float32), tl.full([], -1, tl.int32)
    for place in range(num_best):
        best, best_id = tl.full([], -float("inf"), tl.float32), tl.full([], 0x7FFFFFFF, tl.int32)
        for first in range(0, num_tokens, TOKENS):
            tokens = first + tl.arange(0, TOKENS)
            x = tl.load(logits_ptr + row * stride + tokens, mask=tokens < num_tokens, other=-float("inf"))
            later = (tokens < num_tokens) & ((x < last) | ((x == last) & (tokens > last_id)))
            top = tl.max(tl.where(later, x, -float("inf")), 0)
            top_id = tl.min(tl.where(later & (x == top), tokens, 0x7FFFFFFF), 0)
            better = (top > best) | ((top == best) & (top_id < best_id))
            best, best_id = tl.where(better, top, best), tl.where(better, top_id, best_id)
        tl.store(best_ids_ptr + row * num_best + place, best_id.to(tl.int64))
        tl.store(best_ptr + row * num_best + place, best)
        last, last_id = best, best_id


def log_sums_triton(logits: torch.Tensor, num_best: int) -> LogSums:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, num_tokens = logits.shape
    grid = (num_rows, triton.cdiv(num_tokens, TOKENS))
    stride, device = logits.stride(0), logits.device
    parts = torch.empty(grid, dtype=torch.float32, device=device)
    launch(_largest_kernel, grid, (logits, parts, num_tokens, stride), num_warps=8, TOKENS=TOKENS)
    largest = parts.amax(1)
    sums = torch.empty(grid, dtype=torch.int64, device=device)
    launch(_sum_kernel, grid, (logits, largest, sums, num_tokens, stride), num_warps=8, unfused=True, TOKENS=TOKENS)
    best_ids = torch.empty(num_rows, num_best, dtype=torch.int64, device=device)
    best = torch.empty(num_rows, num_best, dtype=torch.float32, device=device)
    if num_best:
        args = (logits, best_ids, best, num_tokens, stride, num_best)
        launch(_rank_kernel, (num_rows,), args, num_warps=8, TOKENS=TOKENS)
    return LogSums(largest, sums.sum(1), best_ids, best)


def _case(vocabulary: int, num_best: int) -> CompileCase:
    logits = on_paper(8, vocabulary, dtype=torch.float32)
    return CompileCase(f"best {num_best}, vocabulary of {vocabulary}", lambda: log_sums(logits, num_best))


COMPILE_CASES = (_case(128256, 5), _case(49152, 0))
