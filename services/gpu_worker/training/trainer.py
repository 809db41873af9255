"""Fits heads to what their target foresees: loss, held-out acceptance, and the state that a later run goes on from.

Labels are the target's distribution over the draft vocabulary, at temperature 1. The learning rate falls in a line to
nothing as the time that was given runs out. Knows no files of models.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from services.gpu_worker.model.rope import Tables
from services.gpu_worker.training.corpus import Example
from services.gpu_worker.training.eagle import EagleHead, passes_of
from services.gpu_worker.training.medusa import MedusaHeads

LEARNING_RATE = 1e-3
WARM_UP_STEPS = 40
MOST_NORM = 1.0  # of a gradient
LATER = 0.8  # weight of each place's loss, by that of the one before
BATCH = 2  # texts: many small steps learn more of a short time than few large ones
PLACES = 5  # whose acceptance is told


@dataclass(frozen=True, slots=True)
class Target:
    """What heads take over from the model that they draft for. token_ids: of the draft vocabulary, ascending; lm_head:
    their rows; final_norm: what is before it."""

    embedding: torch.Tensor
    lm_head: torch.Tensor
    token_ids: torch.Tensor
    angles: Tables
    final_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """T places of each text: a place's next token is known, and foreseen are those behind it. draft_ids: what the token
    after the next is in the draft vocabulary, -1 where it is not there or nothing is to be learnt."""

    embeds: torch.Tensor  # [B, T, hidden_size] of the next token
    taps: torch.Tensor  # [B, T, taps * hidden_size]
    final: torch.Tensor  # [B, T, hidden_size]: what the output head reads, a place later
    draft_ids: torch.Tensor  # [B, T]


class Batcher:
    def __init__(self, target: Target, device: torch.device) -> None:
        self._target = target
        self._device = device
        self._draft_id = torch.full((len(target.embedding),), -1)
        self._draft_id[target.token_ids] = torch.arange(len(target.token_ids))

    def batch(self, examples: Seq[Example]) -> Batch:
        length = max(len(e.text.token_ids) for e in examples) - 2
        size, layers = examples[0].rows.shape[2], examples[0].rows.shape[1]
        ids = torch.zeros(len(examples), length + 2, dtype=torch.long)
        rows = torch.zeros(len(examples), length + 2, layers, size)
        learnt = torch.zeros(len(examples), length + 2, dtype=torch.bool)
        for i, example in enumerate(examples):
            count = len(example.text.token_ids)
            ids[i, :count] = torch.tensor(example.text.token_ids)
            rows[i, :count] = example.rows.float()
            learnt[i, example.text.num_prompt_tokens : count] = True
        draft_ids = torch.where(learnt, self._draft_id[ids], -1)[:, 2:]
        parts = (self._target.embedding[ids[:, 1:-1]], rows[:, :-2, : max(1, layers - 1)].flatten(2),
                 rows[:, 1:-1, -1], draft_ids)  # fmt: skip
        return Batch(*(part.to(self._device) for part in parts))


Logits = Iterator[tuple[int, torch.Tensor, torch.Tensor]]


def foreseen(head: nn.Module, batch: Batch, angles: Tables, places: int) -> Iterator[tuple[torch.Tensor, int]]:
    """For each place behind the next token: rows [B, T, ...] that `logits_at` takes, and by how many places what row t
    foresees lies behind token t + 2."""
    if isinstance(head, MedusaHeads):
        yield from ((batch.taps, number) for number in range(min(places, head.config.num_heads)))
    else:
        assert isinstance(head, EagleHead)
        yield from ((rows, 0) for rows in passes_of(head, batch.embeds, batch.taps, angles, places))


def logits_at(head: nn.Module, rows: torch.Tensor, place: int) -> torch.Tensor:
    if isinstance(head, MedusaHeads):
        return head.logits(rows, place)
    assert isinstance(head, EagleHead)
    return head.logits(rows)


def loss_of(head: nn.Module, batch: Batch, target: Target, places: int) -> torch.Tensor:
    total, weights = torch.zeros(()), 0.0
    lm_head = target.lm_head.to(batch.final.device)
    labels, known = torch.zeros(()), -1
    for place, (rows, behind) in enumerate(foreseen(head, batch, target.angles, places)):
        length = batch.draft_ids.shape[1] - behind
        wanted = batch.draft_ids[:, behind:] >= 0
        if behind != known:  # all passes of an EAGLE head foresee the same tokens
            with torch.no_grad():
                labels, known = F.linear(batch.final[:, behind:][wanted], lm_head).float().softmax(-1), behind
        foretold = logits_at(head, rows[:, :length][wanted], place).float().log_softmax(-1)
        weight = LATER**place
        total = total - weight * (labels * foretold).sum(-1).mean()
        weights += weight
    return total / weights


@torch.no_grad()
def hits_of(head: nn.Module, batch: Batch, target: Target, places: int) -> list[torch.Tensor]:
    """bool [B, T] for each place p: is what a chain foresees p places behind token t + 2 what came? Row t of all of
    them belongs to one chain."""
    found = []
    for place, (rows, behind) in enumerate(foreseen(head, batch, target.angles, places)):
        guesses = logits_at(head, rows, place).argmax(-1)
        length = batch.draft_ids.shape[1] - place
        shift = place - behind  # row t + shift of this pass foresees that token
        found.append(F.pad(guesses[:, shift : shift + length] == batch.draft_ids[:, place:], (0, place)))
    return found


class Acceptance:
    """How often a chain's draft at each place is right, where all before it were. Of texts at temperature 0."""

    def __init__(self) -> None:
        self._tried: Counter[int] = Counter()
        self._right: Counter[int] = Counter()

    def add(self, hits: Seq[torch.Tensor], counted: torch.Tensor) -> None:
        alive = counted
        for place, hit in enumerate(hits):
            alive = alive & F.pad(counted[:, place:], (0, place))
            self._tried[place] += int(alive.sum())
            alive = alive & hit
            self._right[place] += int(alive.sum())

    @property
    def shares(self) -> list[float]:
        return [self._right[place] / max(1, self._tried[place]) for place in sorted(self._tried)]


