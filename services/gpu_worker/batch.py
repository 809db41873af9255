"""What a step is: the types between the running set, which decides, and an engine, which computes. *Pure.*"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from services.gpu_worker.speculative.draft import NO_DRAFT, Draft
from shared.protocol import SamplingParams


class Answer(Protocol):
    """What holds an answer to its grammar (`grammar.AnswerState`)."""

    def mask_after(self, output_ids: Seq[int]) -> bytes | None:
        """Bit i of byte i // 8 says whether token i may follow these; None: any may. ValueError if none can."""
        ...

    def allows(self, output_ids: Seq[int]) -> bool:
        """Are these the beginning of an answer?"""
        ...

    def fork(self) -> Answer:
        """The same place, from where both go on apart."""
        ...


class AnswerFailed(Exception):
    """What holds a sequence's answer cannot go on: the fault is in the request, and nothing is wrong with the step."""

    def __init__(self, sid: str, reason: str) -> None:
        super().__init__(f"{sid}: {reason}")
        self.sid = sid
        self.reason = reason


def mask_after(sid: str, answer: Answer | None, output_ids: Seq[int]) -> bytes | None:
    """As `Answer.mask_after`, where there is one; AnswerFailed if no token can follow."""
    try:
        return None if answer is None else answer.mask_after(output_ids)
    except ValueError as e:
        raise AnswerFailed(sid, str(e)) from e


@dataclass(slots=True)
class Sequence:
    """One running sequence. token_ids = prompt and output; the KV of the first num_computed of them is in the pool.

    While num_computed < len(token_ids) - 1 it is in prefill (also after a move, where the output is recomputed).
    Token t lives in slot block_ids[t // block_size] * block_size + t % block_size.
    Steps that have begun and not ended compute num_ahead more tokens, and draw num_drawing that nobody knows yet.
    """

    sid: str
    epoch: int
    choice: int
    params: SamplingParams
    num_prompt_tokens: int
    token_ids: list[int]
    block_ids: list[int]
    num_computed: int = 0
    num_ahead: int = 0
    num_drawing: int = 0
    salt: bytes = b""
    alone: bool = False
    cached_tokens: int = 0
    num_sealed: int = 0  # whole blocks reported as sealed, from the first on
    keys: list[bytes] = field(default_factory=list)  # of the sealed blocks
    num_committed: int = 0  # position at which the durable log ends, as far as is known
    score_from: int = 0  # the log has the log-probabilities of the tokens after so many of the prompt
    finish: str = ""
    answer: Answer | None = None  # where the request has a constraint
    awaits_answer: bool = False  # it is still being made: no step before
    prediction: tuple[int, ...] = ()  # what its client expects the output to be, more or less

    @property
    def place(self) -> tuple[str, int]:
        return self.sid, self.epoch

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def next_position(self) -> int:
        """Of the first token that no step has begun to compute."""
        return self.num_computed + self.num_ahead

    @property
    def num_to_score(self) -> int:
        """Tokens, from the first on, whose logits say how likely the prompt's next token is; 0 if nobody asks."""
        return 0 if self.params.prompt_logprobs is None else self.num_prompt_tokens - 1

    @property
    def is_scoring(self) -> bool:
        """Are there some of them that no step has begun to compute?"""
        return self.params.prompt_logprobs is not None and max(self.next_position, self.score_from) < self.num_to_score

    @property
    def draws(self) -> bool:
        """Or does it ask for log-probabilities of its prompt alone?"""
        return self.params.max_tokens > 0

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next can be drawn, or, where none is, before its end."""
        end = len(self.token_ids) + self.num_drawing if self.params.max_tokens > 0 else self.num_to_score
        return end - self.num_computed - self.num_ahead

    def most_tokens(self, num_scores: int) -> int:
        """That a step may compute of it, if it may give so many log-probabilities of its prompt."""
        if self.params.prompt_logprobs is None:
            return self.num_remaining
        first = max(self.next_position, self.score_from)
        if self.num_to_score - first <= num_scores:
            return self.num_remaining
        return first + num_scores - self.next_position


NO_TOKENS = range(0)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute token_ids[start : start + count] of a sequence; sample: draw the next token from the last of them.

    Where the step before draws the last of these tokens, and has not ended, it is not in token_ids yet. draft: guesses
    of what is drawn next, computed too, a row each. Only with sample, and after the last of token_ids."""

    seq: Sequence
    start: int
    count: int
    sample: bool
    draft: Draft = NO_DRAFT

    @property
    def num_rows(self) -> int:
        return self.count + len(self.draft)

    @property
    def positions(self) -> list[int]:
        """Of its rows. Their KV goes to slots that follow each other, where guesses beside each other have one each."""
        end = self.start + self.count
        return [*range(self.start, end), *(end + depth for depth in self.draft.depths)]

    @property
    def scored(self) -> range:
        """Of its tokens, by number in the sequence, those whose logits say how likely the prompt's next token is."""
        if self.seq.params.prompt_logprobs is None:
            return NO_TOKENS
        return range(max(self.start, self.seq.score_from), min(self.start + self.count, self.seq.num_to_score))

    @property
    def logit_rows(self) -> range:
        """Rows of which logits are needed: those that score, and right behind them those that are drawn from."""
        scored = self.scored
        first, end = (scored.start, scored.stop) if scored else (self.start, self.start)
        if self.sample:
            first, end = (first if scored else self.start + self.count - 1), self.start + self.num_rows
        return range(first - self.start, end - self.start)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """logprob and top (token id, log-probability; best first) only where the request asked for them. rank: only of a
    token of the prompt, which was not drawn but has such numbers too."""

    token_id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


