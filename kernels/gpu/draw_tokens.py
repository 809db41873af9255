"""Triton: draw a token a row (see `kernels.draw_tokens`). A program draws a part of a row, another the best."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.draw_tokens import NOT_FINITE, DrawRows, draw_rows, draw_tokens
from kernels.gpu.gumbel import noise_of_part
from kernels.gpu.launch import CompileCase, launch, on_paper
from kernels.gpu.token_cut import cut_kernel
from kernels.gumbel import NoiseKey
from kernels.sample_tokens import TokenChoice

TOKENS = 4096  # a program's part of a row
CUT_TOKENS = 1024  # at a time, at most, of a program that has the whole row


@triton.jit
def _best_kernel(
    logits_ptr,  # float32 [B, V], rows stride apart
    best_ptr,  # float32 [B, parts]
    ids_ptr,  # int32 [B, parts]
    num_tokens,  # V
    stride,
    TOKENS: tl.constexpr,
):
    """The largest logit of a part and the lowest token id that has it; NaN if one of the part's is."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = part * TOKENS + tl.arange(0, TOKENS)
    x = tl.load(logits_ptr + row * stride + tokens, mask=tokens < num_tokens, other=-float("inf"))
    known = tl.where(x == x, x, -float("inf"))
    best = tl.max(known, 0)
    place = row * tl.num_programs(1) + part
    tl.store(ids_ptr + place, tl.min(tl.where(known == best, tokens, 0x7FFFFFFF), 0))
    sick = tl.max((x != x).to(tl.int32), 0) > 0
    tl.store(best_ptr + place, tl.where(sick, float("nan"), best))


