"""Triton: Gumbel noise and the draw with it, to the bits that `kernels.gumbel` states.

Every operation must be rounded on its own, so these kernels are launched `unfused`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import CompileCase, launch, on_paper
from kernels.gumbel import LN2_HIGH, LN2_LOW, LOG1P_REACH, LOG_POLYNOMIAL, SQRT_HALF_BITS
from kernels.gumbel_argmax import gumbel_draw
from kernels.philox import MULTIPLIERS, NUM_ROUNDS, WEYL

TOKENS = 4096  # a program's part of a row

_M0: tl.constexpr = tl.constexpr(MULTIPLIERS[0])
_M1: tl.constexpr = tl.constexpr(MULTIPLIERS[1])
_W0: tl.constexpr = tl.constexpr(WEYL[0])
_W1: tl.constexpr = tl.constexpr(WEYL[1])
_ROUNDS: tl.constexpr = tl.constexpr(NUM_ROUNDS)
_LN2_HIGH: tl.constexpr = tl.constexpr(LN2_HIGH)
_LN2_LOW: tl.constexpr = tl.constexpr(LN2_LOW)
_REACH: tl.constexpr = tl.constexpr(LOG1P_REACH)
_SQRT_HALF_BITS: tl.constexpr = tl.constexpr(SQRT_HALF_BITS)
_P: tl.constexpr = tl.constexpr(LOG_POLYNOMIAL)
_DEGREE: tl.constexpr = tl.constexpr(len(LOG_POLYNOMIAL))


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox 4x32-10 on uint32 words (see `kernels.philox`)."""
    for _ in tl.static_range(_ROUNDS):
        high0, low0 = tl.umulhi(c0, tl.full(c0.shape, _M0, tl.uint32)), c0 * _M0
        high1, low1 = tl.umulhi(c2, tl.full(c2.shape, _M1, tl.uint32)), c2 * _M1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _W0, k1 + _W1
    return c0, c1, c2, c3


@triton.jit
def _reduce(u):
    """(k, f) with u = 2^k (1 + f), exactly."""
    bits = u.to(tl.int32, bitcast=True)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    return exponent.to(tl.float32), (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _log_reduced(k, f):
    """k ln 2 + log(1 + f)."""
    square = f * f
    p = f * _P[0] + _P[1]
    for i in tl.static_range(2, _DEGREE):
        p = p * f + _P[i]
    y = p * f * square + k * _LN2_LOW
    y = f + (y - square * 0.5)
    return y + k * _LN2_HIGH


@triton.jit
def gumbel_of(x):
    """-log(-log1p(-v)) of uint32 words."""
    low = x < 0x80000000
    t = (tl.where(low, x, 0xFFFFFFFF - x).to(tl.uint32).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    k, f = _reduce(tl.where(low, 1.0 - t, t))
    near = low & (t <= _REACH)
    exponential = -_log_reduced(tl.where(near, 0.0, k), tl.where(near, -t, f))
    k, f = _reduce(exponential)
    return -_log_reduced(k, f)


@triton.jit
def _draw_kernel(
    scores_ptr,  # float32 [B, V], rows stride apart
    keys_ptr,  # int32 [B, 4]: seed (low, high), position, choice, as uint32
    best_ptr,  # float32 [B, parts]
    ids_ptr,  # int32 [B, parts]
    num_tokens,  # V
    stride,
    TOKENS: tl.constexpr,
):
    """The largest score plus noise of a part of a row, and the lowest token id that has it."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    groups = part * (TOKENS // 4) + tl.arange(0, TOKENS // 4)
    zero = tl.zeros(groups.shape, tl.uint32)
    k0 = tl.load(keys_ptr + row * 4).to(tl.uint32, bitcast=True)
    k1 = tl.load(keys_ptr + row * 4 + 1).to(tl.uint32, bitcast=True)
    position = tl.load(keys_ptr + row * 4 + 2).to(tl.uint32, bitcast=True)
    choice = tl.load(keys_ptr + row * 4 + 3).to(tl.uint32, bitcast=True)
    a, b, c, d = philox(groups.to(tl.uint32), zero + position, zero + choice, zero, zero + k0, zero + k1)
    # Interleaved twice, so that token 4 g + j has word j of group g.
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [TOKENS])
    tokens = part * TOKENS + tl.arange(0, TOKENS)
    scores = tl.load(scores_ptr + row * stride + tokens, mask=tokens < num_tokens, other=-float("inf"))
    totals = scores + gumbel_of(words)
    best = tl.max(totals, 0)
    place = row * tl.num_programs(1) + part
    tl.store(best_ptr + place, best)
    tl.store(ids_ptr + place, tl.min(tl.where(totals == best, tokens, 0x7FFFFFFF), 0))


@triton.jit
def _choose_kernel(
    best_ptr,  # float32 [B, parts]
    ids_ptr,  # int32 [B, parts]
    out_ptr,  # int64 [B]
    num_parts,
    PARTS: tl.constexpr,
):
    """Of a row's parts the best, the first of equals."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    mask = parts < num_parts
    best = tl.load(best_ptr + row * num_parts + parts, mask=mask, other=-float("inf"))
    ids = tl.load(ids_ptr + row * num_parts + parts, mask=mask, other=0x7FFFFFFF)
    tl.store(out_ptr + row, tl.min(tl.where(best == tl.max(best, 0), ids, 0x7FFFFFFF), 0).to(tl.int64))


def gumbel_draw_triton(scores: torch.Tensor, key_words: torch.Tensor) -> torch.Tensor:
    num_rows, num_tokens = scores.shape
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    num_parts = triton.cdiv(num_tokens, TOKENS)
    best = torch.empty(num_rows, num_parts, dtype=torch.float32, device=scores.device)
    ids = torch.empty(num_rows, num_parts, dtype=torch.int32, device=scores.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    args = (scores, key_words, best, ids, num_tokens, scores.stride(0))
    launch(_draw_kernel, (num_rows, num_parts), args, num_warps=8, unfused=True, TOKENS=TOKENS)
    padded = triton.next_power_of_2(num_parts)
    launch(_choose_kernel, (num_rows,), (best, ids, out, num_parts), num_warps=1, PARTS=padded)
    return out


def _case(vocabulary: int) -> CompileCase:
    scores, keys = on_paper(8, vocabulary, dtype=torch.float32), on_paper(8, 4, dtype=torch.int32)
    return CompileCase(f"vocabulary of {vocabulary}", lambda: gumbel_draw(scores, keys))


COMPILE_CASES = (_case(128256), _case(49152))
