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

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from services.gpu_worker.batch import Chunk, Drawn, Sequence
from services.gpu_worker.speculative.acceptance import Acceptance
from services.gpu_worker.speculative.choice import choose_in_time, choose_lengths, may_pay
from services.gpu_worker.speculative.counts import Counts, Savings
from services.gpu_worker.speculative.draft import NO_DRAFT, Draft, chain
from services.gpu_worker.speculative.fleet import METHOD as FLEET
from services.gpu_worker.speculative.fleet import Fleet, expected_of, is_shared
from services.gpu_worker.speculative.guided import MAX_NAP_STEPS, Guided, Source
from services.gpu_worker.speculative.ngram import NgramProposer
from services.gpu_worker.speculative.proposer import NOTHING, Proposal, Proposer, TextProposer
from services.gpu_worker.speculative.purse import Purse
from services.gpu_worker.speculative.row_cost import RowCost
from services.gpu_worker.speculative.suffix import SuffixProposer, expected_of_match
from shared.speculative_config import SpeculativeConfig

WORKER_SHARE_KEPT = 0.99  # of what the worker has counted, with one more
READ_TOKENS = 2048  # of all sequences before one step: reading takes about a microsecond a token
HELD_TOKENS = 128  # that a sequence draws without drafts after a step with some has failed
PLAIN_STEPS_SEEN = 16  # one of so many
READ_SHARE = 0.005  # of all time, for reading
KEPT_STEPS = 2.0  # time for reading that may be kept
MAX_INDEXED_TOKENS = 1 << 16  # of a sequence, which has no drafts from then on
MAX_ALL_INDEXED_TOKENS = 1 << 18  # of all together: the longest gives its own up

Offer = tuple[Proposal, list[float]]  # drafts, with the chance of each that it and all before it are right
NO_OFFER: Offer = (NOTHING, [])
NO_METHODS: Mapping[str, str] = {}


