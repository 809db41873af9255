"""Draw a token a row: the argmax of scores plus Gumbel noise (see `kernels.gumbel`), ties to the lowest id."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.gumbel import NoiseKey, gumbel_from_bits, gumbel_noise, gumbel_words

_MARGIN = 1.001  # covers float32 in the estimate and in the noise, a thousand times


def gumbel_argmax(scores: torch.Tensor, keys: Sequence[NoiseKey]) -> list[int]:
    """scores float32 [B, V], the largest of a row finite, minus infinity for tokens not to be drawn; a key a row."""
    if scores.dim() != 2 or scores.dtype != torch.float32 or len(keys) != scores.shape[0]:
        raise ValueError(f"gumbel_argmax: {len(keys)} keys for scores {scores.dtype} {tuple(scores.shape)}")
    return _by_candidates(scores, keys)


def gumbel_argmax_reference(scores: torch.Tensor, keys: Sequence[NoiseKey]) -> list[int]:
    """The specification."""
    return [int((row + gumbel_noise(key, row.numel())).argmax()) for row, key in zip(scores, keys, strict=True)]


def _by_candidates(scores: torch.Tensor, keys: Sequence[NoiseKey]) -> list[int]:
    """The same tokens as the specification's, with logarithms for a handful of them alone.

    A token's score plus noise is -log(E exp(-score)), and E = -log1p(-v) lies above v. So with r = v exp(-score),
    whoever has the least r, and the logarithm's value there, bound what r the winner can have.
    """
    vocab_size = scores.shape[1]
    words = gumbel_words(keys, torch.arange((vocab_size + 3) // 4))
    v = torch.stack([word.float() for word in words], dim=-1).flatten(1)[:, :vocab_size].add_(0.5).mul_(2.0**-32)
    r = v.mul_((scores.amax(-1, keepdim=True) - scores).exp_())
    best = r.argmin(-1, keepdim=True)
    least = r.gather(1, best) * (_ratio(best, words) * _MARGIN)
    rows, ids = (r <= least).nonzero(as_tuple=True)
    return _winners(scores, words, rows, ids)


def _bits(rows: torch.Tensor, ids: torch.Tensor, words: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """x of these rows' token ids."""
    return torch.stack(words)[ids % 4, rows, ids // 4]


def _ratio(ids: torch.Tensor, words: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """E / v of one token id a row ([B, 1]), from the noise."""
    x = _bits(torch.arange(len(ids)).unsqueeze(1), ids, words)
    v = (x.double() + 0.5) * 2.0**-32
    return ((-gumbel_from_bits(x).double()).exp() / v).float()


def _winners(scores: torch.Tensor, words: tuple[torch.Tensor, ...], rows: torch.Tensor, ids: torch.Tensor) -> list[int]:
    """Of the candidates (row by row, ids ascending) the best of each row by the specification's own numbers."""
    totals = scores[rows, ids] + gumbel_from_bits(_bits(rows, ids, words))
    winners = [(-torch.inf, -1)] * scores.shape[0]
    for row, token_id, total in zip(rows.tolist(), ids.tolist(), totals.tolist(), strict=True):
        if winners[row][1] < 0 or total > winners[row][0]:
            winners[row] = (total, token_id)
    return [token_id for _, token_id in winners]
