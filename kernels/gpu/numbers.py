"""Number formats in Triton, by plain integer and float32 operations: the same bits on every GPU and in the interpreter.

Hardware conversions to and from 8-bit floats are missing before sm_89 and inexact in the interpreter, and the
functions that round are no part of the language.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nearest(x):
    """float32 of magnitude below 2^22 → the nearest integer, ties to even, as float32."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def to_e4m3(x):
    """float32 with |x| <= 448 → the bits of the nearest float8_e4m3fn, ties to even, as uint8."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal: 3 of 23 bits of the mantissa stay, and the exponent's bias becomes 7. A carry is right as it is.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 a step is 2^-9, which is one unit in the last place of 2^14.
    tiny = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0x3C800000, tiny, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_e4m3(code):
    """Bits of a float8_e4m3fn (uint8) → float16 of 2^-8 times its value, exactly; NaN becomes 480 / 256."""
    wide = code.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def from_int8(x):
    """int8 → float16, exactly: by bits, which takes fewer registers than a conversion where many are made at once."""
    shifted = (x.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16)
    return (shifted | 0x6400).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def scaled(x, LIMIT: tl.constexpr, SMALLEST: tl.constexpr):
    """[groups, group] float32 → q (int8, or e4m3 bits as uint8) and the groups' scales: see `kernels.scaled_rows`."""
    largest = tl.maximum(tl.max(tl.abs(x), 1), SMALLEST)
    poison = tl.sum(x * 0.0, 1)  # 0, or NaN where a value is not finite
    inverse = LIMIT / largest
    q = x * inverse[:, None]
    q = tl.where(q == q, q, 0.0)
    q = tl.minimum(tl.maximum(q, -LIMIT), LIMIT)
    if LIMIT == 127.0:
        code = nearest(q).to(tl.int8)
    else:
        code = to_e4m3(q)
    return code, largest / LIMIT + poison