@triton.jit
def _scale_kernel(
    logits_ptr,  # float32 [B, V], rows stride apart
    best_ptr,  # float32 [B, parts], of `_best_kernel`
    temperature_ptr,  # float32 [B]
    scaled_ptr,  # float32 [B, V]
    num_tokens,  # V
    stride,
    num_parts,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """(x - the row's largest) / temperature of a part, minus infinity for what is not finite; nothing for greedy rows.

    A kernel of its own: a division is made of fused operations, and what follows must have none.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        parts = tl.arange(0, PARTS)
        best = tl.load(best_ptr + row * num_parts + parts, mask=parts < num_parts, other=-float("inf"))
        largest = tl.max(tl.where(best == best, best, -float("inf")), 0)
        largest = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)  # else nothing is drawn
        tokens = part * TOKENS + tl.arange(0, TOKENS)
        mask = tokens < num_tokens
        x = tl.load(logits_ptr + row * stride + tokens, mask=mask, other=0.0)
        scaled = tl.div_rn(tl.where(tl.abs(x) < float("inf"), x, -float("inf")) - largest, temperature)
        tl.store(scaled_ptr + row * num_tokens + tokens, scaled, mask=mask)


@triton.jit
def _draw_kernel(
    scaled_ptr,  # float32 [B, V]
    temperature_ptr,  # float32 [B]
    keys_ptr,  # int32 [B, 4]
    cut_values_ptr,  # float32 [B]
    cut_ids_ptr,  # int32 [B], or None: then all that have the value are kept
    best_ptr,  # float32 [B, parts]
    ids_ptr,  # int32 [B, parts]
    num_tokens,  # V
    TOKENS: tl.constexpr,
):
    """The largest scaled logit plus noise of a part, and the lowest token id that has it; nothing for greedy rows."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(temperature_ptr + row) > 0.0:
        tokens = part * TOKENS + tl.arange(0, TOKENS)
        scaled = tl.load(scaled_ptr + row * num_tokens + tokens, mask=tokens < num_tokens, other=-float("inf"))
        cut = tl.load(cut_values_ptr + row)
        kept = scaled >= cut
        if cut_ids_ptr is not None:
            kept = kept & ((scaled > cut) | (tokens <= tl.load(cut_ids_ptr + row)))
        totals = tl.where(kept, scaled + noise_of_part(keys_ptr, row, part, TOKENS), -float("inf"))
        best = tl.max(totals, 0)
        place = row * tl.num_programs(1) + part
        tl.store(best_ptr + place, best)
        tl.store(ids_ptr + place, tl.min(tl.where(totals == best, tokens, 0x7FFFFFFF), 0))


@triton.jit
def _choose_kernel(
    largest_ptr,  # float32 [B, parts], of `_best_kernel`
    largest_ids_ptr,  # int32 [B, parts]
    best_ptr,  # float32 [B, parts], of `_draw_kernel`; may be those above if all rows are greedy
    ids_ptr,  # int32 [B, parts]
    temperature_ptr,  # float32 [B]
    out_ptr,  # int64 [B]
    num_parts,
    NOT_FINITE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Of a row's parts the best, the first of equals."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    mask = parts < num_parts
    places = row * num_parts + parts
    raw = tl.load(largest_ptr + places, mask=mask, other=-float("inf"))
    largest = tl.max(tl.where(raw == raw, raw, -float("inf")), 0)
    sick = (tl.max((raw != raw).to(tl.int32), 0) > 0) | (largest == float("inf")) | (largest == -float("inf"))
    if tl.load(temperature_ptr + row) > 0.0:
        best = tl.load(best_ptr + places, mask=mask, other=-float("inf"))
        ids = tl.load(ids_ptr + places, mask=mask, other=0x7FFFFFFF)
    else:
        best = raw
        ids = tl.load(largest_ids_ptr + places, mask=mask, other=0x7FFFFFFF)
    token = tl.min(tl.where(best == tl.max(best, 0), ids, 0x7FFFFFFF), 0)
    tl.store(out_ptr + row, tl.where(sick, NOT_FINITE, token).to(tl.int64))


def draw_tokens_triton(logits: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, num_tokens = logits.shape
    num_parts = triton.cdiv(num_tokens, TOKENS)
    padded = triton.next_power_of_2(num_parts)
    grid, stride = (num_rows, num_parts), logits.stride(0)
    largest, largest_ids = _bests(logits, num_parts)
    launch(_best_kernel, grid, (logits, largest, largest_ids, num_tokens, stride), num_warps=8, TOKENS=TOKENS)
    best, ids = largest, largest_ids
    if any(c.temperature for c in rows.choices):
        scaled = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        args: tuple[Any, ...] = (logits, largest, rows.temperature, scaled, num_tokens, stride, num_parts)
        launch(_scale_kernel, grid, args, num_warps=8, PARTS=padded, TOKENS=TOKENS)
        values, cut_ids = _cuts(scaled, rows)
        best, ids = _bests(logits, num_parts)
        args = (scaled, rows.temperature, rows.keys, values, cut_ids, best, ids, num_tokens)
        launch(_draw_kernel, grid, args, num_warps=8, unfused=True, TOKENS=TOKENS)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    args = (largest, largest_ids, best, ids, rows.temperature, out, num_parts)
    launch(_choose_kernel, (num_rows,), args, num_warps=1, NOT_FINITE=NOT_FINITE, PARTS=padded)
    return out


def _bests(logits: torch.Tensor, num_parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.empty(logits.shape[0], num_parts, dtype=torch.float32, device=logits.device)
    return values, torch.empty(logits.shape[0], num_parts, dtype=torch.int32, device=logits.device)


def _cuts(scaled: torch.Tensor, rows: DrawRows) -> tuple[torch.Tensor, torch.Tensor | None]:
    num_rows, num_tokens = scaled.shape
    if not any(c.top_p < 1.0 or 0 < c.top_k < num_tokens for c in rows.choices):
        return rows.least, None
    values, ids = torch.empty_like(rows.least), torch.empty_like(rows.top_k)
    args = (scaled, rows.temperature, rows.top_k, rows.top_p, rows.least, values, ids, num_tokens)
    tokens = min(CUT_TOKENS, triton.next_power_of_2(num_tokens))
    launch(cut_kernel, (num_rows,), args, num_warps=8, unfused=True, TOKENS=tokens)
    return values, ids


def _case(name: str, vocabulary: int, choice: TokenChoice) -> CompileCase:
    logits = on_paper(8, vocabulary, dtype=torch.float32)

    def call() -> torch.Tensor:
        rows = draw_rows([choice] * 8)
        return draw_tokens(logits, rows.with_tensors([t.to("meta") for t in rows.tensors()]))

    return CompileCase(f"{name}, vocabulary of {vocabulary}", call)


_KEY = NoiseKey(0, 0, 0)
COMPILE_CASES = (
    _case("greedy", 128256, TokenChoice(_KEY, 0.0)),
    _case("noise", 128256, TokenChoice(_KEY)),
    _case("top-k and top-p", 128256, TokenChoice(_KEY, top_k=50, top_p=0.9)),
    _case("top-p", 49152, TokenChoice(_KEY, top_p=0.9)),
)
