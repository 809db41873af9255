"""Drafts of every kind for sequences whose answers are known, and running with them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from services.gpu_worker.batch import SampledToken, Sequence
from services.gpu_worker.speculative.draft import ROOT, Draft, chain
from tests.gpu_worker.tiny_models import Runner, next_chunk

MOST_DRAFTS = 6
Guess = Callable[[Sequence, int], Draft]  # (sequence, most drafts)
Answers = Mapping[int, Seq[int]]  # id() of a sequence -> what it draws


def _answer(answers: Answers, seq: Sequence, most: int) -> list[int]:
    return list(answers[id(seq)][seq.num_output_tokens :][:most])


def _right(answers: Answers, vocab_size: int) -> Guess:
    return lambda seq, most: chain(_answer(answers, seq, most))


def _random(answers: Answers, vocab_size: int) -> Guess:
    rng = random.Random(1)
    return lambda seq, most: chain([rng.randrange(vocab_size) for _ in range(rng.randint(0, most))])


def _wrong(answers: Answers, vocab_size: int) -> Guess:
    """Right up to somewhere, then as if one token were another, left out or put in."""
    rng = random.Random(2)

    def guess(seq: Sequence, most: int) -> Draft:
        ids = _answer(answers, seq, most)
        if not ids:
            return chain([])
        at = rng.randrange(len(ids))
        changed = [(ids[at] + 1 + rng.randrange(vocab_size - 1)) % vocab_size]
        rest = rng.choice([[*changed, *ids[at + 1 :]], ids[at + 1 :], [*changed, *ids[at:]]])
        return chain([*ids[:at], *rest][:most])

    return guess


def _random_tree(answers: Answers, vocab_size: int) -> Guess:
    rng = random.Random(3)

    def guess(seq: Sequence, most: int) -> Draft:
        count = rng.randint(0, most)
        return Draft(
            tuple(rng.randrange(vocab_size) for _ in range(count)),
            tuple(rng.randint(ROOT, i - 1) for i in range(count)),
        )

    return guess


def _right_tree(answers: Answers, vocab_size: int) -> Guess:
    """As many right tokens as fit between others: guesses beside them, behind those, and the right one twice."""
    rng = random.Random(4)

    def guess(seq: Sequence, most: int) -> Draft:
        ids: list[int] = []
        parents: list[int] = []
        right = [ROOT]  # places
        answer = _answer(answers, seq, most)
        while len(ids) < most:
            kind = rng.choice(("right", "beside", "behind"))
            if kind == "right" and len(right) <= len(answer):
                parents.append(right[-1])
                ids.append(answer[len(right) - 1])
                right.append(len(ids) - 1)
            else:
                parents.append(rng.choice(right) if kind == "beside" else rng.randint(ROOT, len(ids) - 1))
                ids.append(rng.choice([*answer, rng.randrange(vocab_size)]))
        return Draft(tuple(ids), tuple(parents))

    return guess


def _late_tree(answers: Answers, vocab_size: int) -> Guess:
    """The right tokens come last, behind wrong ones of all depths: where they are accepted, all of them must move."""

    def guess(seq: Sequence, most: int) -> Draft:
        right = _answer(answers, seq, most // 2)
        wrong = [(token_id + 1) % vocab_size for token_id in _answer(answers, seq, most - len(right))]
        num = len(wrong)
        return Draft(
            (*wrong, *right), (*range(ROOT, num - 1), *((ROOT if i == 0 else num + i - 1) for i in range(len(right))))
        )

    return guess


CHAINS: dict[str, Callable[[Answers, int], Guess]] = {"right": _right, "random": _random, "wrong": _wrong}
TREES: dict[str, Callable[[Answers, int], Guess]] = {
    "right tree": _right_tree, "random tree": _random_tree, "late tree": _late_tree,
}  # fmt: skip


def run_with_drafts(
    runner: Runner, sequences: Seq[Sequence], guess: Guess, prefill_chunk: int
) -> tuple[list[list[SampledToken]], int]:
    """As `Runner.run`, with drafts wherever a token is drawn; how many steps that took."""
    results: dict[int, list[SampledToken]] = {id(s): [] for s in sequences}
    num_steps = 0
    while unfinished := [s for s in sequences if s.num_output_tokens < s.params.max_tokens]:
        chunks = [next_chunk(s, prefill_chunk) for s in unfinished]
        for i, chunk in enumerate(chunks):
            if chunk.sample:
                most = min(MOST_DRAFTS, chunk.seq.params.max_tokens - chunk.seq.num_output_tokens - 1)
                chunks[i] = replace(chunk, draft=guess(chunk.seq, most))
        for chunk, tokens in zip(chunks, runner.step(chunks), strict=True):
            results[id(chunk.seq)] += tokens
        num_steps += 1
    return [results[id(s)] for s in sequences], num_steps


def run_in_batches(
    runner: Runner, sequences: Seq[Sequence], guess: Guess, batch: int
) -> tuple[list[list[SampledToken]], int]:
    """As `run_with_drafts`, so many sequences at once."""
    results: list[list[SampledToken]] = []
    num_steps = 0
    for first in range(0, len(sequences), batch):
        drawn, steps = run_with_drafts(runner, sequences[first : first + batch], guess, prefill_chunk=23)
        results += drawn
        num_steps += steps
    return results, num_steps
