"""When and how far a draft model guesses, which guesses a step computes, and what they have been worth. *Pure.*

Guessing takes time, so how many tokens are guessed is chosen before: as many as make the most tokens a second expected,
by how often guesses in their place were right. Which of them the step then computes follows from what the model says of
each (`Proposal.strengths`). Where guessing does not pay there is none, and the model falls behind; but as long as the
purse allows, it catches up with a sequence and guesses a token, which is compared with what is drawn and is no draft if
that would not pay: so what has become worth it is found.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from services.gpu_worker.batch import Chunk, Drawn, Sequence
from services.gpu_worker.speculative.acceptance import Acceptance
from services.gpu_worker.speculative.batch_proposer import BatchProposer, most_seconds
from services.gpu_worker.speculative.choice import MAX_SHARE, WORTH, choose_in_time
from services.gpu_worker.speculative.counts import Counts, Savings
from services.gpu_worker.speculative.draft import Draft, chain
from services.gpu_worker.speculative.proposer import NOTHING, Proposal
from services.gpu_worker.speculative.purse import Purse
from services.gpu_worker.speculative.row_cost import RowCost
from services.gpu_worker.speculative.speculator import HELD_TOKENS, NO_OFFER, WORKER_SHARE_KEPT, Offer
from shared.speculative_config import SpeculativeConfig

log = logging.getLogger(__name__)

UNKNOWN_CHANCE = 0.6  # of a guess, before any was compared
CATCH_UP_SHARE = 0.25  # of the longest step, before one
MIN_CATCH_UP_TOKENS = 16
MAX_CATCH_UP_TOKENS = 512
MAX_FAILURES = 3  # one after the other: nothing is guessed for REST_S, and after each more for twice as long
REST_S = 10.0
LONGEST_REST_S = 3600.0
MOST_IN_FLIGHT = 2  # steps


@dataclass(slots=True)
class _Followed:
    """A sequence that is guessed for. by_strength, by_place: how often guesses are right."""

    seq: Sequence
    by_strength: Acceptance
    by_place: Acceptance
    proposal: Proposal = NOTHING
    held_until: int = 0  # it has so many tokens


class ModelSpeculator:
    """A `Drafter`. cost: what is known of steps already. max_step_s: neither guessing nor drafts make a step longer,
    for those that have none."""

    def __init__(
        self, config: SpeculativeConfig, proposer: BatchProposer, clock: Callable[[], float],
        cost: RowCost | None = None, *, max_step_s: float = float("inf"), purse: Purse | None = None,
    ) -> None:  # fmt: skip
        self.fleet = None
        self.counts = {config.method: Counts()}
        self.purse = purse or Purse()
        self._cost = cost or RowCost()
        self._savings = Savings(self._cost)
        self.pays = True  # when it was last asked; before, it may
        self.spent_s = 0.0  # before the latest step
        self.counted_s = 0.0  # of it, without what else has held up guessing
        self._config = config
        self._proposer = proposer
        self._clock = clock
        self._max_step_s = max_step_s
        self._by_strength = Acceptance(share_kept=WORKER_SHARE_KEPT)
        self._by_place = Acceptance(share_kept=WORKER_SHARE_KEPT, unknown=lambda place: UNKNOWN_CHANCE)
        self._followed: dict[str, _Followed] = {}
        self._asked: list[tuple[_Followed, int]] = []
        self._drafted: list[_Followed] = []  # in the latest step
        self._num_failures = 0
        self._rest_s = REST_S  # the next one
        self._rests_until = 0.0  # the proposer, by the clock
        self._left: deque[tuple[Sequence, int]] = deque()  # and before which step
        self._num_steps = 0

    @property
    def is_usable(self) -> bool:
        return self._num_failures < MAX_FAILURES or self._clock() >= self._rests_until

    def forget(self, seq: Sequence) -> None:
        self._left.append((seq, self._num_steps))

    def _forget_left(self, num_in_flight: int = 0) -> None:
        """Also who was never guessed for: the proposer may have been told of it. As it may be by a step in flight, it
        forgets once more when those have ended."""
        for seq, _ in self._left:
            followed = self._followed.get(seq.sid)
            if followed is not None and followed.seq is seq:
                del self._followed[seq.sid]
            self._proposer.forget(seq)
        while self._left and self._left[0][1] + num_in_flight <= self._num_steps:
            self._left.popleft()

    def _follow(self, seq: Sequence) -> _Followed:
        followed = self._followed.get(seq.sid)
        if followed is None or followed.seq is not seq:
            followed = _Followed(seq, Acceptance(self._by_strength), Acceptance(self._by_place))
            self._followed[seq.sid] = followed
        return followed

    # --- before a step -----------------------------------------------------------------------------------------------

    def rests(self, num_sequences: int) -> bool:
        return False

    def plan(self, chunks: Seq[Chunk], most: Seq[int], num_free: int) -> list[int]:
        """The first token of an answer waits for no guesses."""
        self.plan_nothing()
        most = [n if c.count == 1 and c.seq.num_output_tokens else 0 for c, n in zip(chunks, most, strict=True)]
        num_sampled, num_rows = sum(c.sample for c in chunks), sum(c.count for c in chunks)
        counts = self._counts([c.seq for c in chunks], most, num_sampled, num_rows, num_free)
        self._asked = [(self._follow(c.seq), n) for c, n in zip(chunks, counts, strict=True) if n]
        return counts

    def plan_nothing(self) -> None:
        """No step is in flight."""
        self._forget_left()
        self.spent_s, self.counted_s, self._asked = 0.0, 0.0, []

    def expects(self, sequences: Seq[Sequence], most: Seq[int], num_free: int) -> bool:
        return any(self._counts(sequences, most, len(sequences), len(sequences), num_free))

    def _counts(
        self, sequences: Seq[Sequence], most: Seq[int], num_sampled: int, num_rows: int, num_free: int
    ) -> list[int]:
        """How many tokens to guess for each."""
        counts = [0] * len(sequences)
        able = {i: n for i, n in enumerate(map(self._most, sequences, most)) if n}
        if not able or not self.is_usable or not self.purse.may_draft or self._savings.wants_plain:
            return counts
        survivals = [self._follow(sequences[i]).by_place.survival(range(n)) for i, n in able.items()]
        length = self._length(survivals, num_sampled, num_rows, num_free)
        self.pays = length > 0
        if length:
            return [min(length, able.get(i, 0)) for i in range(len(sequences))]
        if self.purse.may_try:
            counts[min(able, key=lambda i: self._proposer.num_behind(sequences[i]))] = 1
        return counts

    def promise(self, seq: Sequence, most: int) -> float:
        """How many tokens more in a step, less what guessing takes, if it was guessed for alone."""
        chances = self._follow(seq).by_place.survival(range(self._most(seq, most)))
        step_s = self._cost.seconds(1) or 1.0
        best = sure = 0.0
        for length, chance in enumerate(chances, 1):
            sure += chance
            best = max(best, sure - self._proposer.seconds(1, length) / step_s)
        return best

    def _most(self, seq: Sequence, allowed: int) -> int:
        if not allowed or len(seq.token_ids) < self._follow(seq).held_until:
            return 0
        asked = seq.params.num_speculative_tokens
        most = min(self._config.num_speculative_tokens, self._proposer.max_drafts)
        return min(allowed, most if asked is None else min(asked, most))

    def _length(self, survivals: Seq[Seq[float]], num_sampled: int, num_rows: int, num_free: int) -> int:
        """How many tokens to guess for each, so that the most a second are expected. Those who have no guesses wait
        little for the others'."""
        cost, num, others_wait = self._cost, len(survivals), num_sampled > len(survivals) or num_rows > num_sampled
        step_s = cost.seconds(num_rows)
        prompts_s = step_s - cost.seconds(num_sampled)  # as in `choose_lengths`
        best = WORTH * num_sampled / (step_s - prompts_s) if step_s else 0.0
        best_length, expected, num_drafts = 0, float(num_sampled), 0
        for length in range(1, max(map(len, survivals)) + 1):
            own = [chances[length - 1] for chances in survivals if len(chances) >= length]
            expected, num_drafts = expected + sum(own), num_drafts + len(own)
            seconds = self._proposer.seconds(num, length) + cost.seconds(num_rows + num_drafts)
            most_s = min(self._max_step_s, (1 + MAX_SHARE * num) * step_s) if others_wait else seconds
            if num_drafts > num_free or seconds > most_s:
                break
            own_s = seconds - prompts_s
            if expected > best * own_s:
                best, best_length = expected / own_s if own_s else 0.0, length
        return best_length

    def think(self) -> None:
        """What fails here fails no answer."""
        if not self._asked:
            return
        sequences, counts = [followed.seq for followed, _ in self._asked], [count for _, count in self._asked]
        most_s, started = float("inf"), self._clock()
        try:
            num_tokens = self._num_catch_up()
            most_s = most_seconds(self._proposer, sequences, counts, num_tokens)
            proposals = self._proposer.propose(sequences, counts, num_tokens)
            self._num_failures, self._rest_s = 0, REST_S
        except Exception:
            proposals = [NOTHING] * len(sequences)
            self._proposer_failed()
        self.spent_s = self._clock() - started
        self.counted_s = min(self.spent_s, most_s)
        self.purse.pay(self.counted_s)
        for (followed, _), proposal in zip(self._asked, proposals, strict=True):
            followed.proposal = proposal

    def _proposer_failed(self) -> None:
        self._num_failures += 1
        log.warning("no guesses: the draft model failed, %d times now", self._num_failures, exc_info=True)
        self._hold([followed for followed, _ in self._asked])
        if self._num_failures >= MAX_FAILURES:
            self._rests_until = self._clock() + self._rest_s
            self._rest_s = min(LONGEST_REST_S, 2.0 * self._rest_s)

    def _num_catch_up(self) -> int:
        """Tokens before one step, so that nobody waits long for the text of another to be read."""
        num, most_s = MIN_CATCH_UP_TOKENS, CATCH_UP_SHARE * self._max_step_s
        while num < MAX_CATCH_UP_TOKENS and self._proposer.catch_up_seconds(2 * num) <= most_s:
            num *= 2
        return num

    def offers(self, chunks: Seq[Chunk], most: Seq[int]) -> dict[str, Offer]:
        """What has been guessed, by the sequences' ids."""
        self._forget_left(MOST_IN_FLIGHT)
        if not self._asked:
            return {}
        offers: dict[str, Offer] = {}
        for chunk, n in zip(chunks, most, strict=True):
            followed = self._followed.get(chunk.seq.sid)
            if followed is not None and followed.seq is chunk.seq and (proposal := followed.proposal).ids:
                strengths = proposal.strengths[: self._most(chunk.seq, n)]
                offers[chunk.seq.sid] = proposal, followed.by_strength.survival(strengths)
        return offers

    def draft(self, chunks: Seq[Chunk], most: Seq[int], num_free: int) -> list[Draft]:
        offers = self.offers(chunks, most)
        survivals = [offers.get(c.seq.sid, NO_OFFER)[1] for c in chunks]
        lengths = self._choose(survivals, chunks, num_free) if any(survivals) else [0] * len(chunks)
        self._drafted = [self._follow(c.seq) for c, length in zip(chunks, lengths, strict=True) if length]
        proposals = [offers.get(c.seq.sid, NO_OFFER)[0] for c in chunks]
        return [chain(proposal.ids[:length]) for proposal, length in zip(proposals, lengths, strict=True)]

    def _choose(self, survivals: Seq[Seq[float]], chunks: Seq[Chunk], num_free: int) -> list[int]:
        num_sampled, num_rows = sum(c.sample for c in chunks), sum(c.count for c in chunks)
        return choose_in_time(survivals, num_sampled, num_rows, num_free, self._cost, self._max_step_s, self.spent_s)

    # --- after it ----------------------------------------------------------------------------------------------------

    def observe(self, chunks: Seq[Chunk], drawn: Seq[Drawn], seconds: float) -> None:
        """What was guessed is compared with what was drawn, whether it was drafted or not."""
        counts = self.counts[self._config.method]
        counts.saved_s += self._learn_cost(chunks, drawn, seconds)
        for chunk, tokens in zip(chunks, drawn, strict=True):
            if chunk.draft:
                counts.note(chunk.draft, tokens)
        self.learn(chunks, drawn)

    def learn(self, chunks: Seq[Chunk], drawn: Seq[Drawn]) -> None:
        """How often guesses were right. Of each step once: what was guessed before it is no longer of any. Steps may
        follow for which nobody plans, so who has left is forgotten here too."""
        self._num_steps += 1
        self.spent_s = self.counted_s = 0.0
        self._forget_left(MOST_IN_FLIGHT)
        if not self._asked:
            return
        for chunk, tokens in zip(chunks, drawn, strict=True):
            followed = self._followed.get(chunk.seq.sid)
            if followed is not None and followed.seq is chunk.seq:
                self._learn(followed, drawn=tokens)
        self._asked = []

    def _learn_cost(self, chunks: Seq[Chunk], drawn: Seq[Drawn], seconds: float) -> float:
        """What drafts have saved, of these seconds of the step and of the guessing before."""
        saved, step_s = 0.0, seconds - self.spent_s
        if all(c.sample and c.count == 1 for c in chunks):
            num_rows = sum(c.num_rows for c in chunks)
            self._cost.observe(num_rows, step_s)
            saved = self._savings.of(num_rows, drawn, step_s)
            if num_rows == len(chunks) and not self.spent_s and step_s > 0.0:
                self._savings.plain(num_rows, step_s)
        self.purse.step(seconds, saved)
        return saved - self.counted_s

    def _learn(self, followed: _Followed, drawn: Drawn) -> None:
        proposal, followed.proposal = followed.proposal, NOTHING
        for place, (token, guess) in enumerate(zip(drawn, proposal.ids, strict=False)):
            is_right = token.token_id == guess
            followed.by_strength.observe(proposal.strengths[place], is_right)
            followed.by_place.observe(place, is_right)
            if not is_right:
                break

    def failed(self) -> None:
        self._hold(self._drafted)

    def hold(self, sequences: Seq[Sequence]) -> None:
        """These had drafts in a step that failed."""
        self._hold([self._follow(seq) for seq in sequences])

    def _hold(self, held: Seq[_Followed]) -> None:
        for followed in held:
            followed.held_until = len(followed.seq.token_ids) + HELD_TOKENS
