"""Top-k, top-p and min-p against a plain statement of them, and the integer weights of tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import token_filter
from kernels.token_filter import WEIGHT_BITS, filtered_ids, token_weights, top_ids


def row(seed: int = 0, vocab: int = 50) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


def plain_filter(scaled: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definition, with Python's numbers: best first, equal ones by id."""
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        weights = [math.exp(scaled[i]) for i in order]
        kept, reached = [], 0.0
        for i, weight in zip(order, weights, strict=True):
            kept.append(i)
            reached += weight
            if reached >= top_p * sum(weights):
                break
        order = kept
    return {i for i in order if min_p == 0 or scaled[i] >= math.log(min_p)}


@given(
    values=st.lists(st.integers(-8, 0), min_size=2, max_size=40),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([1.0, 0.97, 0.83, 0.31, 0.011]),
    min_p=st.sampled_from([0.0, 0.013, 0.21, 1.0]),
)
def test_filters(values: list[int], top_k: int, top_p: float, min_p: float) -> None:
    scaled = torch.tensor([float(v - max(values)) for v in values])
    kept = filtered_ids(scaled, top_k, top_p, min_p)
    want = plain_filter(scaled.tolist(), top_k, top_p, min_p)
    if kept is None:
        assert want == set(range(len(values)))
    else:
        assert kept.tolist() == sorted(want)


def test_nucleus_beyond_its_first_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = row(2, 2000) - row(2, 2000).max()
    want = filtered_ids(scaled, 0, 0.9, 0.0)
    monkeypatch.setattr(token_filter, "_LIKELY", -0.1)
    got = filtered_ids(scaled, 0, 0.9, 0.0)
    assert want is not None and got is not None
    assert torch.equal(want, got) and 3 < len(got) < 2000 and scaled[got].min() < -0.1


def test_top_ids_of_equal_values_are_the_lowest() -> None:
    values = torch.tensor([1.0, 2.0, 1.0, 3.0, 1.0, 2.0])
    assert top_ids(values, 1).tolist() == [3]
    assert top_ids(values, 4).tolist() == [3, 1, 5, 0]
    assert top_ids(values, 6).tolist() == [3, 1, 5, 0, 2, 4]


def test_weights_are_exponentials() -> None:
    values = torch.linspace(-27, 0, 100_001)
    want = values.double().exp() * 2.0**WEIGHT_BITS
    got = token_weights(values)
    assert ((got - want).abs() <= 2e-6 * want + 1).all()
    assert got[-1] == 2**WEIGHT_BITS and (got.diff() >= 0).all()
    assert token_weights(torch.tensor([-torch.inf, -1e30, -28.0])).tolist() == [0, 0, 0]