class Speculator:
    """A `Drafter`. cost: what is known of steps already. max_step_s: drafts make no step longer, for those that have
    none. fleet: what workers have told each other, if they do. clock: in seconds; without one its own time counts as
    nothing. counts: by method."""

    def __init__(
        self, config: SpeculativeConfig, cost: RowCost | None = None, *, max_step_s: float = float("inf"),
        fleet: Fleet | None = None, clock: Callable[[], float] = lambda: 0.0, purse: Purse | None = None,
    ) -> None:  # fmt: skip
        self.fleet = fleet
        self.counts = {method: Counts() for method in (config.method, *([FLEET] if fleet else []))}
        self.purse = purse or Purse()
        self._own = Purse(KEPT_STEPS, READ_SHARE)  # of its own time alone, without what wrong drafts cost
        self._config = config
        self._cost = cost or RowCost()
        self.savings = Savings(self._cost)
        self.saved_s = 0.0  # by the latest step
        self._max_step_s = max_step_s
        self._clock = clock
        self._acceptances = {
            config.method: Acceptance(share_kept=WORKER_SHARE_KEPT, unknown=expected_of_match),
            FLEET: Acceptance(share_kept=WORKER_SHARE_KEPT, unknown=expected_of),
        }
        self._guided: dict[str, Guided] = {}
        self._offered: dict[str, Offer] = {}  # for the step that is prepared
        self._drafted: list[Guided] = []  # in the latest step
        self._num_steps = 0
        self._wakes_at = 0  # after so many steps somebody is asked
        self._num_sequences = 0
        self._plain_s = 0.0  # of steps that have not been looked at
        self._methods: dict[str, str] = {}  # that they are drafted by

    def rests(self, num_sequences: int) -> bool:
        if num_sequences != self._num_sequences:  # with a new one
            self._num_sequences, self._wakes_at = num_sequences, 0
        return self._num_steps < self._wakes_at

    def plan(self, chunks: Seq[Chunk], most: Seq[int], num_free: int) -> list[int]:
        return [0] * len(chunks)

    def think(self) -> None:
        return

    def draft(self, chunks: Seq[Chunk], most: Seq[int], num_free: int) -> list[Draft]:
        return self.chosen(chunks, self.offers(chunks, most, num_free), num_free)

    def offers(self, chunks: Seq[Chunk], most: Seq[int], num_free: int) -> dict[str, Offer]:
        """By the ids of those who are asked."""
        self._offered = {}
        if self._num_steps < self._wakes_at or not any(most):
            return {}
        started = self._clock()
        num_sampled, num_rows = sum(c.sample for c in chunks), sum(c.count for c in chunks)
        self._offered = self._offers([c.seq for c in chunks], most, num_sampled, num_rows, num_free)
        self._pay(self._clock() - started)
        return self._offered

    def _weigh(self, guided: Guided, num_expected: float) -> None:
        guided.weigh(num_expected, self._num_steps)
        self._wakes_at = min(self._wakes_at, guided.naps_until)

    def _alone(self, chances: list[float], num_sampled: int, num_rows: int, num_free: int) -> int:
        """Drafts of one sequence if no other had some: what others take says nothing of what its own are worth."""
        return choose_lengths([chances], num_sampled, num_rows, num_free, self._cost.relative)[0] if chances else 0

    def chosen(
        self, chunks: Seq[Chunk], offers: Mapping[str, Offer], num_free: int,
        methods: Mapping[str, str] = NO_METHODS, spent_s: float = 0.0,
    ) -> list[Draft]:  # fmt: skip
        """Of what is offered, by sequence, what the step computes. methods: of those whose offers are another's; what
        they took, which is spent already."""
        self._drafted, self._methods = [], {}
        own, self._offered = self._offered, {}
        drafts = [NO_DRAFT] * len(chunks)
        if not offers:
            return drafts
        started = self._clock()
        survivals = [offers.get(c.seq.sid, NO_OFFER)[1] for c in chunks]
        num_sampled, num_rows = sum(c.sample for c in chunks), sum(c.count for c in chunks)
        lengths = [0] * len(chunks)
        if any(survivals):
            lengths = self._choose(survivals, num_sampled, num_rows, num_free, spent_s)
        for i, (chunk, length) in enumerate(zip(chunks, lengths, strict=True)):
            sid = chunk.seq.sid
            if sid in own:
                is_alone = len(chunks) == 1 and offers.get(sid) is own[sid] and not spent_s
                count = length if is_alone else self._alone(own[sid][1], num_sampled, num_rows, num_free)
                self._weigh(self._guided[sid], sum(own[sid][1][:count]))
            if length:
                guided = self._guide(chunk.seq)
                drafts[i] = chain(offers[sid][0].ids[:length])
                self._drafted.append(guided)
                self._methods[sid] = methods.get(sid, guided.method)
        self._pay(self._clock() - started)
        return drafts

    def _offers(
        self, sequences: Seq[Sequence], most: Seq[int], num_sampled: int, num_rows: int, num_free: int
    ) -> dict[str, Offer]:
        due = {} if self.savings.wants_plain else self._due(sequences, most)
        if not due:
            return {}
        if not may_pay(num_sampled, num_rows, min(num_free, sum(due.values())), self._cost.relative):
            if all(most) and num_rows == num_sampled:  # no prompt, which leaves little room, and soon ends
                self._wakes_at = self._num_steps + MAX_NAP_STEPS
            return {}
        self._read([self._guide(sequences[i]) for i in due])
        return {sequences[i].sid: self._propose(sequences[i], count) for i, count in due.items()}

    def _due(self, sequences: Seq[Sequence], most: Seq[int]) -> dict[int, int]:
        """Who is asked, for how much. Who was worth little waits until there is something in the purse."""
        due: dict[int, int] = {}
        now = self._num_steps
        wakes_at = now + MAX_NAP_STEPS
        if not self.purse.may_draft:
            self._wakes_at = wakes_at
            return due
        may_try, limit = self._own.may_try, self._config.num_speculative_tokens
        for i, (seq, allowed) in enumerate(zip(sequences, most, strict=True)):
            if not allowed:  # yet
                wakes_at = now
                continue
            guided = self._guided.get(seq.sid)
            if guided is not None and guided.seq is seq:
                if now < guided.naps_until:
                    wakes_at = min(wakes_at, guided.naps_until)
                    continue
                if len(seq.token_ids) < guided.held_until or guided.is_given_up:
                    continue
                if guided.num_idle and not may_try:
                    continue
            asked = seq.params.num_speculative_tokens
            if count := min(allowed, limit if asked is None else min(asked, limit)):
                due[i] = count
        self._wakes_at = wakes_at  # of those who are not asked
        return due

    def _choose(
        self, survivals: Seq[Seq[float]], num_sampled: int, num_rows: int, num_free: int, spent_s: float = 0.0
    ) -> list[int]:
        return choose_in_time(survivals, num_sampled, num_rows, num_free, self._cost, self._max_step_s, spent_s)

    def expects(self, sequences: Seq[Sequence], most: Seq[int], num_free: int) -> bool:
        """Nobody is asked again before the step if not."""
        if self._num_steps < self._wakes_at:
            return False
        started, num = self._clock(), len(sequences)
        offers = self._offers(sequences, [n and 1 + n for n in most], num, num, num_free)
        survivals = [offers.get(seq.sid, NO_OFFER)[1][1:] for seq in sequences]
        expected = any(survivals) and any(self._choose(survivals, num, num, num_free))
        if expected:
            self._wakes_at = 0
        else:
            for sid in offers:
                self._weigh(self._guided[sid], 0.0)
        self._pay(self._clock() - started)
        return expected

    def observe(self, chunks: Seq[Chunk], drawn: Seq[Drawn], seconds: float) -> None:
        """What a step has drawn, as far as it counts, and how long it took. Without drafts some are enough."""
        self._num_steps += 1
        has_drafts = any(c.draft for c in chunks)
        if self._num_steps % PLAIN_STEPS_SEEN and not has_drafts and not self.savings.wants_plain:
            self._plain_s += seconds
            self.saved_s = 0.0
            return
        started, saved = self._clock(), 0.0
        if all(c.sample and c.count == 1 for c in chunks):
            num_rows = sum(c.num_rows for c in chunks)
            self._cost.observe(num_rows, seconds)
            if has_drafts:
                saved = self.savings.of(num_rows, drawn, seconds)
            elif chunks and seconds > 0.0:
                self.savings.plain(len(chunks), seconds)
        self.saved_s = saved
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
        self._drafted = []

    def _pay(self, seconds: float) -> None:
        self.purse.pay(seconds)
        self._own.pay(seconds)

    @property
    def drafted(self) -> list[Sequence]:
        """Who had drafts in the latest step."""
        return [guided.seq for guided in self._drafted]

    def failed(self) -> None:
        for guided in self._drafted:
            guided.held_until = len(guided.seq.token_ids) + HELD_TOKENS

    def forget(self, seq: Sequence) -> None:
        """It has left."""
        self._wakes_at = 0
        self._guided.pop(seq.sid, None)
        if self.fleet is not None and is_shared(seq.params):
            self.fleet.ended(seq)

    def _read(self, readers: Seq[Guided]) -> None:
        """On, those with the least to read first."""
        left = READ_TOKENS
        for guided in sorted(readers, key=lambda g: g.num_unread):
            left -= guided.read(left)
            if guided.num_indexed > MAX_INDEXED_TOKENS:
                self._give_up(guided)
        while sum(g.num_indexed for g in self._guided.values()) > MAX_ALL_INDEXED_TOKENS:
            self._give_up(max(self._guided.values(), key=lambda g: g.num_indexed))

    def _give_up(self, guided: Guided) -> None:
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

    def _guide(self, seq: Sequence) -> Guided:
        guided = self._guided.get(seq.sid)
        if guided is None or guided.seq is not seq:
            num_skipped = max(0, seq.num_prompt_tokens + len(seq.prediction) - MAX_INDEXED_TOKENS // 2)
            num_skipped = min(num_skipped, seq.num_prompt_tokens)
            own_text, method = self._new_proposer(), self._config.method
            sources = [self._source(method, own_text)]
            if self.fleet is not None and is_shared(seq.params):
                sources.append(self._source(FLEET, self.fleet.proposer(seq)))
            guided = Guided(seq, own_text, sources, method, num_skipped, num_skipped)
            self._guided[seq.sid] = guided
        return guided

    def _source(self, method: str, proposer: Proposer) -> Source:
        return Source(method, proposer, Acceptance(self._acceptances[method]))

    def _new_proposer(self) -> TextProposer:
        if self._config.method == "ngram":
            return NgramProposer(self._config.prompt_lookup_min, self._config.prompt_lookup_max)
        return SuffixProposer()
