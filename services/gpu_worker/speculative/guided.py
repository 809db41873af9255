"""A sequence as far as its text has been read for guesses, and when it is asked next. *Pure.*"""

from __future__ import annotations

from dataclasses import dataclass

from services.gpu_worker.batch import Sequence
from services.gpu_worker.speculative.acceptance import Acceptance
from services.gpu_worker.speculative.proposer import Proposer, TextProposer

MAX_DOUBLINGS = 4
MAX_NAP_STEPS = 1 << MAX_DOUBLINGS  # from one that a sequence is asked before to the next, while it is worth little
NAP_EVERY = 4  # times that they were, its naps become twice as long
WORTH_WAKING = 0.25  # of a token, that drafts are expected to bring in a step


@dataclass(slots=True)
class Source:
    """A proposer, and how often it is right for its sequence."""

    method: str
    proposer: Proposer
    acceptance: Acceptance


@dataclass(slots=True)
class Guided:
    """A sequence as far as it has been read."""

    seq: Sequence
    own_text: TextProposer
    sources: list[Source]
    method: str  # of the latest proposal
    num_read: int = 0
    num_skipped: int = 0  # of a long prompt's first tokens
    is_given_up: bool = False
    held_until: int = 0  # it has so many tokens
    naps_until: int = 0  # the worker has had so many steps
    num_idle: int = 0  # times that its guesses were worth little, less those that they were not

    def weigh(self, num_expected: float, now: int) -> None:
        """What its drafts are expected to bring: of one that they bring little it is asked less often. now: in steps.
        Who naps as long wakes before the same step, so that nothing is done before those between."""
        if self.num_unread:
            return
        if num_expected >= WORTH_WAKING:  # which chance is for once, but hardly twice
            self.num_idle, self.naps_until = max(0, self.num_idle - NAP_EVERY), 0
            return
        self.num_idle += 1
        nap = 1 << min(MAX_DOUBLINGS, self.num_idle // NAP_EVERY)
        self.naps_until = (now // nap + 1) * nap if nap > 1 else 0

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
