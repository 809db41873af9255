"""Sampling: the native op gives exactly the tokens, sums and best ids of the specification."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kernels.gumbel import NoiseKey, gumbel_noise
from kernels.native.library import Pool
from kernels.sample_tokens import NativeOps, TokenChoice, sample_tokens, sample_tokens_reference
from kernels.token_filter import filtered_ids
from tests.kernels.native_libraries import ISAS, library_for

KEY = NoiseKey(3, 0, 0)
CHOICES = [
    TokenChoice(KEY, 0.0),
    TokenChoice(KEY, 0.0, num_top=20),
    TokenChoice(KEY, 1.0, num_top=0),
    TokenChoice(KEY, 0.3),
    TokenChoice(KEY, 0.7, top_k=1),
    TokenChoice(KEY, 1.3, top_k=40),
    TokenChoice(KEY, 1.0, top_p=0.9, num_top=5),
    TokenChoice(KEY, 1.0, top_p=0.999999),
    TokenChoice(KEY, 0.8, top_k=50, top_p=0.7, min_p=0.01),
    TokenChoice(KEY, 1.0, min_p=0.05),
    TokenChoice(KEY, 30.0, top_p=0.5),
]


@pytest.fixture(scope="module", params=[isa.name for isa in ISAS])
def native(request: pytest.FixtureRequest) -> NativeOps:
    library = library_for(next(isa for isa in ISAS if isa.name == request.param))
    return library, Pool(library, 2)


def with_keys(choices: list[TokenChoice]) -> list[TokenChoice]:
    return [replace(choice, key=NoiseKey(17 * i, i % 3, i % 50)) for i, choice in enumerate(choices)]


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 4.0, 1e4])
@pytest.mark.parametrize("vocab_size", [1, 3, 63, 5001])
def test_against_the_specification(native: NativeOps, scale: float, vocab_size: int) -> None:
    """From all equal to one certain token."""
    torch.manual_seed(vocab_size)
    choices = with_keys(CHOICES * 4)
    logits = torch.randn(len(choices), vocab_size) * scale
    rows = list(logits + 1.0)
    assert sample_tokens(rows, logits, choices, native) == sample_tokens_reference(rows, logits, choices)


# few values, so that many are equal; banned tokens; both zeros
VALUES = st.sampled_from([0.0, -0.0, 1.0, 1.0000001, -1.0, 2.5, -30.0, 88.0, -torch.inf])


@settings(deadline=None)
@given(
    values=arrays.arrays(np.float32, st.integers(2, 90), elements=VALUES),
    temperature=st.sampled_from([0.0, 1e-4, 0.7, 1.0, 50.0]), top_k=st.integers(0, 95),
    top_p=st.sampled_from([1.0, 0.97, 0.5, 1e-9]), min_p=st.sampled_from([0.0, 0.2, 1.0]), seed=st.integers(0, 20),
    num_top=st.sampled_from([None, 0, 3, 20]),
)  # fmt: skip
def test_equal_and_banned_tokens(
    native: NativeOps, values: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, seed: int,
    num_top: int | None,
) -> None:  # fmt: skip
    values[seed % len(values)] = 2.5  # one at least is left
    row = torch.from_numpy(values)
    raw = row.clamp(min=-200.0)[None]
    choice = TokenChoice(NoiseKey(seed, 0, 0), temperature, top_k, top_p, min_p, num_top)
    assert sample_tokens([row], raw, [choice], native) == sample_tokens_reference([row], raw, [choice])


def test_the_token_is_the_best_of_those_left_under_the_whole_rows_noise(native: NativeOps) -> None:
    torch.manual_seed(5)
    logits = torch.randn(1, 50) * 3
    kept = filtered_ids(logits[0] - logits[0].max(), 5, 1.0, 0.0)
    assert kept is not None
    noise = gumbel_noise(KEY, 50)
    want = int(kept[((logits[0] - logits[0].max())[kept] + noise[kept]).argmax()])
    for ops in (None, native):
        assert sample_tokens(list(logits), logits, [TokenChoice(KEY, top_k=5)], ops)[0].token_id == want


def test_ties_go_to_the_lowest_id(native: NativeOps) -> None:
    """Logits made so that several tokens have the very same total."""
    noise = gumbel_noise(KEY, 40)
    tied = noise.argsort(descending=True)[1:5]  # noises within a factor of two, so their differences are exact
    row = torch.full((40,), -500.0)
    row[tied] = noise[tied].min() - noise[tied]
    assert (row + noise == (row + noise).max()).nonzero().flatten().tolist() == tied.sort().values.tolist()
    for ops in (None, native):
        assert sample_tokens([row], row[None], [TokenChoice(KEY)], ops)[0].token_id == int(tied.min())


def test_a_row_is_drawn_alone_as_together(native: NativeOps) -> None:
    torch.manual_seed(6)
    choices = with_keys(CHOICES * 3)
    logits = torch.randn(len(choices), 9001) * 2
    alone = [sample_tokens([logits[i]], logits[i : i + 1], choices[i : i + 1], native)[0] for i in range(len(choices))]
    for threads in (1, 2, 3):
        ops = native[0], Pool(native[0], threads)
        assert sample_tokens(list(logits), logits, choices, ops) == alone
        assert sample_tokens(list(logits.flip(0)), logits.flip(0), choices[::-1], ops) == alone[::-1]


def test_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match="sample_tokens"):
        sample_tokens([torch.zeros(4)], torch.zeros(1, 5), [TokenChoice(KEY)])
    with pytest.raises(ValueError, match="sample_tokens"):
        sample_tokens([torch.zeros(4)], torch.zeros(1, 4), [])
    assert sample_tokens([], torch.zeros(0, 4), []) == []
