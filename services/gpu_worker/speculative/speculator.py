"""Decides what each step drafts, and learns from what came of it. *Pure.*

Every sequence has proposers, which read its text: one that looks in it, and one that looks in the fleet's statistics
where there are some. Each has an estimate of its own of how often it is right, and the one that promises more is heard.
What is drafted for all sequences together is what makes most tokens a second expected, by what steps have cost (see
`choice`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from services.gpu_worker.batch import Chunk, Drawn, Sequence
from services.gpu_worker.speculative.acceptance import Acceptance
from services.gpu_worker.speculative.choice import choose_fairly
from services.gpu_worker.speculative.fleet import METHOD as FLEET
from services.gpu_worker.speculative.fleet import Fleet, expected_of, is_shared
from services.gpu_worker.speculative.ngram import NgramProposer
from services.gpu_worker.speculative.proposer import NOTHING, Proposal, Proposer, TextProposer
from services.gpu_worker.speculative.row_cost import RowCost
from services.gpu_worker.speculative.suffix import SuffixProposer
from shared.speculative_config import SpeculativeConfig

WORKER_SHARE_KEPT = 0.99  # of what the worker has counted, with one more
READ_TOKENS = 2048  # of all sequences before one step: reading takes some microseconds a token
HELD_TOKENS = 128  # that a sequence draws without drafts after a step with some has failed
PLAIN_STEPS_SEEN = 4  # one of so many
MAX_NAP_TOKENS = 8  # that a sequence draws unread while guesses are worth little: asking takes a hundredth of a step
NAP_EVERY = 4  # times that they were, its naps become one token longer
WORTH_WAKING = 0.25  # of a token, that drafts are expected to bring in a step
MAX_INDEXED_TOKENS = 1 << 16  # of a sequence, which has no drafts from then on
MAX_ALL_INDEXED_TOKENS = 1 << 18  # of all together: the longest gives its own up


@dataclass(slots=True)
class _Source:
    """A proposer, and how often it is right for its sequence."""

    method: str
    proposer: Proposer
    acceptance: Acceptance


@dataclass(slots=True)
class _Guided:
    """A sequence as far as it has been read."""

    seq: Sequence
    own_text: TextProposer
    sources: list[_Source]
    method: str  # of the latest proposal
    num_read: int = 0
    num_skipped: int = 0  # of a long prompt's first tokens
    is_given_up: bool = False
    held_until: int = 0  # it has so many tokens
    naps_until: int = 0  # likewise
    num_idle: int = 0  # times in a row that its guesses were worth little

    def weigh(self, num_expected: float) -> None:
        """What its drafts are expected to bring: of one that they bring little it is asked less often."""
        if self.num_unread:
            return
        self.num_idle = 0 if num_expected >= WORTH_WAKING else self.num_idle + 1
        nap = min(MAX_NAP_TOKENS, self.num_idle // NAP_EVERY)
        self.naps_until = len(self.seq.token_ids) + 1 + nap if nap else 0

    @property
    def num_indexed(self) -> int:
        return 0 if self.is_given_up else self.num_read - self.num_skipped

    @property
    def num_unread(self) -> int:
        return len(self.seq.token_ids) + len(self.seq.prediction) - self.num_read

    def read(self, most: int) -> int:
        """Reads on, prompt, prediction, output, so many tokens at most; how many. What is drawn shows how good the
        proposers are."""
        seq, own_text = self.seq, self.own_text
        num_prompt, num_predicted = seq.num_prompt_tokens, len(seq.prediction)
        count = min(self.num_unread, most)
        for at in range(self.num_read, self.num_read + count):
            if num_prompt <= at < num_prompt + num_predicted:
                own_text.append(seq.prediction[at - num_prompt])
                if at == num_prompt + num_predicted - 1:
                    own_text.expect(num_predicted)
                continue
            is_drawn = at >= num_prompt
            token_id = seq.token_ids[at - num_predicted] if is_drawn else seq.token_ids[at]
            for source in self.sources:
                if is_drawn and (guess := source.proposer.propose(1)).ids:
                    source.acceptance.observe(guess.strengths[0], guess.ids[0] == token_id)
                source.proposer.append(token_id)
        self.num_read += count
        return count


@dataclass(slots=True)
class Counts:
    """Since the start of the process. num_drafts: times that a sequence had some; accepted: by position, from 0 on;
    saved_s: that steps without would have taken longer for the same tokens."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    saved_s: float = 0.0
    accepted: Counter[int] = field(default_factory=Counter)


