"""A draft model whose vocabulary is another one: its tokens by the ids of the target's that stand for the same text.

Everything outside speaks the target's ids, the draws too: the model's logits are put where their tokens have a place
in the target's vocabulary, and drawn from as the target draws. So its tokens that have none are never proposed, and
controls and noise are those of the very tokens that the target would draw. A token that it does not have is read as
another one, which makes what it guesses behind it worse, and nothing wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from services.gpu_worker.batch import Chunk, Drawn, Engine, SampledToken
from services.gpu_worker.model.config import ConfigError
from services.gpu_worker.sampler import Draw, sample
from services.gpu_worker.speculative.verify import draws_of
from shared.vocabulary import Vocabulary

CPU = torch.device("cpu")
DrawTokens = Callable[[torch.Tensor, Seq[Draw]], Seq[SampledToken | None]]  # None where logits are not finite
MIN_SHARE = 0.5  # of the draft model's tokens


@dataclass(frozen=True, slots=True)
class VocabMap:
    """draft_ids: of each of the target's tokens, 0 for those that the draft model does not have. shared: pairs of the
    ids of a token that both have, the target's first."""

    draft_ids: list[int]
    shared: tuple[tuple[int, int], ...]


def map_vocabularies(target: Vocabulary, draft: Vocabulary, vocab_size: int, draft_size: int) -> VocabMap | None:
    """None where the ids mean the same; sizes are the models'. ConfigError where too little is shared."""
    named, own = target.tokens[:vocab_size], draft.tokens[:draft_size]
    if vocab_size == draft_size and named == own:
        return None
    ids = {_name(draft, i): i for i in reversed(range(len(own))) if own[i]}
    found = [ids.get(_name(target, i), -1) if named[i] else -1 for i in range(len(named))]
    shared = tuple((i, draft_id) for i, draft_id in enumerate(found) if draft_id >= 0)
    if len(shared) < MIN_SHARE * len(ids):
        raise ConfigError(
            f"speculative_config: model: {len(shared)} of its {len(ids)} tokens are in the served model's vocabulary, "
            "which is too few to guess with"
        )
    return VocabMap([max(0, i) for i in found] + [0] * (vocab_size - len(found)), shared)


def _name(vocabulary: Vocabulary, token_id: int) -> tuple[bytes, bool]:
    return vocabulary.tokens[token_id], token_id in vocabulary.special_ids


class LogitsEngine(Engine, Protocol):
    def sample_logits(self, chunks: Seq[Chunk]) -> tuple[Seq[int], torch.Tensor]:
        """A step that draws nothing: the numbers of the chunks that it would have drawn for, and float32 logits of
        each, until the next call."""
        ...


class MappedEngine:
    """An engine of the target's vocabulary on one of another. device: where its logits are, of which draw draws."""

    def __init__(
        self, engine: LogitsEngine, mapped: VocabMap, device: torch.device = CPU, draw: DrawTokens = sample
    ) -> None:
        self.info = replace(engine.info, vocab_size=len(mapped.draft_ids))
        self._engine = engine
        self._device = device
        self._draw = draw
        self._draft_ids = mapped.draft_ids
        self._places, self._sources = torch.tensor(mapped.shared, dtype=torch.int64).T.to(device)

    def step(self, chunks: Seq[Chunk]) -> list[Drawn]:
        numbers, logits = self._engine.sample_logits([self._translated(c) for c in chunks])
        rows = torch.full((len(numbers), self.info.vocab_size), -torch.inf, device=self._device)
        rows[:, self._places] = logits[:, self._sources]
        drawn: list[Drawn] = [()] * len(chunks)
        for number, token in zip(numbers, self._draw(rows, draws_of(chunks, numbers)), strict=True):
            drawn[number] = () if token is None else (token,)
        return drawn

    def _translated(self, chunk: Chunk) -> Chunk:
        ids = self._draft_ids
        seq = chunk.seq
        return replace(chunk, seq=replace(seq, token_ids=[ids[t] for t in seq.token_ids]))
