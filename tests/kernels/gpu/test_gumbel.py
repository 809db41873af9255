"""Noise in Triton, to the bit."""

from __future__ import annotations

import pytest
import torch

from kernels.gumbel import gumbel_from_bits
from tests.kernels.gpu.checks import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, of words that shall wrap


def test_noise_has_the_bits_of_the_specification() -> None:
    """2^20 words at random and the edges of every branch."""
    from tests.kernels.gpu.noise_kernel import noise_of  # not before the interpreter is switched on

    edges = [0, 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, *range(1257950000, 1257990000, 400)]
    words = torch.randint(0, 1 << 32, (1 << 20,), generator=torch.Generator().manual_seed(0))
    words[: len(edges)] = torch.tensor(edges)
    words[1 << 19 :] >>= torch.randint(0, 32, (1 << 19,), generator=torch.Generator().manual_seed(1))
    assert same_bits(noise_of(words), gumbel_from_bits(words))
