"""Gumbel noise of a token: a pure function of (seed, choice, position, token id), the same bits on every device.

One Philox 4x32-10 call serves four consecutive token ids. Its input:

    key     = (seed mod 2^32, seed div 2^32)
    counter = (token id div 4, position, choice, 0)

and its output word number (token id mod 4) is the token's x, a uint32. Then, with every operation rounded to float32
on its own (no fused multiply-add) and in the order written:

    v = (x + 1/2) 2^-32,   E = -log1p(-v),   noise = -log E

x and its complement below 2^31 are converted to float32 (round to nearest even), so that neither tail is lost:

    x < 2^31:  t = (float(x) + 0.5) 2^-32, which is v;    x >= 2^31:  t = (float(2^32 - 1 - x) + 0.5) 2^-32 = 1 - v
    log1p(-v) = log_reduced(0, -t)  where t is v and t <= 1 - sqrt(1/2), else log(u) with u = 1 - t or t

`log_reduced(k, f)` is k ln 2 + log(1 + f) for |f| in the reach of the polynomial (`LOG_POLYNOMIAL`, fitted by
weighted least squares to (log(1 + f) - f + f^2 / 2) / f^3 between sqrt(1/2) - 1 and sqrt(2) - 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.philox import MASK, Words, philox_4x32_10

# Coefficients from the highest power down; each is a float32.
LOG_POLYNOMIAL = (
    0.06746914237737656,
    -0.11674577742815018,
    0.11887409538030624,
    -0.12405715137720108,
    0.14219678938388824,
    -0.16667993366718292,
    0.20002111792564392,
    -0.25000008940696716,
    0.3333331346511841,
)
LN2_HIGH = 0.693359375  # nine bits, so that k * LN2_HIGH is exact
LN2_LOW = -2.12194440e-4
SQRT_HALF_BITS = 0x3F3504F3
LOG1P_REACH = 0.29289323  # 1 - sqrt(1/2)


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """What the noise of a row of tokens depends on; position is the number of output tokens before it."""

    seed: int
    choice: int
    position: int

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 64 or not 0 <= self.choice <= MASK or not 0 <= self.position <= MASK:
            raise ValueError("NoiseKey: seed must be a uint64, choice and position uint32")


def gumbel_noise(key: NoiseKey, vocab_size: int) -> torch.Tensor:
    """Noise of the token ids 0 to vocab_size - 1, float32 [vocab_size]."""
    words = gumbel_words([key], torch.arange((vocab_size + 3) // 4))
    return gumbel_from_bits(torch.stack(words, dim=-1).flatten()[:vocab_size])


def gumbel_noise_at(keys: Sequence[NoiseKey], token_ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Under each key the noise of its token ids (int64 [n]), float32 [n]; the same numbers as in the whole row."""
    sizes = torch.tensor([len(ids) for ids in token_ids])
    low, high, position, choice = (field.repeat_interleave(sizes) for field in _fields(keys))
    ids = torch.cat(list(token_ids))
    words = philox_4x32_10((ids // 4, position, choice, torch.zeros_like(ids)), (low, high))
    x = torch.stack(words).gather(0, (ids % 4).unsqueeze(0))[0]
    return list(torch.split(gumbel_from_bits(x), sizes.tolist()))


def gumbel_noise_reference(key: NoiseKey, vocab_size: int) -> torch.Tensor:
    """The definition in float64: what `gumbel_noise` approximates to a few units in the last place."""
    words = gumbel_words([key], torch.arange((vocab_size + 3) // 4))
    v = (torch.stack(words, dim=-1).flatten()[:vocab_size].double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-v))


def gumbel_words(keys: Sequence[NoiseKey], groups: torch.Tensor) -> Words:
    """x of the four tokens of each group (token id div 4; int64 [G]) under each key: four uint32 tensors [keys, G]."""
    low, high, position, choice = (field.unsqueeze(1) for field in _fields(keys))
    return philox_4x32_10((groups.unsqueeze(0), position, choice, torch.zeros_like(choice)), (low, high))


def _fields(keys: Sequence[NoiseKey]) -> tuple[torch.Tensor, ...]:
    """Low and high half of the seeds, positions, choices; each int64 [keys]."""
    return torch.tensor([(k.seed & MASK, k.seed >> 32, k.position, k.choice) for k in keys], dtype=torch.int64).unbind(
        1
    )


def gumbel_from_bits(x: torch.Tensor) -> torch.Tensor:
    """-log(-log1p(-v)) of uint32 values x held in int64, in float32 as the module says."""
    low = x < 1 << 31
    t = (torch.where(low, x, MASK - x).to(torch.float32) + 0.5) * 2.0**-32
    k, f = _reduce(torch.where(low, 1.0 - t, t))
    near = low & (t <= LOG1P_REACH)
    exponential = -_log_reduced(torch.where(near, 0.0, k), torch.where(near, -t, f))
    return -_log_reduced(*_reduce(exponential))


def _reduce(u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(k, f) with u = 2^k (1 + f) and 1 + f in [sqrt(1/2), sqrt(2)); exact. u is positive and normal."""
    bits = u.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    return exponent.to(torch.float32), (bits - (exponent << 23)).view(torch.float32) - 1.0


def _log_reduced(k: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    square = f * f
    p = f * LOG_POLYNOMIAL[0] + LOG_POLYNOMIAL[1]
    for coefficient in LOG_POLYNOMIAL[2:]:
        p = p * f + coefficient
    y = p * f * square + k * LN2_LOW
    y = f + (y - square * 0.5)
    return y + k * LN2_HIGH
