"""Who guesses for each sequence in each step: what is in texts, or heads that compute. *Pure.*

Texts are asked first, since that takes next to no time: heads only for sequences of which they promise more. Where
heads have guessed too, what is drafted is whichever promises more then. Both know the same costs and share one purse.

Whether heads pay is not only estimated: what they gain is measured, in windows of steps, at each load and for greedy
answers apart from others, and where it is not enough they rest.

Heads read what the model's layers have computed, and keeping that takes time in each step. So it is kept only for whom
they may be asked: nobody while a step is so full that they do not pay, not who copies a text, and one sequence now and
then, for some tokens, to see whether that has changed. A head that has missed something begins again behind it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from services.gpu_worker.batch import Chunk, Drawn, Sequence
from services.gpu_worker.speculative.draft import Draft
from services.gpu_worker.speculative.model_speculator import ModelSpeculator
from services.gpu_worker.speculative.speculator import NO_OFFER, Offer, Speculator
from services.gpu_worker.speculative.worth import Worth

TRIED_STEPS = 64  # in which heads read one sequence, to see if they pay
REST_STEPS = 1024  # before they do again
QUIET_STEPS = 16  # from one before which heads had nothing to do to the next
ASKED_EVERY = 4  # times that they are looked at, whether they pay now, while they do not
COPY_WEIGHT = 0.1  # of the newest step, in whether a sequence is better guessed from texts
IS_COPY = 0.7


@dataclass(slots=True)
class _Kind:
    """How often texts promise more for a sequence."""

    seq: Sequence
    copies: float = 0.0


class AutoSpeculator:
    """A `Drafter`. text and heads have the same costs and purse. method: of the heads, as counts name it."""

    def __init__(self, text: Speculator, heads: ModelSpeculator, method: str) -> None:
        self.fleet = text.fleet
        self.counts = text.counts | heads.counts
        text.counts = self.counts
        self._text = text
        self._heads = heads
        self._method = method
        self._kinds: dict[str, _Kind] = {}
        self._offered: dict[str, Offer] = {}  # by texts, for the step that is planned
        self._is_planned = False
        self._tried = ""  # the sequence that heads read though they do not pay
        self._ends_at = 0  # which step ends trying, or rest
        self._quiet_until = 0  # before which step heads are not asked
        self._num_asked = 0  # times whether they pay now, while they do not
        self._num_steps = 0
        self._worth = Worth()
        self._circumstances = (0, True)  # of the step that is planned: load, and whether all answers are greedy
        self._is_resting = False  # in these heads have not paid

    def wants_rows(self, seq: Sequence) -> bool:
        """Is what the layers read for it to be kept?"""
        if not self._heads.is_usable or not self._heads.purse.may_draft or self._is_resting:
            return False
        if not self._heads.pays:
            return seq.sid == self._tried
        kind = self._kinds.get(seq.sid)
        return kind is None or kind.seq is not seq or kind.copies < IS_COPY

    @property
    def wants_any(self) -> bool:
        """Of whomever."""
        heads = self._heads
        return (heads.pays or bool(self._tried)) and not self._is_resting and heads.is_usable and heads.purse.may_draft

    # --- before a step -----------------------------------------------------------------------------------------------

    def rests(self, num_sequences: int) -> bool:
        return self._text.rests(num_sequences) and self._num_steps < self._quiet_until

    def plan(self, chunks: Seq[Chunk], most: Seq[int], num_free: int) -> list[int]:
        self._offered = self._text.offers(chunks, most, num_free)
        self._is_planned = True
        if self._num_steps < self._quiet_until:
            self._heads.plan_nothing()
            return [0] * len(chunks)
        self._circumstances = _circumstances([c.seq for c in chunks])
        self._is_resting = not self._worth.may(self._circumstances, self._num_steps)
        if self._is_resting or not self._heads.is_usable or not (self._heads.pays or self._try_one(chunks)):
            self._rest()
        return self._heads.plan(chunks, self._most_of_heads(chunks, most), num_free)

    def _rest(self) -> None:
        """Heads do, until those texts wake that nap longest."""
        self._quiet_until = (self._num_steps // QUIET_STEPS + 1) * QUIET_STEPS

    def _most_of_heads(self, chunks: Seq[Chunk], most: Seq[int]) -> list[int]:
        nobody = [0] * len(chunks)
        if not self._heads.is_usable or self._is_resting or self._text.savings.wants_plain:
            return nobody
        if not self._heads.pays:
            self._num_asked += 1
            if self._num_asked % ASKED_EVERY == 0:
                return list(most)
            return [n if c.seq.sid == self._tried else 0 for c, n in zip(chunks, most, strict=True)]
        allowed = nobody
        for i, (chunk, n) in enumerate(zip(chunks, most, strict=True)):
            if not n:
                continue
            kind = self._kind_of(chunk.seq)
            chances = self._offered.get(chunk.seq.sid, NO_OFFER)[1]
            is_better = bool(chances) and sum(chances) > self._heads.promise(chunk.seq, n)
            kind.copies += COPY_WEIGHT * (is_better - kind.copies)
            if not is_better:
                allowed[i] = n
        return allowed

    def _kind_of(self, seq: Sequence) -> _Kind:
        kind = self._kinds.get(seq.sid)
        if kind is None or kind.seq is not seq:
            kind = self._kinds[seq.sid] = _Kind(seq)
        return kind

    def _try_one(self, chunks: Seq[Chunk]) -> bool:
        """The one that came last has the least to be read."""
        if chunks and not self._is_trying() and self._may_try_again:
            self._tried, self._ends_at = chunks[-1].seq.sid, self._num_steps + TRIED_STEPS
        return bool(self._tried)

    def _is_trying(self) -> bool:
        if self._tried and self._num_steps >= self._ends_at:
            self._tried, self._ends_at = "", self._num_steps + REST_STEPS
        return bool(self._tried)

    @property
    def _may_try_again(self) -> bool:
        return self._num_steps >= self._ends_at and self._heads.purse.may_try

    def think(self) -> None:
        self._heads.think()

    def draft(self, chunks: Seq[Chunk], most: Seq[int], num_free: int) -> list[Draft]:
        by_text = self._offered if self._is_planned else self._text.offers(chunks, most, num_free)
        self._offered, self._is_planned = {}, False
        by_heads = self._heads.offers(chunks, most)
        if not by_text and not by_heads:
            return self._text.chosen(chunks, {}, num_free)
        best = dict(by_text)
        for sid, offer in by_heads.items():
            if sum(offer[1]) > sum(best.get(sid, NO_OFFER)[1]):
                best[sid] = offer
        methods = {sid: self._method for sid, offer in best.items() if offer is by_heads.get(sid)}
        return self._text.chosen(chunks, best, num_free, methods, self._heads.spent_s)

    def expects(self, sequences: Seq[Sequence], most: Seq[int], num_free: int) -> bool:
        if self._text.expects(sequences, most, num_free):
            return True
        if self._num_steps < self._quiet_until:
            return False
        if self._heads.is_usable and self._worth.may(_circumstances(sequences), self._num_steps):
            if self._is_trying() or self._heads.pays:
                return self._heads.expects(sequences, most, num_free)
            if any(most) and self._may_try_again:
                return True
        self._rest()
        return False

    # --- after it ----------------------------------------------------------------------------------------------------

    def observe(self, chunks: Seq[Chunk], drawn: Seq[Drawn], seconds: float) -> None:
        spent_s, counted_s = self._heads.spent_s, self._heads.counted_s
        self._text.observe(chunks, drawn, seconds - spent_s)
        if spent_s and self._heads.pays:
            seconds -= spent_s - counted_s
            self._worth.note(self._circumstances, self._num_steps, seconds, self._text.saved_s - counted_s)
            self._is_resting = not self._worth.may(self._circumstances, self._num_steps)
        self._num_steps += 1
        self._heads.learn(chunks, drawn)

    def failed(self) -> None:
        self._text.failed()
        self._heads.hold(self._text.drafted)

    def forget(self, seq: Sequence) -> None:
        self._quiet_until = 0
        self._text.forget(seq)
        self._heads.forget(seq)
        kind = self._kinds.get(seq.sid)
        if kind is not None and kind.seq is seq:
            del self._kinds[seq.sid]


def _circumstances(sequences: Seq[Sequence]) -> tuple[int, bool]:
    return len(sequences).bit_length(), all(seq.params.temperature == 0.0 for seq in sequences)
