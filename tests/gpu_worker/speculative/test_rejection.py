"""50,000 draws over 16 tokens against the target's exact distribution; and what equal noise accepts beside it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kernels.gumbel import NoiseKey
from kernels.gumbel_argmax import gumbel_argmax
from services.gpu_worker.speculative.rejection import Floats, Ids, draw, verify_chain, verify_children, verify_token

NUM_DRAWS = 50_000
NUM_TOKENS = 16
START = 3
Drawn = tuple[Ids, Ids]  # two tokens a row
Draw = Callable[[Floats, Floats, np.random.Generator], Drawn]


def models(seed: int, closeness: float) -> tuple[Floats, Floats]:
    """What the target draws after each token, and what the draft model does. closeness 1: the same."""
    rng = np.random.default_rng(seed)
    logits, others = rng.normal(0.0, 1.5, (2, NUM_TOKENS, NUM_TOKENS))
    return softmax(logits), softmax(closeness * logits + (1 - closeness) * others)


def softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def by_chain(p: Floats, q: Floats, rng: np.random.Generator) -> Drawn:
    """Two drafts; where less than two tokens come of them, another step goes on behind those."""
    last = np.full(NUM_DRAWS, START)
    first, second = step_of_chain(p, q, rng, last)
    again, _ = step_of_chain(p, q, rng, first)
    return first, np.where(second < 0, again, second)


def step_of_chain(p: Floats, q: Floats, rng: np.random.Generator, last: Ids) -> Drawn:
    one = draw(q[last], rng.random(NUM_DRAWS))
    two = draw(q[one], rng.random(NUM_DRAWS))
    tokens = verify_chain([p[last], p[one], p[two]], [q[last], q[one]], [one, two], rng.random((NUM_DRAWS, 6)))
    assert ((tokens[1] >= 0) <= (tokens[0] == one)).all() and ((tokens[2] >= 0) <= (tokens[1] == two)).all()
    return tokens[0], tokens[1]


def by_tree(p: Floats, q: Floats, rng: np.random.Generator) -> Drawn:
    """Three drafts, and two behind each of them; where none is accepted, a step goes on behind the token drawn."""
    last = np.full(NUM_DRAWS, START)
    first, child = step_of_tree(p, q, rng, last, 3)
    assert set(child.tolist()) == ({0} if np.array_equal(p, q) else {-1, 0, 1, 2})
    return first, step_of_tree(p, q, rng, first, 2)[0]


def step_of_tree(p: Floats, q: Floats, rng: np.random.Generator, last: Ids, num: int) -> Drawn:
    drafts = [draw(q[last], rng.random(NUM_DRAWS)) for _ in range(num)]
    return verify_children(p[last], q[last], drafts, rng.random((NUM_DRAWS, num + 1)))


def by_mistake(p: Floats, q: Floats, rng: np.random.Generator) -> Drawn:
    """What is rejected is drawn from the whole of p: a common fault."""
    last = np.full(NUM_DRAWS, START)
    tokens = []
    for _ in range(2):
        draft = draw(q[last], rng.random(NUM_DRAWS))
        accepted, _ = verify_token(p[last], q[last], draft, rng.random(NUM_DRAWS))
        last = np.where(accepted, draft, draw(p[last], rng.random(NUM_DRAWS)))
        tokens.append(last)
    return tokens[0], tokens[1]


def is_the_targets(p: Floats, drawn: Drawn) -> bool:
    """Chi-square over pairs, and over the first tokens, at one in 30,000; cells of few are put together."""
    pairs = (p[START][:, None] * p).reshape(-1)
    counts = np.bincount(drawn[0] * NUM_TOKENS + drawn[1], minlength=NUM_TOKENS**2)
    firsts = np.bincount(drawn[0], minlength=NUM_TOKENS)
    return fits(counts, NUM_DRAWS * pairs) and fits(firsts, NUM_DRAWS * p[START])


def fits(counts: Ids, expected: Floats) -> bool:
    rare = expected < 5.0
    counts, expected = (np.append(a[~rare], a[rare].sum()) for a in (counts, expected))
    kept = expected > 0.0
    freedom = kept.sum() - 1
    statistic = (((counts - expected) ** 2)[kept] / expected[kept]).sum()
    # Wilson and Hilferty: the cube root is nearly normal, and 4.0 of its deviations are exceeded once in 30,000
    return bool((statistic / freedom) ** (1 / 3) < 1 - 2 / (9 * freedom) + 4.0 * (2 / (9 * freedom)) ** 0.5)


@pytest.mark.parametrize("closeness", [0.0, 0.6, 0.95, 1.0])
@pytest.mark.parametrize("way", [by_chain, by_tree])
def test_what_comes_out_is_distributed_as_the_target(way: Draw, closeness: float) -> None:
    p, q = models(1, closeness)
    assert is_the_targets(p, way(p, q, np.random.default_rng(2)))


@pytest.mark.parametrize("closeness", [0.0, 0.6])
def test_a_faulty_way_is_seen(closeness: float) -> None:
    p, q = models(1, closeness)
    assert not is_the_targets(p, by_mistake(p, q, np.random.default_rng(2)))


@pytest.mark.parametrize("way", [by_chain, by_tree])
def test_tokens_that_either_model_excludes(way: Draw) -> None:
    p, q = models(4, 0.5)
    for model, excluded in ((p, slice(0, 5)), (q, slice(3, 9))):
        model[:, excluded] = 0.0
        model /= model.sum(axis=1, keepdims=True)
    drawn = way(p, q, np.random.default_rng(5))
    assert is_the_targets(p, drawn) and drawn[0].min() >= 5 and drawn[1].min() >= 5


def test_a_chain_that_is_right_is_accepted_whole() -> None:
    p, _ = models(1, 1.0)
    rng = np.random.default_rng(3)
    first, second = step_of_chain(p, p, rng, np.full(NUM_DRAWS, START))
    assert (first >= 0).all() and (second >= 0).all()


def test_equal_noise_accepts_nearly_as_much() -> None:
    """Which share of drafts is accepted: one less the distance of the two, against that of drawing both with the same
    noise, which lies between (1 - d) / (1 + d) and 1 - d."""
    p, q = models(6, 0.9)
    rng, last = np.random.default_rng(7), np.full(NUM_DRAWS, START)
    draft = draw(q[last], rng.random(NUM_DRAWS))
    by_rejection = verify_token(p[last], q[last], draft, rng.random(NUM_DRAWS))[0].mean()
    distance = 0.5 * np.abs(p[START] - q[START]).sum()
    keys = [NoiseKey(seed, 0, 0) for seed in range(8000)]
    one, other = (gumbel_argmax(torch.from_numpy(np.log(m[START])).float().repeat(len(keys), 1), keys) for m in (p, q))
    by_noise = np.mean([a == b for a, b in zip(one, other, strict=True)])
    assert by_rejection == pytest.approx(1 - distance, abs=0.01)
    assert (1 - distance) / (1 + distance) - 0.01 < by_noise < by_rejection
