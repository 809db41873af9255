"""The draw in Triton: noise to the bit, and the specification's tokens."""

from __future__ import annotations

import pytest
import torch

from kernels.gumbel import NoiseKey, gumbel_from_bits, gumbel_noise
from kernels.gumbel_argmax import gumbel_argmax_reference, gumbel_draw, gumbel_draw_reference, key_words
from tests.kernels.gpu.checks import randn, same_bits, strided

KEYS = [NoiseKey(0, 0, 0), NoiseKey((1 << 64) - 1, 7, 3), NoiseKey(0x89ABCDEF01234567, (1 << 32) - 1, (1 << 32) - 1)]
pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, of words that shall wrap


def test_noise_has_the_bits_of_the_specification() -> None:
    """2^20 words at random and the edges of every branch."""
    from tests.kernels.gpu.noise_kernel import noise_of  # not before the interpreter is switched on

    edges = [0, 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, *range(1257950000, 1257990000, 400)]
    words = torch.randint(0, 1 << 32, (1 << 20,), generator=torch.Generator().manual_seed(0))
    words[: len(edges)] = torch.tensor(edges)
    words[1 << 19 :] >>= torch.randint(0, 32, (1 << 19,), generator=torch.Generator().manual_seed(1))
    assert same_bits(noise_of(words), gumbel_from_bits(words))


@pytest.mark.parametrize("vocabulary", [1, 63, 100, 5000])
def test_tokens_are_the_specifications(vocabulary: int) -> None:
    for scale in (0.0, 1.0, 30.0):
        scores = randn(3, vocabulary, seed=int(scale)) * scale
        want = gumbel_argmax_reference(scores, KEYS)
        for rows in (scores, strided(scores)):
            drawn = gumbel_draw(rows, key_words(KEYS))
            assert drawn.dtype == torch.int64 and drawn.tolist() == want


def test_banned_tokens_are_not_drawn_and_ties_go_to_the_lowest_id() -> None:
    scores = torch.full((3, 9000), -torch.inf)
    scores[:, [8500, 4000]] = -5.0
    assert gumbel_draw(scores, key_words(KEYS)).tolist() == gumbel_argmax_reference(scores, KEYS)
    noise = gumbel_noise(KEYS[1], 9000)
    tied = torch.full((1, 9000), -50.0)
    for token_id in (8500, 700, 4099):
        tied[0, token_id] = 64.0 - noise[token_id]
    totals = tied[0] + noise
    winners = (totals == totals.max()).nonzero().flatten().tolist()
    assert gumbel_draw(tied, key_words(KEYS[1:2])).tolist() == [min(winners)]


def test_a_row_is_drawn_alone_as_among_others() -> None:
    scores, words = randn(3, 100), key_words(KEYS)
    together = gumbel_draw(scores, words).tolist()
    assert [int(gumbel_draw(scores[i : i + 1], words[i : i + 1])) for i in range(3)] == together


def test_the_specification_takes_the_same_words() -> None:
    scores = randn(3, 50)
    assert gumbel_draw_reference(scores, key_words(KEYS)).tolist() == gumbel_argmax_reference(scores, KEYS)


def test_refuses_other_shapes() -> None:
    for scores, words in (
        (randn(2, 5), key_words(KEYS)),
        (randn(3, 5).half(), key_words(KEYS)),
        (randn(3, 5), key_words(KEYS).long()),
    ):
        with pytest.raises(ValueError, match="gumbel_draw"):
            gumbel_draw(scores, words)
