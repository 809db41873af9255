"""Decides what each step drafts, and learns from what came of it. *Pure.*

Every sequence has a proposer, which reads its text, and an estimate of how often that is right. What is drafted for
all of them together is what makes most tokens a second expected, by what steps have cost (see `choice`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from services.gpu_worker.batch import Chunk, Drawn, Sequence
from services.gpu_worker.speculative.acceptance import Acceptance
from services.gpu_worker.speculative.choice import choose_lengths
from services.gpu_worker.speculative.ngram import NgramProposer
from services.gpu_worker.speculative.proposer import NOTHING, Proposal, Proposer
from services.gpu_worker.speculative.row_cost import RowCost
from services.gpu_worker.speculative.suffix import SuffixProposer
from shared.speculative_config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig

WORKER_SHARE_KEPT = 0.99  # of what the worker has counted, with one more
READ_TOKENS = 1024  # of a sequence before one step: reading takes some microseconds a token


@dataclass(slots=True)
class _Guided:
    """A sequence as far as it has been read."""

    seq: Sequence
    proposer: Proposer
    acceptance: Acceptance
    num_read: int = 0

    def catch_up(self) -> bool:
        """Reads on; whether that is all there is. What is drawn shows how good the proposer is."""
        seq, propose, append = self.seq, self.proposer.propose, self.proposer.append
        end = min(len(seq.token_ids), self.num_read + READ_TOKENS)
        for position in range(self.num_read, end):
            token_id = seq.token_ids[position]
            if position >= seq.num_prompt_tokens and (guess := propose(1)).ids:
                self.acceptance.observe(guess.strength, guess.ids[0] == token_id)
            append(token_id)
        self.num_read = end
        return end == len(seq.token_ids)


@dataclass(slots=True)
class Counts:
    """Since the start of the process. num_drafts: times that a sequence had some; accepted: by position, from 0 on."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted: Counter[int] = field(default_factory=Counter)


class Speculator:
    """A `Drafter`. cost: what is known of steps already."""

    def __init__(self, config: SpeculativeConfig, cost: RowCost | None = None) -> None:
        self.method = config.method
        self.counts = Counts()
        self._config = config
        self._cost = cost or RowCost()
        self._acceptance = Acceptance(share_kept=WORKER_SHARE_KEPT)
        self._guided: dict[str, _Guided] = {}

    def draft(self, chunks: Seq[Chunk], most: Seq[int], num_free: int) -> list[tuple[int, ...]]:
        proposals, survivals = [], []
        for chunk, allowed in zip(chunks, most, strict=True):
            proposal, survival = self._propose(chunk.seq, allowed)
            proposals.append(proposal)
            survivals.append(survival)
        if not any(survivals):
            return [()] * len(chunks)
        num_sampled, num_rows = sum(c.sample for c in chunks), sum(c.count for c in chunks)
        lengths = choose_lengths(survivals, num_sampled, num_rows, num_free, self._cost.relative)
        return [proposal.ids[:length] for proposal, length in zip(proposals, lengths, strict=True)]

    def expects(self, sequences: Iterable[Sequence]) -> bool:
        """Would there be drafts, if what is being drawn for these were what is expected?"""
        survivals = []
        for seq in sequences:
            survivals.append(self._propose(seq, MAX_SPECULATIVE_TOKENS)[1][1:])
        if not any(survivals):
            return False
        count = len(survivals)
        return any(choose_lengths(survivals, count, count, sum(map(len, survivals)), self._cost.relative))

    def observe(self, chunks: Seq[Chunk], drawn: Seq[Drawn], seconds: float) -> None:
        """What a step has drawn, and how long it took."""
        if all(c.sample and c.count == 1 for c in chunks):
            self._cost.observe(sum(c.num_rows for c in chunks), seconds)
        for chunk, tokens in zip(chunks, drawn, strict=True):
            if chunk.draft_ids:
                self.counts.num_drafts += 1
                self.counts.num_draft_tokens += len(chunk.draft_ids)
                self.counts.accepted.update(range(len(tokens) - 1))

    def forget(self, seq: Sequence) -> None:
        """It has left."""
        self._guided.pop(seq.sid, None)

    def _propose(self, seq: Sequence, allowed: int) -> tuple[Proposal, list[float]]:
        """With the chance of each draft that it and all before it are right."""
        asked = seq.params.num_speculative_tokens
        most = self._config.num_speculative_tokens if asked is None else min(asked, self._config.num_speculative_tokens)
        if most == 0:
            return NOTHING, []
        guided = self._guide(seq)
        proposal = guided.proposer.propose(min(allowed, most)) if guided.catch_up() else NOTHING
        max_strength = guided.proposer.max_strength
        return proposal, guided.acceptance.survival(proposal.strength, len(proposal.ids), max_strength)

    def _guide(self, seq: Sequence) -> _Guided:
        guided = self._guided.get(seq.sid)
        if guided is None or guided.seq is not seq:
            guided = _Guided(seq, self._new_proposer(), Acceptance(self._acceptance))
            self._guided[seq.sid] = guided
        return guided

    def _new_proposer(self) -> Proposer:
        if self._config.method == "ngram":
            return NgramProposer(self._config.prompt_lookup_min, self._config.prompt_lookup_max)
        return SuffixProposer()
