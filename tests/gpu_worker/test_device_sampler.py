"""Drawing on the device: the tokens and log-probabilities of `sampler.sample`, whatever is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.device_sampler import draw, edits_of, needs_history
from services.gpu_worker.sampler import Draw, sample
from shared.protocol import Constraint
from tests.gpu_worker.builders import Allows, make_params

PROMPT, OUTPUT = [5, 9, 5, 200], [9, 9, 40, 7]
CONTROLS: list[dict[str, Any]] = [
    {}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 20, "top_p": 0.8}, {"min_p": 0.1, "temperature": 1.5},
    {"logit_bias": {7: 5.0, 90: -100.0}, "temperature": 1.0}, {"stop_token_ids": (9, 40), "min_tokens": 8},
    {"repetition_penalty": 1.7}, {"frequency_penalty": 0.9, "presence_penalty": 0.4, "temperature": 1.0},
    {"frequency_penalty": -1.0}, {"logprobs": 0}, {"logprobs": 3, "repetition_penalty": 3.0, "temperature": 0.3},
]  # fmt: skip


def draw_for(seed: int = 1, **own: Any) -> Draw:
    return Draw(make_params(seed=seed, **own), 0, [*PROMPT, *OUTPUT], len(PROMPT))


def logits_for(count: int, seed: int = 0, vocab_size: int = 300) -> torch.Tensor:
    return torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("seed", range(6))
def test_results_are_the_samplers(seed: int) -> None:
    draws = [draw_for(seed + n, **own) for n, own in enumerate(CONTROLS)]
    logits = logits_for(len(draws), seed)
    want = sample(logits, draws)
    assert draw(logits.clone(), draws).wait() == want
    assert [draw(logits[n : n + 1].clone(), [d]).wait()[0] for n, d in enumerate(draws)] == want


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(st.integers(0, 29), st.floats(-100, 100), max_size=5), st.lists(st.integers(0, 29), max_size=4),
    st.floats(0.1, 4.0), st.floats(-2, 2), st.floats(-2, 2), st.lists(st.integers(0, 29), max_size=20),
)  # fmt: skip
def test_all_edits_together_are_the_samplers(
    bias: dict[int, float], banned: list[int], repetition: float, frequency: float, presence: float, output: list[int]
) -> None:
    params = make_params(
        logit_bias=bias, stop_token_ids=tuple(banned), min_tokens=8, max_tokens=64, repetition_penalty=repetition,
        frequency_penalty=frequency, presence_penalty=presence, temperature=0.8, logprobs=2,
    )  # fmt: skip
    draws = [Draw(params, 0, [1, 2, *output], 2)] * 2
    logits = logits_for(2, len(output), 30)
    assert draw(logits.clone(), draws).wait() == sample(logits, draws)


def test_every_token_banned_bans_none() -> None:
    draws = [draw_for(stop_token_ids=(0, 1, 2), min_tokens=8)]
    assert edits_of(draws, 3, {}).rows.shape == (0,) and edits_of(draws, 4, {}).rows.shape == (3,)


@pytest.mark.parametrize("allowed", [None, b"\x12", bytes([0x80] * 37), bytes([0x81] * 38), bytes([0xF0] * 60)])
@pytest.mark.parametrize("own", CONTROLS)
def test_grammars_are_held_to(allowed: bytes | None, own: dict[str, Any]) -> None:
    """Also where their masks are shorter or longer than the vocabulary, and where bans leave nothing of them."""
    constraint = Constraint(grammar="start: /a*/")
    params = make_params(constraint=constraint, **({"stop_token_ids": (1, 4), "min_tokens": 8} | own))
    draws = [draw_for(), Draw(params, 0, [*PROMPT, *OUTPUT], len(PROMPT), answer=Allows(allowed)), draw_for()]
    logits = logits_for(3)
    assert draw(logits.clone(), draws).wait() == sample(logits, draws)
    assert needs_history(draws[1])


def test_what_is_not_finite_has_no_token() -> None:
    logits = logits_for(4)
    logits[1, 3], logits[2, 250] = torch.nan, torch.inf
    draws = [draw_for(), draw_for(logprobs=2), draw_for(temperature=1.0), draw_for(logprobs=2)]
    drawn = draw(logits, draws).wait()
    assert [token is None for token in drawn] == [False, True, True, False]


def test_tokens_are_filled_in_where_the_next_step_reads_them() -> None:
    pending = draw(logits_for(3), [draw_for()] * 3)
    tokens = [t.token_id for t in pending.wait() if t is not None]
    ids = torch.tensor([11, -3, 12, -1])
    pending.fill_in(ids)
    assert ids.tolist() == [11, tokens[2], 12, tokens[0]]
    draw(logits_for(0), []).fill_in(ids)
    assert ids[0] == 11


def test_only_penalties_need_all_tokens_before() -> None:
    history = [needs_history(draw_for(**own)) for own in CONTROLS]
    assert history == [False] * 6 + [True] * 3 + [False, True]


def test_parameters_are_checked() -> None:
    with pytest.raises(ValueError, match="logit_bias: token id 300"):
        draw(logits_for(1), [draw_for(logit_bias={300: 1.0})])
