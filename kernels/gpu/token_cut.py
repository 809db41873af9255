"""Triton: where top-k and top-p end in a row, see `kernels.draw_tokens`; weights are those of `kernels.token_filter`.

Every operation on values must be rounded on its own, so kernels with these are launched `unfused`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.numbers import nearest
from kernels.token_filter import EXP2_POLYNOMIAL, LOG2_E, WEIGHT_BITS

_LOG2_E: tl.constexpr = tl.constexpr(LOG2_E)
_WEIGHT_BITS: tl.constexpr = tl.constexpr(WEIGHT_BITS)
_P: tl.constexpr = tl.constexpr(EXP2_POLYNOMIAL)
_DEGREE: tl.constexpr = tl.constexpr(len(EXP2_POLYNOMIAL))
DIGIT_BITS = 4  # of a value, found in one pass over the row
_DIGIT_BITS: tl.constexpr = tl.constexpr(DIGIT_BITS)
_DIGITS: tl.constexpr = tl.constexpr(1 << DIGIT_BITS)
_FIRST_SHIFT: tl.constexpr = tl.constexpr(32 - DIGIT_BITS)


@triton.jit
def token_weight(x):
    """int64, of float32 values up to 0."""
    y = tl.maximum(x * _LOG2_E, -100.0)
    n = nearest(y)
    f = y - n
    p = f * _P[0] + _P[1]
    for i in tl.static_range(2, _DEGREE):
        p = p * f + _P[i]
    power = ((n.to(tl.int32) + (_WEIGHT_BITS + 127)) << 23).to(tl.float32, bitcast=True)
    weight = p * power
    high = (weight * 9.5367431640625e-7).to(
        tl.int32
    )  # 2^-20: a conversion to 64 bits at once may be made of fused steps
    return (high.to(tl.int64) << 20) + (weight - high.to(tl.float32) * 1048576.0).to(tl.int32)


@triton.jit
def _tile(row_ptr, first, num_tokens, end_key, end_id, WEIGHTS: tl.constexpr, TOKENS: tl.constexpr):
    """Of TOKENS tokens: ids, keys (int32, smaller for larger values), and what each counts: 0 beyond the end."""
    ids = first + tl.arange(0, TOKENS)
    scaled = tl.load(row_ptr + ids, mask=ids < num_tokens, other=-float("inf"))
    keys = scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # no value is above 0
    counts = (ids < num_tokens) & ((keys < end_key) | ((keys == end_key) & (ids <= end_id)))
    if WEIGHTS:
        amount = tl.where(counts, token_weight(scaled), 0)
    else:
        amount = counts.to(tl.int64)
    return ids, keys, counts, amount


@triton.jit
def total_weight(row_ptr, num_tokens, end_key, end_id, TOKENS: tl.constexpr):
    total = tl.full([], 0, tl.int64)
    for first in range(0, num_tokens, TOKENS):
        _, _, _, amount = _tile(
            row_ptr, first, num_tokens, end_key, end_id, True, TOKENS
        )  # fmt: skip
        total += tl.sum(amount, 0)
    return total


@triton.jit
def end_of(row_ptr, num_tokens, end_key, end_id, wanted, WEIGHTS: tl.constexpr, TOKENS: tl.constexpr):
    """(key, id) of the token with which the ranked ones, up to the given end, reach the weight or number wanted."""
    low = tl.full([], 0, tl.int32)
    before = tl.full([], 0, tl.int64)  # of keys below low
    digits = tl.arange(0, _DIGITS)
    shift = tl.full([], _FIRST_SHIFT, tl.int32)
    while shift >= 0:
        sums = tl.zeros([_DIGITS], tl.int64)
        for first in range(0, num_tokens, TOKENS):
            _, keys, counts, amount = _tile(
                row_ptr, first, num_tokens, end_key, end_id, WEIGHTS, TOKENS
            )  # fmt: skip
            digit = tl.where(counts & (keys >= low), (keys - low) >> shift, _DIGITS)
            if tl.min(digit, 0) < _DIGITS:
                same = digit[:, None] == digits[None, :]
                sums += tl.sum(tl.where(same, amount[:, None], 0), 0)
        reached = before + tl.cumsum(sums, 0)
        found = tl.minimum(tl.sum((reached < wanted).to(tl.int32), 0), _DIGITS - 1)
        before += tl.sum(tl.where(digits < found, sums, 0), 0)
        low += found << shift
        shift -= _DIGIT_BITS
    low = tl.where((low < 0) | (low > 0x7F800000), 0x7F800000, low)  # infinity: a row that has not so much
    value = (low | -2147483648).to(tl.float32, bitcast=True)
    one = tl.full([], 1, tl.int64)
    if WEIGHTS:
        one = tl.maximum(token_weight(value), 1)
    number = ((wanted - before + one - 1) // one).to(tl.int32)  # so many of the equal ones
    seen = tl.full([], 0, tl.int32)
    last = tl.full([], -1, tl.int32)
    for first in range(0, num_tokens, TOKENS):
        ids, keys, counts, _ = _tile(
            row_ptr, first, num_tokens, end_key, end_id, False, TOKENS
        )  # fmt: skip
        equal = (counts & (keys == low)).to(tl.int32)
        place = seen + tl.cumsum(equal, 0)
        last = tl.maximum(last, tl.max(tl.where((equal == 1) & (place == number), ids, -1), 0))
        seen += tl.sum(equal, 0)
    return low, last


@triton.jit
def cut_kernel(
    scaled_ptr,  # float32 [B, V]: the largest of a row is 0
    temperature_ptr,  # float32 [B]
    top_k_ptr,  # int32 [B]
    top_p_ptr,  # float64 [B]
    least_ptr,  # float32 [B]
    cut_values_ptr,  # float32 [B]
    cut_ids_ptr,  # int32 [B]
    num_tokens,  # V
    TOKENS: tl.constexpr,
):
    """The cut of one row: top-k's end, then that of top-p among what is left, or min-p's where that is above."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = scaled_ptr + row * num_tokens
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    least = tl.load(least_ptr + row)
    end_key, end_id = tl.full([], 0x7FFFFFFF, tl.int32), tl.full([], 0x7FFFFFFF, tl.int32)
    if tl.load(temperature_ptr + row) > 0.0:
        if (top_k > 0) & (top_k < num_tokens):
            end_key, end_id = end_of(
                row_ptr, num_tokens, end_key, end_id, top_k.to(tl.int64), False, TOKENS
            )  # fmt: skip
        if top_p < 1.0:
            total = total_weight(row_ptr, num_tokens, end_key, end_id, TOKENS)
            wanted = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
            wanted = tl.maximum(tl.minimum(wanted, total), 1)
            end_key, end_id = end_of(
                row_ptr, num_tokens, end_key, end_id, wanted, True, TOKENS
            )  # fmt: skip
    value = tl.where(end_key == 0x7FFFFFFF, -float("inf"), (end_key | -2147483648).to(tl.float32, bitcast=True))
    above = least > value
    tl.store(cut_values_ptr + row, tl.where(above, least, value))
    tl.store(cut_ids_ptr + row, tl.where(above, 0x7FFFFFFF, end_id))
