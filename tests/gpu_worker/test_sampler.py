"""The sampler: each control against a plain statement of it, their order, and draws that depend on nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.gumbel import NoiseKey, gumbel_noise
from kernels.token_filter import filtered_ids
from services.gpu_worker.sampler import LOGPROB_FLOOR, Draw, apply_controls, sample, validate
from shared.protocol import Constraint, SamplingParams
from tests.kernels.threads import torch_threads

VOCAB = 50


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 16, "seed": 11} | changes))


def draw(tokens: tuple[int, ...] = (1, 2), num_prompt: int = 2, choice: int = 0, **changes: Any) -> Draw:
    return Draw(params(**changes), choice, tokens, num_prompt)


def row(seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


def one(logits: torch.Tensor, draw_: Draw) -> int:
    return sample(logits[None], [draw_])[0].token_id


# --- drawing ---------------------------------------------------------------------------------------------------------


def test_greedy_is_the_first_largest() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [2.0, 2.0, 1.0]])
    tokens = sample(logits, [draw(temperature=0.0)] * 2)
    assert [t.token_id for t in tokens] == [1, 0]
    assert one(logits[0], draw(temperature=1e-6)) == 1
    assert one(logits[0], draw(temperature=0.0, top_k=2, top_p=0.1, min_p=0.9)) == 1
    assert sample(logits[:0], []) == []


def test_greedy_over_a_large_vocabulary_is_the_first_largest_with_any_threads() -> None:
    logits = torch.zeros(3, 100_001)
    logits[0, [70_000, 99_999]] = 1.0
    for threads in (1, 2, 3):
        with torch_threads(threads):
            assert [t.token_id for t in sample(logits, [draw(temperature=0.0)] * 3)] == [70_000, 0, 0]


def test_a_draw_is_logits_plus_noise() -> None:
    logits = row()
    for position in range(5):
        noise = gumbel_noise(NoiseKey(11, 3, position), VOCAB)
        want = int(((logits - logits.max()) / 0.7 + noise).argmax())
        tokens = (1, 2) + (4,) * position
        assert one(logits, draw(tokens, choice=3, temperature=0.7)) == want


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    draws = [draw(temperature=0.5, seed=seed) for seed in range(1500)]
    tokens = [token.token_id for token in sample(logits.expand(1500, 4), draws)]
    shares = torch.bincount(torch.tensor(tokens), minlength=4) / 1500
    assert (shares - (logits / 0.5).softmax(0)).abs().max() < 0.04


def test_a_draw_depends_on_seed_choice_and_position_alone() -> None:
    """Not on batch mates, their parameters, their number, or the number of threads."""
    logits = torch.stack([row(i, 40_000) for i in range(6)])
    draws = [
        draw(temperature=1.0), draw(temperature=0.0), draw(temperature=1.3, top_p=0.8), draw(temperature=1.0, top_k=7),
        draw(temperature=0.9, min_p=0.01, logprobs=3), draw((1, 2, 3), temperature=1.0, repetition_penalty=1.2),
    ]  # fmt: skip
    alone = [sample(logits[i : i + 1], draws[i : i + 1])[0] for i in range(6)]
    for threads in (1, 2, 3):
        with torch_threads(threads):
            assert sample(logits, draws) == alone
            assert sample(logits.flip(0), draws[::-1]) == alone[::-1]
    other = {one(logits[0], draw(temperature=1.0, seed=s, choice=c)) for s in (1, 2, 3) for c in (0, 1, 2)}
    assert len(other) > 3


def test_the_logits_are_not_modified() -> None:
    logits = torch.stack([row(), row(1)])
    before = logits.clone()
    sample(logits, [draw(temperature=1.0, logit_bias={3: 5.0}, repetition_penalty=2.0, logprobs=2)] * 2)
    assert torch.equal(logits, before)


# --- controls --------------------------------------------------------------------------------------------------------


def test_logit_bias_and_bans() -> None:
    logits = row()
    best = int(logits.argmax())
    assert one(logits, draw(temperature=0.0, logit_bias={best: -100.0})) != best
    assert one(logits, draw(temperature=0.0, logit_bias={7: 100.0})) == 7
    banned = draw(temperature=0.0, stop_token_ids=(best,), min_tokens=1)
    assert one(logits, banned) != best
    assert one(logits, draw((1, 2, 3), temperature=0.0, stop_token_ids=(best,), min_tokens=1)) == best
    # A bias cannot bring a banned token back, and a ban of everything is none.
    assert one(logits, draw(temperature=0.0, stop_token_ids=(best,), min_tokens=1, logit_bias={best: 100.0})) != best
    everything = tuple(range(VOCAB))
    assert one(logits, draw(temperature=0.0, stop_token_ids=everything, min_tokens=1)) == best


def test_penalties() -> None:
    """Repetition counts prompt and output, once each; frequency and presence the output alone."""
    logits = torch.tensor([2.0, -2.0, 4.0, -4.0, 1.0])
    tokens = (0, 1, 2, 3, 2)  # two of prompt, three of output
    repeated = apply_controls(logits, draw(tokens, repetition_penalty=2.0))
    assert repeated.tolist() == [1.0, -4.0, 2.0, -8.0, 1.0]
    counted = apply_controls(logits, draw(tokens, frequency_penalty=0.5, presence_penalty=0.25))
    assert counted.tolist() == [2.0, -2.0, 4.0 - 1.25, -4.0 - 0.75, 1.0]
    both = apply_controls(logits, draw(tokens, repetition_penalty=2.0, presence_penalty=1.0, logit_bias={3: 6.0}))
    assert both.tolist() == [1.0, -4.0, 2.0 - 1.0, 2.0 / 2.0 - 1.0, 1.0]
    assert apply_controls(logits, draw((0, 1), frequency_penalty=1.0)) is logits


def test_temperature_comes_before_the_filters() -> None:
    """At a high temperature top-p leaves more; penalties have acted on the logits before it."""
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0])
    cold, hot = ((logits - 3.0) / t for t in (0.25, 4.0))
    cold_ids, hot_ids = (filtered_ids(scaled, 0, 0.9, 0.0) for scaled in (cold, hot))
    assert cold_ids is not None and hot_ids is not None
    assert len(cold_ids) == 1 and len(hot_ids) == 4


# --- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs_are_of_the_raw_distribution(num_top: int) -> None:
    logits = row(3)
    want = logits.double().log_softmax(0)
    bias = {i: -100.0 for i in range(VOCAB) if i != 17}
    token = sample(logits[None], [draw(temperature=0.0, logit_bias=bias, logprobs=num_top)])[0]
    assert token.token_id == 17
    assert token.logprob == pytest.approx(float(want[17]), abs=1e-5)
    order = sorted(range(VOCAB), key=lambda i: (-logits[i], i))[:num_top]
    assert [i for i, _ in token.top] == order
    assert [p for _, p in token.top] == pytest.approx([float(want[i]) for i in order], abs=1e-5)


def test_non_finite_numbers_logprobs_have_a_floor() -> None:
    logits = torch.zeros(4)
    token = sample(logits[None], [draw(temperature=0.0, logprobs=2)])[0]
    assert [i for i, _ in token.top] == [0, 1]
    assert token.logprob == pytest.approx(-math.log(4))
    far = torch.tensor([0.0, -1e6])
    token = sample(far[None], [draw(temperature=0.0, logprobs=5)])[0]
    assert token.top == ((0, 0.0), (1, LOGPROB_FLOOR))


# --- validation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"stop_token_ids": (2, VOCAB)}, "stop_token_ids"),
    ],
)
def test_what_does_not_fit_the_vocabulary_is_refused(changes: dict[str, Any], field: str) -> None:
    reason = validate(params(**changes), VOCAB)
    assert reason is not None and reason.startswith(field)
    with pytest.raises(ValueError, match=field):
        sample(row()[None], [draw(temperature=0.0, min_tokens=1, **changes)])


def test_good_parameters_pass() -> None:
    assert validate(params(logit_bias={0: 1.0, VOCAB - 1: -2.0}, stop_token_ids=(0, VOCAB - 1)), VOCAB) is None


@given(
    seed=st.integers(0, 50), temperature=st.sampled_from([0.0, 1e-6, 1e-4, 0.5, 1.0, 100.0]), top_k=st.integers(0, 60),
    top_p=st.sampled_from([1.0, 0.9, 1e-9]), min_p=st.sampled_from([0.0, 0.5, 1.0]),
    logprobs=st.sampled_from([None, 0, 20]), output=st.integers(0, 3),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=5),
)  # fmt: skip
def test_any_parameters_draw_a_token(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, logprobs: int | None, bias: dict[int, float],
    output: int,
) -> None:  # fmt: skip
    one_draw = draw(
        (1, 2) + (5,) * output, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, logprobs=logprobs,
        logit_bias=bias, repetition_penalty=1.5, frequency_penalty=-2.0, presence_penalty=2.0,
    )  # fmt: skip
    token = sample(row(seed)[None], [one_draw])[0]
    assert 0 <= token.token_id < VOCAB
    assert math.isfinite(token.logprob)


# --- what a grammar allows ------------------------------------------------------------------------------------------


class Only:
    """An answer that may go on with these tokens; None: with any."""

    def __init__(self, *ids: int) -> None:
        bits = [i in ids for i in range(VOCAB + 3)]
        self.mask = bytes(sum(bit << n for n, bit in enumerate(bits[i : i + 8])) for i in range(0, len(bits), 8))
        self.seen: list[tuple[int, ...]] = []

    def mask_after(self, output_ids: Sequence[int]) -> bytes | None:
        self.seen.append(tuple(output_ids))
        return self.mask

    def allows(self, output_ids: Sequence[int]) -> bool:
        return True


def held(tokens: tuple[int, ...], answer: Only, **changes: Any) -> Draw:
    return Draw(params(constraint=Constraint(grammar="start: A"), **changes), 0, tokens, 2, answer=answer)


@pytest.mark.parametrize(
    "changes",
    [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.01}, {"min_p": 0.9}, {"logit_bias": {1: 100.0}},
     {"repetition_penalty": 2.0, "presence_penalty": 2.0}, {"top_k": 2, "top_p": 0.5, "logprobs": 2}],
)  # fmt: skip
@given(seed=st.integers(0, 1 << 32))
def test_only_what_a_grammar_allows_is_drawn(changes: dict[str, Any], seed: int) -> None:
    logits, answer = row(seed % 1000), Only(4, 9, VOCAB + 1)
    asked = held((1, 2, 9), answer, seed=seed, **changes)
    [drawn] = sample(logits[None], [asked])
    assert drawn.token_id in (4, 9) and answer.seen == [(9,)]
    if "logprobs" in changes:
        raw = torch.log_softmax(logits, -1)
        assert drawn.logprob == pytest.approx(float(raw[drawn.token_id]), abs=1e-5), "of the unmodified logits"


def test_an_end_that_is_all_a_grammar_allows_is_drawn_before_the_least_length_too() -> None:
    asked: dict[str, Any] = {"min_tokens": 10, "stop_token_ids": (4,)}
    assert one(row(), held((1, 2), Only(4), **asked)) == 4
    assert one(row(), held((1, 2), Only(4, 5), **asked)) == 5


def test_a_row_that_is_longer_than_the_vocabulary_ends_with_it() -> None:
    answer = Only(3)
    answer.mask = answer.mask[:1]
    assert one(torch.full((VOCAB,), 1.0), held((1, 2), answer)) == 3
