"""The draw: exactly the tokens of the specification, whatever the distribution, alone and together."""

from __future__ import annotations

import pytest
import torch

from kernels.gumbel import NoiseKey, gumbel_noise
from kernels.gumbel_argmax import gumbel_argmax, gumbel_argmax_reference
from tests.kernels.threads import torch_threads


def keys_of(count: int) -> list[NoiseKey]:
    return [NoiseKey(17 * i, i % 3, i % 50) for i in range(count)]


@pytest.mark.parametrize("scale", [0.0, 1e-3, 0.3, 1.0, 4.0, 30.0, 1e4])
@pytest.mark.parametrize("vocab_size", [1, 3, 63, 100, 5001])
def test_against_the_specification(scale: float, vocab_size: int) -> None:
    """From all equal to one certain token; a scale of 1e4 gives scores whose exponentials are zero."""
    torch.manual_seed(vocab_size)
    scores = torch.randn(150, vocab_size) * scale
    keys = keys_of(150)
    assert gumbel_argmax(scores, keys) == gumbel_argmax_reference(scores, keys)


def test_banned_tokens_are_not_drawn() -> None:
    scores = torch.full((60, 100), -torch.inf)
    scores[:, 70] = -5.0
    assert gumbel_argmax(scores, keys_of(60)) == [70] * 60
    scores[:, 20] = -5.0
    drawn = gumbel_argmax(scores, keys_of(60))
    assert set(drawn) == {20, 70}
    assert drawn == gumbel_argmax_reference(scores, keys_of(60))


def test_ties_go_to_the_lowest_id() -> None:
    """Scores made so that several tokens have the very same total."""
    key = NoiseKey(3, 0, 0)
    noise = gumbel_noise(key, 40)
    scores = torch.full((1, 40), -50.0)
    for token_id in (31, 7, 22):
        scores[0, token_id] = 64.0 - noise[token_id]
    totals = scores[0] + noise
    tied = (totals == totals.max()).nonzero().flatten().tolist()
    assert len(tied) > 1
    assert gumbel_argmax(scores, [key]) == [min(tied)]


def test_a_row_is_drawn_alone_as_together() -> None:
    scores, keys = torch.randn(33, 9001) * 2, keys_of(33)
    alone = [gumbel_argmax(scores[i : i + 1], keys[i : i + 1])[0] for i in range(33)]
    for threads in (1, 2, 3):
        with torch_threads(threads):
            assert gumbel_argmax(scores, keys) == alone
            assert gumbel_argmax(scores.flip(0), keys[::-1]) == alone[::-1]


def test_refuses_other_shapes() -> None:
    for scores in (torch.randn(4), torch.randn(2, 4), torch.randn(1, 4).double()):
        with pytest.raises(ValueError, match="gumbel_argmax"):
            gumbel_argmax(scores, keys_of(1))
