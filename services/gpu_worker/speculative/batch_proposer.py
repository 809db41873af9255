"""What guesses by computing, for all sequences of a step at once: a model, or heads on one."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol, runtime_checkable

from services.gpu_worker.batch import Sequence
from services.gpu_worker.speculative.proposer import Proposal

HELD_UP = 8.0  # times what guessing was expected to take


@runtime_checkable
class BatchProposer(Protocol):
    """One a worker. It keeps state of its own of each sequence, as far as that is computed, under the sequence's block
    ids. All calls come from the engine's thread."""

    max_drafts: int  # of a sequence at once

    def num_behind(self, seq: Sequence) -> int:
        """How many of its tokens are to be computed before any can be guessed: 1 where it keeps up."""
        ...

    def seconds(self, num_sequences: int, num_drafts: int) -> float:
        """What guessing so many tokens for each of so many sequences takes, by what was measured."""
        ...

    def catch_up_seconds(self, num_tokens: int) -> float:
        """What computing so many tokens takes that are behind."""
        ...

    def propose(self, sequences: Seq[Sequence], most: Seq[int], num_tokens: int) -> list[Proposal]:
        """At most `most` drafts of each, of what comes after its tokens, which are all known. Where one is behind, it
        catches up: by num_tokens for all together, those first that lack the least; who still lacks some has no drafts.
        Writes KV into slots of its blocks up to its last draft but one. Does not modify sequences."""
        ...

    def forget(self, seq: Sequence) -> None:
        """It has left; nothing was proposed since."""
        ...


@runtime_checkable
class RowReader(BatchProposer, Protocol):
    """Guesses from what the target's layers read for each token. wants: is that to be kept for a sequence? wants_any:
    for any? One of which something was not kept is read anew from there on."""

    wants: Callable[[Sequence], bool]
    wants_any: Callable[[], bool]


def most_seconds(proposer: BatchProposer, sequences: Seq[Sequence], counts: Seq[int], num_tokens: int) -> float:
    """That guessing takes unless something else holds it up; num_tokens: that it catches up with at most."""
    num_behind = sum(max(0, proposer.num_behind(seq) - 1) for seq in sequences)
    catch_up_s = proposer.catch_up_seconds(min(num_behind, num_tokens)) if num_behind else 0.0
    return HELD_UP * (proposer.seconds(len(sequences), max(counts)) + catch_up_s) or float("inf")
