"""Decides what each step drafts, and learns from what came of it. *Pure.*

Every sequence has proposers, which read its text: one that looks in it, and one that looks in the fleet's statistics
where there are some. Each has an estimate of its own of how often it is right, and the one that promises more is heard.
What is drafted for all sequences together is what makes most tokens a second expected, by what steps have cost (see
`choice`).

All of this takes time, which the purse pays: where texts are not worth guessing they are not even read but now and
then, all that has come at once, and never for more than a small share of all time. Where a step is so full that no
guess could pay, however sure, nothing is done at all.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from services.gpu_worker.batch import Chunk, Drawn, Sequence
from services.gpu_worker.speculative.acceptance import Acceptance
from services.gpu_worker.speculative.choice import choose_fairly, may_pay
from services.gpu_worker.speculative.counts import Counts, saved_s
from services.gpu_worker.speculative.draft import NO_DRAFT, Draft, chain
from services.gpu_worker.speculative.fleet import METHOD as FLEET
from services.gpu_worker.speculative.fleet import Fleet, expected_of, is_shared
from services.gpu_worker.speculative.ngram import NgramProposer
from services.gpu_worker.speculative.proposer import NOTHING, Proposal, Proposer, TextProposer
from services.gpu_worker.speculative.purse import Purse
from services.gpu_worker.speculative.row_cost import RowCost
from services.gpu_worker.speculative.suffix import SuffixProposer
from shared.speculative_config import SpeculativeConfig

WORKER_SHARE_KEPT = 0.99  # of what the worker has counted, with one more
READ_TOKENS = 2048  # of all sequences before one step: reading takes about a microsecond a token
HELD_TOKENS = 128  # that a sequence draws without drafts after a step with some has failed
PLAIN_STEPS_SEEN = 4  # one of so many
MAX_NAP_TOKENS = 8  # that a sequence draws unread while guesses are worth little
NAP_EVERY = 4  # times that they were, its naps become one token longer
KEPT_STEPS = 2.0  # time for reading that may be kept
WORTH_WAKING = 0.25  # of a token, that drafts are expected to bring in a step
MAX_INDEXED_TOKENS = 1 << 16  # of a sequence, which has no drafts from then on
MAX_ALL_INDEXED_TOKENS = 1 << 18  # of all together: the longest gives its own up

Offer = tuple[Proposal, list[float]]  # drafts, with the chance of each that it and all before it are right
NO_OFFER: Offer = (NOTHING, [])


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
        num_predicted = len(seq.prediction)
        predicted_from, predicted_to = seq.num_prompt_tokens, seq.num_prompt_tokens + num_predicted
        first, end = self.num_read, self.num_read + min(self.num_unread, most)
        if first < predicted_from:
            prompt = seq.token_ids[first : min(end, predicted_from)]
            for source in self.sources:
                source.proposer.read(prompt)
        if num_predicted and first < predicted_to and end > predicted_from:
            own_text.read(seq.prediction[max(0, first - predicted_from) : end - predicted_from])
            if end >= predicted_to:
                own_text.expect(num_predicted)
        if end > predicted_to:
            drawn = seq.token_ids[max(first, predicted_to) - num_predicted : end - num_predicted]
            for source in self.sources:
                source.acceptance.observe_all(source.proposer.follow(drawn))
        self.num_read = end
        return end - first


class Speculator:
    """A `Drafter`. cost: what is known of steps already. max_step_s: drafts make no step longer, for those that have
    none. fleet: what workers have told each other, if they do. clock: in seconds; without one its own time counts as
    nothing. counts: by method."""

    def __init__(
        self, config: SpeculativeConfig, cost: RowCost | None = None, *, max_step_s: float = float("inf"),
        fleet: Fleet | None = None, clock: Callable[[], float] = lambda: 0.0,
    ) -> None:  # fmt: skip
        self.fleet = fleet
        self.counts = {method: Counts() for method in (config.method, *([FLEET] if fleet else []))}
        self.purse = Purse()
        self._own = Purse(KEPT_STEPS)  # of its own time alone, without what wrong drafts cost
        self._config = config
        self._cost = cost or RowCost()
        self._max_step_s = max_step_s
        self._clock = clock
        self._acceptances = {
            config.method: Acceptance(share_kept=WORKER_SHARE_KEPT),
            FLEET: Acceptance(share_kept=WORKER_SHARE_KEPT, unknown=expected_of),
        }
        self._guided: dict[str, _Guided] = {}
        self._drafted: list[_Guided] = []  # in the latest step
        self._num_steps = 0
        self._plain_s = 0.0  # of steps that have not been looked at
        self._methods: dict[str, str] = {}  # that they are drafted by

    def plan(self, chunks: Seq[Chunk], most: Seq[int], num_free: int) -> list[int]:
        return [0] * len(chunks)

    def think(self) -> None:
        return

    def draft(self, chunks: Seq[Chunk], most: Seq[int], num_free: int) -> list[Draft]:
        self._drafted = []
        started = self._clock()
        num_sampled, num_rows = sum(c.sample for c in chunks), sum(c.count for c in chunks)
        offers = self._offers([c.seq for c in chunks], most, num_sampled, num_rows, num_free)
        drafts = [NO_DRAFT] * len(chunks)
        if offers:
            survivals = [offers[i][1] if i in offers else [] for i in range(len(chunks))]
            lengths = [0] * len(chunks)
            if any(survivals):
                lengths = self._choose(survivals, num_sampled, num_rows, num_free)
            for i, (proposal, chances) in offers.items():
                drafts[i] = chain(proposal.ids[: lengths[i]])
                self._guide(chunks[i].seq).weigh(sum(chances[: lengths[i]]))
            self._drafted = [self._guide(c.seq) for c, length in zip(chunks, lengths, strict=True) if length]
            self._methods = {guided.seq.sid: guided.method for guided in self._drafted}
        self._pay(self._clock() - started)
        return drafts

    def _offers(
        self, sequences: Seq[Sequence], most: Seq[int], num_sampled: int, num_rows: int, num_free: int
    ) -> dict[int, Offer]:
        """By the numbers of those who are asked."""
        due = self._due(sequences, most)
        if not due or not may_pay(num_sampled, num_rows, min(num_free, sum(due.values())), self._cost.relative):
            return {}
        self._read([self._guide(sequences[i]) for i in due])
        return {i: self._propose(sequences[i], count) for i, count in due.items()}

    def _due(self, sequences: Seq[Sequence], most: Seq[int]) -> dict[int, int]:
        """Who is asked, for how much. Who was worth little waits until there is something in the purse."""
        due: dict[int, int] = {}
        if not self.purse.may_draft:
            return due
        may_try, limit = self._own.may_try, self._config.num_speculative_tokens
        for i, (seq, allowed) in enumerate(zip(sequences, most, strict=True)):
            if not allowed:
                continue
            guided = self._guided.get(seq.sid)
            if guided is not None and guided.seq is seq:
                num_tokens = len(seq.token_ids)
                if num_tokens < guided.naps_until or num_tokens < guided.held_until or guided.is_given_up:
                    continue
                if guided.num_idle and not may_try:
                    continue
            asked = seq.params.num_speculative_tokens
            if count := min(allowed, limit if asked is None else min(asked, limit)):
                due[i] = count
        return due

    def _choose(self, survivals: Seq[Seq[float]], num_sampled: int, num_rows: int, num_free: int) -> list[int]:
        cost = self._cost
        max_cost = self._max_step_s / cost.unit_s if cost.unit_s else float("inf")
        return choose_fairly(survivals, num_sampled, num_rows, num_free, cost.relative, max_cost)

    def expects(self, sequences: Seq[Sequence], most: Seq[int], num_free: int) -> bool:
        """Nobody is asked again before the step if not."""
        started, num = self._clock(), len(sequences)
        offers = self._offers(sequences, [n and 1 + n for n in most], num, num, num_free)
        survivals = [offers[i][1][1:] if i in offers else [] for i in range(num)]
        expected = any(survivals) and any(self._choose(survivals, num, num, num_free))
        if not expected:
            for i in offers:
                self._guide(sequences[i]).weigh(0.0)
        self._pay(self._clock() - started)
        return expected

    def observe(self, chunks: Seq[Chunk], drawn: Seq[Drawn], seconds: float) -> None:
        """What a step has drawn, as far as it counts, and how long it took. Without drafts some are enough."""
        self._num_steps += 1
        has_drafts = any(c.draft for c in chunks)
        if self._num_steps % PLAIN_STEPS_SEEN and not has_drafts:
            self._plain_s += seconds
            return
        started, saved = self._clock(), 0.0
        if all(c.sample and c.count == 1 for c in chunks):
            num_rows = sum(c.num_rows for c in chunks)
            self._cost.observe(num_rows, seconds)
            saved = saved_s(self._cost, num_rows, drawn, seconds)
        if has_drafts:
            saved_a_draft = saved / sum(len(c.draft) for c in chunks)
            for chunk, tokens in zip(chunks, drawn, strict=True):
                if chunk.draft:
                    counts = self.counts[self._methods.get(chunk.seq.sid, self._config.method)]
                    counts.note(chunk.draft, tokens, saved_a_draft)
        self._pay(self._clock() - started)
        self.purse.step(seconds, saved, others_s=self._plain_s)
        self._own.step(seconds, max(0.0, saved), others_s=self._plain_s)
        self._plain_s = 0.0

    def _pay(self, seconds: float) -> None:
        self.purse.pay(seconds)
        self._own.pay(seconds)

    def failed(self) -> None:
        for guided in self._drafted:
            guided.held_until = len(guided.seq.token_ids) + HELD_TOKENS

    def forget(self, seq: Sequence) -> None:
        """It has left."""
        self._guided.pop(seq.sid, None)
        if self.fleet is not None and is_shared(seq.params):
            self.fleet.ended(seq)

    def _read(self, readers: Seq[_Guided]) -> None:
        """On, those with the least to read first."""
        left = READ_TOKENS
        for guided in sorted(readers, key=lambda g: g.num_unread):
            left -= guided.read(left)
            if guided.num_indexed > MAX_INDEXED_TOKENS:
                self._give_up(guided)
        while sum(g.num_indexed for g in self._guided.values()) > MAX_ALL_INDEXED_TOKENS:
            self._give_up(max(self._guided.values(), key=lambda g: g.num_indexed))

    def _give_up(self, guided: _Guided) -> None:
        guided.is_given_up, guided.own_text, guided.sources = True, self._new_proposer(), []

    def _propose(self, seq: Sequence, most: int) -> Offer:
        guided = self._guide(seq)
        best = NO_OFFER
        if guided.num_unread:
            return best
        for source in guided.sources:
            proposal = source.proposer.propose(most)
            survival = source.acceptance.survival(proposal.strengths)
            if sum(survival) > sum(best[1]):
                best, guided.method = (proposal, survival), source.method
        return best

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
