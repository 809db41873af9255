"""Drafts of every kind for sequences whose answers are known, and running with them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from services.gpu_worker.batch import SampledToken, Sequence
from tests.gpu_worker.tiny_models import Runner, next_chunk

MOST_DRAFTS = 6
Guess = Callable[[Sequence, int], list[int]]  # (sequence, most drafts) -> drafts
Answers = Mapping[int, Seq[int]]  # id() of a sequence -> what it draws


def _right(answers: Answers, vocab_size: int) -> Guess:
    return lambda seq, most: list(answers[id(seq)][seq.num_output_tokens :][:most])


def _random(answers: Answers, vocab_size: int) -> Guess:
    rng = random.Random(1)
    return lambda seq, most: [rng.randrange(vocab_size) for _ in range(rng.randint(0, most))]


def _wrong(answers: Answers, vocab_size: int) -> Guess:
    """Right up to somewhere, then as if one token were another, left out or put in."""
    rng, right = random.Random(2), _right(answers, vocab_size)

    def guess(seq: Sequence, most: int) -> list[int]:
        ids = right(seq, most)
        if not ids:
            return []
        at = rng.randrange(len(ids))
        changed = [(ids[at] + 1 + rng.randrange(vocab_size - 1)) % vocab_size]
        rest = rng.choice([[*changed, *ids[at + 1 :]], ids[at + 1 :], [*changed, *ids[at:]]])
        return [*ids[:at], *rest][:most]

    return guess


GUESSES: dict[str, Callable[[Answers, int], Guess]] = {"right": _right, "random": _random, "wrong": _wrong}


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
                chunks[i] = replace(chunk, draft_ids=tuple(guess(chunk.seq, most)))
        for chunk, tokens in zip(chunks, runner.step(chunks), strict=True):
            results[id(chunk.seq)] += tokens
        num_steps += 1
    return [results[id(s)] for s in sequences], num_steps
