"""Triton: Gumbel noise, to the bits that `kernels.gumbel` states.

Every operation must be rounded on its own, so kernels with it are launched `unfused`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gumbel import LN2_HIGH, LN2_LOW, LOG1P_REACH, LOG_POLYNOMIAL, SQRT_HALF_BITS
from kernels.philox import MULTIPLIERS, NUM_ROUNDS, WEYL

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
def noise_of_part(keys_ptr, row, part, TOKENS: tl.constexpr):
    """The noise of TOKENS token ids from part times that on; keys int32 [B, 4], see `kernels.draw_tokens`."""
    groups = part * (TOKENS // 4) + tl.arange(0, TOKENS // 4)
    zero = tl.zeros(groups.shape, tl.uint32)
    k0 = tl.load(keys_ptr + row * 4).to(tl.uint32, bitcast=True)
    k1 = tl.load(keys_ptr + row * 4 + 1).to(tl.uint32, bitcast=True)
    position = tl.load(keys_ptr + row * 4 + 2).to(tl.uint32, bitcast=True)
    choice = tl.load(keys_ptr + row * 4 + 3).to(tl.uint32, bitcast=True)
    a, b, c, d = philox(groups.to(tl.uint32), zero + position, zero + choice, zero, zero + k0, zero + k1)
    # Interleaved twice, so that token 4 g + j has word j of group g.
    return gumbel_of(tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [TOKENS]))
