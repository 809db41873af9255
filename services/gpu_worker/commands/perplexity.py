"""Perplexity of token ids, counted as llama-perplexity does. Knows no files, no tokenizer and no terminal.

The text is cut into windows that see nothing of each other; of each the second half counts, so that every token that
counts has at least half a window before it. What is left at the end is not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch

from services.gpu_worker.batch import Chunk, EngineInfo, Sequence
from shared.protocol import SamplingParams

ROWS_TOGETHER = 128  # of logits, which are as wide as the vocabulary


class ScoringEngine(Protocol):
    info: EngineInfo

    def logits(self, chunk: Chunk, first: int) -> torch.Tensor: ...


@dataclass
class Perplexity:
    """Of the tokens seen so far, from their negative log-likelihoods."""

    num_tokens: int = 0
    total: float = 0.0
    total_squares: float = 0.0

    def add(self, losses: torch.Tensor) -> None:
        self.num_tokens += losses.numel()
        self.total += float(losses.sum())
        self.total_squares += float((losses * losses).sum())

    @property
    def value(self) -> float:
        return math.exp(self.total / self.num_tokens)

    @property
    def error(self) -> float:
        """One standard error, to first order, as if tokens were independent."""
        mean = self.total / self.num_tokens
        variance = max(0.0, self.total_squares / self.num_tokens - mean * mean)
        return self.value * math.sqrt(variance / max(1, self.num_tokens - 1))


def windows(ids: Seq[int], size: int, bos_token_id: int | None) -> list[list[int]]:
    """Whole windows of `size` ids; BOS, where the model has it added, takes the place of each one's first."""
    cut = [list(ids[i : i + size]) for i in range(0, len(ids) - size + 1, size)]
    return cut if bos_token_id is None else [[bos_token_id, *window[1:]] for window in cut]


def losses(engine: ScoringEngine, window: list[int]) -> torch.Tensor:
    """-log p of the tokens of the second half but its first, float64. Overwrites the first blocks of the pool."""
    num_blocks = -(-len(window) // engine.info.block_size)
    sequence = Sequence(
        sid="window", epoch=1, choice=0, params=SamplingParams(max_tokens=1, temperature=0.0, seed=0),
        num_prompt_tokens=len(window), token_ids=window, block_ids=list(range(num_blocks)),
    )  # fmt: skip
    found = []
    half, end = len(window) // 2, len(window) - 1
    starts = list(range(half, end, ROWS_TOGETHER))
    for start, stop in zip([0, *starts[1:]], [*starts[1:], end], strict=True):
        first = max(half, start)
        rows = engine.logits(Chunk(sequence, start, stop - start, sample=True), first - start)
        targets = torch.tensor(window[first + 1 : stop + 1])
        found.append(-rows.double().log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1))
    return torch.cat(found)