@torch.no_grad()
def measure(head: nn.Module, examples: Seq[Example], target: Target, batcher: Batcher) -> list[float]:
    found = Acceptance()
    for group in _grouped(examples):
        batch = batcher.batch(group)
        answers = torch.zeros_like(batch.draft_ids, dtype=torch.bool)
        for i, example in enumerate(group):
            text = example.text
            answers[i, max(0, text.num_prompt_tokens - 2) : len(text.token_ids) - 2] = True
        found.add(hits_of(head, batch, target, PLACES), answers)
    return found.shares


def _grouped(examples: Seq[Example]) -> Iterator[Seq[Example]]:
    for first in range(0, len(examples), BATCH):
        yield examples[first : first + BATCH]


class Trainer:
    """places: how many drafts in a row the head learns to make."""

    def __init__(self, head: nn.Module, target: Target, batcher: Batcher, places: int, seed: int) -> None:
        self.head = head
        self.num_steps = 0
        self.optimizer = torch.optim.AdamW(head.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self._target = target
        self._batcher = batcher
        self._places = places
        self._seed = seed

    def run(self, examples: Seq[Example], time_left: Callable[[], float], told: Callable[[float], None]) -> None:
        """Steps until nothing of the time is left; time_left: its share. told: the loss of each."""
        while time_left() > 0:
            for group in self._epoch(examples):
                if time_left() <= 0:
                    return
                told(self.step(group, time_left()))

    def _epoch(self, examples: Seq[Example]) -> Iterator[Seq[Example]]:
        """In an order of its own, texts of similar length together."""
        rng = random.Random(f"{self._seed} {self.num_steps}")
        shuffled = rng.sample(list(examples), len(examples))
        groups: list[Seq[Example]] = []
        for first in range(0, len(shuffled), 16 * BATCH):
            near = sorted(shuffled[first : first + 16 * BATCH], key=lambda e: len(e.text.token_ids))
            groups += _grouped(near)
        rng.shuffle(groups)
        return iter(groups)

    def step(self, group: Seq[Example], time_left: float) -> float:
        rate = LEARNING_RATE * min(time_left, (self.num_steps + 1) / WARM_UP_STEPS)
        for each in self.optimizer.param_groups:
            each["lr"] = rate
        batch = self._batcher.batch(group)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(batch.embeds.device.type, torch.bfloat16):
            loss = loss_of(self.head, batch, self._target, self._places)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.head.parameters(), MOST_NORM)
        self.optimizer.step()
        self.num_steps += 1
        return loss.item()


def frequent_tokens(texts: Seq[Seq[int]], count: int, vocab_size: int) -> torch.Tensor:
    """The most frequent ones, ascending; filled up with those of the lowest ids."""
    found = [token for token, _ in Counter(itertools.chain.from_iterable(texts)).most_common(count)]
    rest = (token for token in range(vocab_size) if token not in set(found))
    return torch.tensor(sorted([*found, *itertools.islice(rest, count - len(found))]))
