"""Gumbel noise: accurate, defined bit by bit, and independent of how much of the row is asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.gumbel import (
    LN2_HIGH,
    LN2_LOW,
    LOG1P_REACH,
    LOG_POLYNOMIAL,
    NoiseKey,
    gumbel_from_bits,
    gumbel_noise,
    gumbel_noise_at,
    gumbel_noise_reference,
)
from tests.kernels.threads import torch_threads

F = np.float32
KEY = NoiseKey(9, 0, 2)
EDGES = [0, 1, 2, (1 << 31) - 2, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, (1 << 32) - 2, (1 << 32) - 1]


def exact_noise(x: torch.Tensor) -> torch.Tensor:
    return -torch.log(-torch.log1p(-(x.double() + 0.5) * 2.0**-32))


def test_accuracy_on_a_million_values() -> None:
    noise = gumbel_noise(NoiseKey(0x0123456789ABCDEF, 3, 77), 1 << 20)
    want = gumbel_noise_reference(NoiseKey(0x0123456789ABCDEF, 3, 77), 1 << 20)
    assert (noise.double() - want).abs().max() < 1e-6
    assert abs(float(noise.double().mean()) - 0.5772) < 0.005
    assert abs(float(noise.double().var()) - 1.6449) < 0.01


def test_tails_and_joints_are_accurate_and_finite() -> None:
    reach = int(LOG1P_REACH * 2**32)
    near = [center + d for center in (1 << 31, reach, 1 << 20) for d in range(-3000, 3000, 7)]
    x = torch.tensor([*EDGES, *range(3000), *near, *((1 << 32) - 1 - i for i in range(3000))])
    noise = gumbel_from_bits(x)
    assert noise.isfinite().all()
    # One unit in the last place of the noise or of its exponential, whichever is felt more.
    assert ((noise.double() - exact_noise(x)).abs() < 4e-7 * (1 + exact_noise(x).abs() / 4)).all()


def scalar_log(k: np.float32, f: np.float32) -> np.float32:
    square = f * f
    p = f * F(LOG_POLYNOMIAL[0]) + F(LOG_POLYNOMIAL[1])
    for coefficient in LOG_POLYNOMIAL[2:]:
        p = p * f + F(coefficient)
    y = p * f * square + k * F(LN2_LOW)
    y = f + (y - square * F(0.5))
    return F(y + k * F(LN2_HIGH))


def scalar_reduced(u: np.float32) -> tuple[np.float32, np.float32]:
    mantissa, exponent = np.frexp(u)  # in [1/2, 1)
    if F(mantissa) < np.array(0x3F3504F3, np.int32).view(F):
        mantissa, exponent = mantissa * F(2), exponent - 1
    return F(exponent), F(mantissa) - F(1)


def scalar_noise(x: int) -> np.float32:
    """The definition in the module's docstring, one number at a time, with numpy's scalars instead of torch."""
    low = x < 1 << 31
    t = (F(x if low else (1 << 32) - 1 - x) + F(0.5)) * F(2.0**-32)
    if low and t <= F(LOG1P_REACH):
        log = scalar_log(F(0), -t)
    else:
        log = scalar_log(*scalar_reduced(F(1) - t if low else t))
    return -scalar_log(*scalar_reduced(-log))


def test_bits_are_those_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.cat((torch.tensor(EDGES), torch.randint(0, 1 << 32, (3000,), generator=generator)))
    want = torch.tensor([scalar_noise(value) for value in x.tolist()])
    assert torch.equal(gumbel_from_bits(x).view(torch.int32), want.view(torch.int32))


def test_bits_are_pinned() -> None:
    """Another implementation, and every later version, must draw the same tokens from the same seeds."""
    noise = gumbel_noise(NoiseKey(42, 1, 5), 6).view(torch.int32).tolist()
    assert noise == [1038882981, 1059511477, -1095243341, -1109574853, -1095535771, 1061491464]


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 63, 100, 49152])
def test_a_token_has_one_noise(vocab_size: int) -> None:
    row = gumbel_noise(KEY, 50000)
    assert torch.equal(gumbel_noise(KEY, vocab_size), row[:vocab_size])
    ids = torch.tensor([vocab_size - 1, 0, vocab_size // 2])
    other_ids = torch.tensor([5, 4])
    noises = gumbel_noise_at([KEY, NoiseKey(1, 2, 3), KEY], [ids, other_ids, ids[:1]])
    assert torch.equal(noises[0], row[ids]) and torch.equal(noises[2], row[ids[:1]])
    assert torch.equal(noises[1], gumbel_noise(NoiseKey(1, 2, 3), 6)[other_ids])
    with torch_threads(3):
        assert torch.equal(gumbel_noise(KEY, 50000), row)


def test_every_part_of_the_key_matters() -> None:
    row = gumbel_noise(NoiseKey(1, 0, 0), 64)
    for other in ((2, 0, 0), (1 + (1 << 32), 0, 0), (1, 1, 0), (1, 0, 1)):
        assert (gumbel_noise(NoiseKey(*other), 64) != row).sum() > 60


def test_argmax_draws_from_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    draws = torch.stack([(logits + gumbel_noise(NoiseKey(seed, 0, 0), 5)).argmax() for seed in range(1500)])
    shares = torch.bincount(draws, minlength=5) / len(draws)
    assert (shares - logits.softmax(0)).abs().max() < 0.04


@pytest.mark.parametrize("bad", [(-1, 0, 0), (1 << 64, 0, 0), (0, -1, 0), (0, 0, 1 << 32)])
def test_refuses_what_does_not_fit(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="NoiseKey"):
        NoiseKey(*bad)