Drawn = tuple[SampledToken, ...]  # of a chunk: first the prompt's tokens that it scores, see `Chunk.scored`


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine can hold. num_blocks: blocks of its KV pool. variant: see DESIGN P2; part of every block key.
    is_native: compiled C computes."""

    variant: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    device: str
    is_native: bool = False

    @property
    def on_card(self) -> bool:
        """A GPU computes, or what plays one."""
        return self.device not in ("cpu", "none")

    @property
    def max_num_tokens(self) -> int:
        """Of one sequence, prompt and output: the context, or what the pool holds. A sequence that has so many can be
        taken up again nowhere, so it ends there, wherever it runs."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


class Drafter(Protocol):
    """Guesses which tokens are drawn next. For a step it is asked to `plan`, to `think` and to `draft`, in this order,
    of which `think` alone may take long; not where it `rests`. Calls come from the engine's thread, but `forget` may
    come from others meanwhile."""

    def rests(self, num_sequences: int) -> bool:
        """Is nothing to be drafted before the next step, whatever it is asked? Of a worker with so many sequences."""
        ...

    def plan(self, chunks: Seq[Chunk], most: Seq[int], num_free: int) -> list[int]:
        """How many tokens `think` is to guess for each chunk of a step, at most as `draft` may have. A sequence gets
        the slots that computing them takes before it does."""
        ...

    def think(self) -> None:
        """Guesses what was planned."""
        ...

    def draft(self, chunks: Seq[Chunk], most: Seq[int], num_free: int) -> list[Draft]:
        """Drafts for each chunk of a step, at most `most` of each and num_free in all. Does not modify sequences."""
        ...

    def expects(self, sequences: Seq[Sequence], most: Seq[int], num_free: int) -> bool:
        """Would there be drafts, as `draft` has them, if what is being drawn for these were what is expected?"""
        ...

    def observe(self, chunks: Seq[Chunk], drawn: Seq[Drawn], seconds: float) -> None:
        """What a step has drawn, as far as it counts, and how long it took."""
        ...

    def failed(self) -> None:
        """The step has, that `draft` was asked about last: what it drafted may be why."""
        ...

    def forget(self, seq: Sequence) -> None:
        """It has left."""
        ...


class Engine(Protocol):
    """Synchronous; runs in the engine thread. Knows neither Redis nor HTTP nor scheduling."""

    info: EngineInfo

    def step(self, chunks: Seq[Chunk]) -> list[Drawn]:
        """One forward over all chunks; what is drawn for each (nothing where sample is False): a token, and one more
        after each draft that is equal to what was drawn in its place. Writes the KV of every computed token into the
        pool; does not modify the sequences. A sequence's tokens do not depend on the other chunks, nor on how its
        tokens were cut into chunks, nor on drafts."""
        ...
