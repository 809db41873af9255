"""Drawing in Triton: the specification's tokens, whatever is filtered, and however many are equal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.draw_tokens import NOT_FINITE, draw_rows, draw_tokens, draw_tokens_reference
from kernels.gumbel import NoiseKey, gumbel_noise
from kernels.sample_tokens import TokenChoice
from tests.kernels.gpu.checks import randn, strided

pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, of words that shall wrap
EDGES = [NoiseKey(0, 0, 0), NoiseKey((1 << 64) - 1, 7, 3), NoiseKey(0x89ABCDEF01234567, (1 << 32) - 1, (1 << 32) - 1)]
KEY = EDGES[1]
PLAIN = [TokenChoice(KEY, 0.0), TokenChoice(KEY, 1.0), TokenChoice(KEY, 0.3)]
FILTERED = [
    *PLAIN, TokenChoice(KEY, 0.7, top_k=1), TokenChoice(KEY, 1.3, top_k=40), TokenChoice(KEY, 1.0, top_p=0.9),
    TokenChoice(KEY, 1.0, top_p=0.999999), TokenChoice(KEY, 0.8, top_k=50, top_p=0.7, min_p=0.01),
    TokenChoice(KEY, 1.0, min_p=0.05), TokenChoice(KEY, 30.0, top_p=0.5), TokenChoice(KEY, 1.0, top_p=1e-9),
]  # fmt: skip


def same(logits: torch.Tensor, choices: list[TokenChoice]) -> None:
    keyed = [replace(c, key=EDGES[i % 3]) for i, c in enumerate(choices)]
    rows = draw_rows(keyed)
    drawn = draw_tokens(logits, rows)
    assert drawn.dtype == torch.int64 and drawn.tolist() == draw_tokens_reference(logits, rows).tolist()


@pytest.mark.parametrize(
    ("vocabulary", "choices"),
    [(1, FILTERED), (63, FILTERED), (100, PLAIN[:1]), (5000, PLAIN), (5000, [FILTERED[0], FILTERED[7]])],
)
def test_tokens_are_the_specifications(vocabulary: int, choices: list[TokenChoice]) -> None:
    logits = randn(len(choices), vocabulary, seed=vocabulary) * (vocabulary % 7) + 3.0
    same(strided(logits), choices)


@pytest.mark.parametrize("top_k", [0, 1, 7, 99])
def test_equal_values_and_banned_tokens(top_k: int) -> None:
    """Few values, so that a cut falls among equals; both zeros, and tokens that must not be drawn."""
    values = torch.tensor([0.0, -0.0, 1.0, 1.0000001, -1.0, 2.5, -30.0, 88.0, -torch.inf])
    logits = values[torch.randint(0, 9, (5, 100), generator=torch.Generator().manual_seed(top_k))]
    controls = [(0.7, 1.0, 0.0), (0.7, 0.97, 0.0), (50.0, 0.5, 0.0), (1e-4, 0.97, 0.0), (50.0, 0.97, 0.99)]
    same(logits, [TokenChoice(KEY, t, top_k, p, m) for t, p, m in controls])


def test_ties_go_to_the_lowest_id() -> None:
    noise = gumbel_noise(KEY, 9000)
    tied = torch.full((1, 9000), -50.0)
    for token_id in (8500, 700, 4099):
        tied[0, token_id] = 64.0 - noise[token_id]
    rows = draw_rows([TokenChoice(KEY)])
    scaled = tied[0] - tied.max()
    winners = (scaled + noise == (scaled + noise).max()).nonzero().flatten().tolist()
    assert draw_tokens(tied, rows).tolist() == [min(winners)]
    equal = torch.zeros(1, 9000)
    equal[0, [4097, 8000]] = 7.0
    assert draw_tokens(equal, draw_rows([TokenChoice(KEY, 0.0)])).tolist() == [4097]


def test_what_is_not_finite_is_said_so_row_by_row() -> None:
    logits = randn(5, 5000)
    logits[1, 4500] = torch.nan
    logits[2] = -torch.inf
    logits[3, 7] = torch.inf
    logits[4, :4999] = -torch.inf
    for choice in (TokenChoice(KEY, 0.0), TokenChoice(KEY), TokenChoice(KEY, top_p=0.5)):
        rows = draw_rows([choice] * 5)
        drawn = draw_tokens(logits, rows).tolist()
        assert drawn == draw_tokens_reference(logits, rows).tolist()
        assert [i for i, token in enumerate(drawn) if token == NOT_FINITE] == [1, 2, 3] and drawn[4] == 4999


def test_a_row_is_drawn_alone_as_among_others() -> None:
    choices = FILTERED[4:8]
    logits = randn(4, 100) * 2
    together = draw_tokens(logits, draw_rows(choices)).tolist()
    assert [int(draw_tokens(logits[i : i + 1], draw_rows([c]))) for i, c in enumerate(choices)] == together


def test_refuses_other_shapes() -> None:
    rows = draw_rows(PLAIN)
    for logits in (randn(2, 5), randn(3, 5).half(), randn(3)):
        with pytest.raises(ValueError, match="draw_tokens"):
            draw_tokens(logits, rows)