def saved_s(cost: RowCost, num_rows: int, drawn: Seq[Drawn], seconds: float) -> float:
    """How much longer steps without drafts would have taken for what one of so many rows has drawn."""
    if seconds <= 0.0 or num_rows == len(drawn):
        return 0.0
    return cost.seconds(len(drawn)) * sum(map(len, drawn)) / len(drawn) - seconds


class Speculator:
    """A `Drafter`. cost: what is known of steps already. max_step_s: drafts make no step longer, for those that have
    none. fleet: what workers have told each other, if they do. counts: by method."""

    def __init__(
        self, config: SpeculativeConfig, cost: RowCost | None = None, *, max_step_s: float = float("inf"),
        fleet: Fleet | None = None,
    ) -> None:  # fmt: skip
        self.fleet = fleet
        self.counts = {method: Counts() for method in (config.method, *([FLEET] if fleet else []))}
        self._config = config
        self._cost = cost or RowCost()
        self._max_step_s = max_step_s
        self._acceptances = {
            config.method: Acceptance(share_kept=WORKER_SHARE_KEPT),
            FLEET: Acceptance(share_kept=WORKER_SHARE_KEPT, unknown=expected_of),
        }
        self._guided: dict[str, _Guided] = {}
        self._drafted: list[_Guided] = []  # in the latest step
        self._num_steps = 0
        self._methods: dict[str, str] = {}  # that they are drafted by

    def plan(self, chunks: Seq[Chunk], most: Seq[int], num_free: int) -> list[int]:
        return [0] * len(chunks)

    def think(self) -> None:
        return

    def draft(self, chunks: Seq[Chunk], most: Seq[int], num_free: int) -> list[tuple[int, ...]]:
        self._drafted = []
        if not any(self._is_awake(c.seq) for c in chunks):
            return [()] * len(chunks)
        self._read([c.seq for c in chunks])
        proposals, survivals = [], []
        for chunk, allowed in zip(chunks, most, strict=True):
            proposal, survival = self._propose(chunk.seq, allowed)
            proposals.append(proposal)
            survivals.append(survival)
        if not any(survivals):
            self._weigh(chunks, [0.0] * len(chunks))
            return [()] * len(chunks)
        num_sampled, num_rows = sum(c.sample for c in chunks), sum(c.count for c in chunks)
        lengths = self._choose(survivals, num_sampled, num_rows, num_free)
        self._weigh(chunks, [sum(chances[:n]) for chances, n in zip(survivals, lengths, strict=True)])
        self._drafted = [self._guide(c.seq) for c, length in zip(chunks, lengths, strict=True) if length]
        self._methods = {guided.seq.sid: guided.method for guided in self._drafted}
        return [proposal.ids[:length] for proposal, length in zip(proposals, lengths, strict=True)]

    def _is_awake(self, seq: Sequence) -> bool:
        guided = self._guided.get(seq.sid)
        return guided is None or guided.seq is not seq or len(seq.token_ids) >= guided.naps_until

    def _weigh(self, chunks: Seq[Chunk], expected: Seq[float]) -> None:
        for chunk, num_expected in zip(chunks, expected, strict=True):
            if chunk.sample and self._is_awake(chunk.seq) and self._most(chunk.seq):
                self._guide(chunk.seq).weigh(num_expected)

    def _choose(self, survivals: Seq[Seq[float]], num_sampled: int, num_rows: int, num_free: int) -> list[int]:
        cost = self._cost
        max_cost = self._max_step_s / cost.unit_s if cost.unit_s else float("inf")
        return choose_fairly(survivals, num_sampled, num_rows, num_free, cost.relative, max_cost)

    def expects(self, sequences: Seq[Sequence], most: Seq[int], num_free: int) -> bool:
        if not any(map(self._is_awake, sequences)):
            return False
        self._read(sequences)
        survivals = [self._propose(seq, 1 + n)[1][1:] if n else [] for seq, n in zip(sequences, most, strict=True)]
        if not any(survivals):
            return False
        return any(self._choose(survivals, len(sequences), len(sequences), num_free))

    def observe(self, chunks: Seq[Chunk], drawn: Seq[Drawn], seconds: float) -> None:
        """What a step has drawn, as far as it counts, and how long it took. Without drafts some are enough."""
        self._num_steps += 1
        if self._num_steps % PLAIN_STEPS_SEEN and not any(c.draft_ids for c in chunks):
            return
        saved = 0.0
        if all(c.sample and c.count == 1 for c in chunks):
            num_rows = sum(c.num_rows for c in chunks)
            self._cost.observe(num_rows, seconds)
            saved = saved_s(self._cost, num_rows, drawn, seconds) / max(1, num_rows - len(chunks))  # a draft
        for chunk, tokens in zip(chunks, drawn, strict=True):
            if chunk.draft_ids:
                counts = self.counts[self._methods.get(chunk.seq.sid, self._config.method)]
                counts.num_drafts += 1
                counts.num_draft_tokens += len(chunk.draft_ids)
                counts.saved_s += saved * len(chunk.draft_ids)
                num_accepted = sum(t.token_id == d for t, d in zip(tokens, chunk.draft_ids, strict=False))
                counts.accepted.update(range(num_accepted))

    def failed(self) -> None:
        for guided in self._drafted:
            guided.held_until = len(guided.seq.token_ids) + HELD_TOKENS

    def forget(self, seq: Sequence) -> None:
        """It has left."""
        self._guided.pop(seq.sid, None)
        if self.fleet is not None and is_shared(seq.params):
            self.fleet.ended(seq)

    def _read(self, sequences: Seq[Sequence]) -> None:
        """On, those with the least to read first."""
        left = READ_TOKENS
        awake = [self._guide(s) for s in sequences if self._most(s) and self._is_awake(s)]
        readers = [guided for guided in awake if not guided.is_given_up]
        for guided in sorted(readers, key=lambda g: g.num_unread):
            left -= guided.read(left)
            if guided.num_indexed > MAX_INDEXED_TOKENS:
                self._give_up(guided)
        while sum(g.num_indexed for g in self._guided.values()) > MAX_ALL_INDEXED_TOKENS:
            self._give_up(max(self._guided.values(), key=lambda g: g.num_indexed))

    def _give_up(self, guided: _Guided) -> None:
        guided.is_given_up, guided.own_text, guided.sources = True, self._new_proposer(), []

    def _propose(self, seq: Sequence, allowed: int) -> tuple[Proposal, list[float]]:
        """With the chance of each draft that it and all before it are right."""
        most = min(allowed, self._most(seq))
        if most == 0:
            return NOTHING, []
        guided = self._guide(seq)
        if guided.is_given_up or guided.num_unread or len(seq.token_ids) < max(guided.held_until, guided.naps_until):
            return NOTHING, []
        best: tuple[Proposal, list[float]] = NOTHING, []
        for source in guided.sources:
            proposal = source.proposer.propose(most)
            survival = source.acceptance.survival(proposal.strengths)
            if sum(survival) > sum(best[1]):
                best, guided.method = (proposal, survival), source.method
        return best

    def _most(self, seq: Sequence) -> int:
        asked = seq.params.num_speculative_tokens
        return self._config.num_speculative_tokens if asked is None else min(asked, self._config.num_speculative_tokens)

    def _guide(self, seq: Sequence) -> _Guided:
        guided = self._guided.get(seq.sid)
        if guided is None or guided.seq is not seq:
            num_skipped = max(0, seq.num_prompt_tokens + len(seq.prediction) - MAX_INDEXED_TOKENS // 2)
            num_skipped = min(num_skipped, seq.num_prompt_tokens)
            own_text, method = self._new_proposer(), self._config.method
            sources = [self._source(method, own_text)]
            if self.fleet is not None and is_shared(seq.params):
                sources.append(self._source(FLEET, self.fleet.proposer(seq)))
            guided = _Guided(seq, own_text, sources, method, num_skipped, num_skipped)
            self._guided[seq.sid] = guided
        return guided

    def _source(self, method: str, proposer: Proposer) -> _Source:
        return _Source(method, proposer, Acceptance(self._acceptances[method]))

    def _new_proposer(self) -> TextProposer:
        if self._config.method == "ngram":
            return NgramProposer(self._config.prompt_lookup_min, self._config.prompt_lookup_max)
        return SuffixProposer()
