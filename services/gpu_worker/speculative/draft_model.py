"""A smaller model that guesses what the target draws: an engine of its own, with a pool parallel to the target's.

Its pool has as many blocks of the same size, and a sequence's tokens lie in the blocks that it has in the target's, so
there is nothing to manage; only how far they are computed here is another matter (see `draft_blocks` for those that a
sequence finds sealed). It draws with the request's parameters and the noise of the position, so that where both models
think alike they draw alike. What it has computed of guesses that were wrong is computed again over them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from services.gpu_worker.batch import Chunk, Engine, SampledToken, Sequence
from services.gpu_worker.speculative.draft_blocks import DraftBlocks
from services.gpu_worker.speculative.proposer import NOTHING, Proposal
from services.gpu_worker.speculative.row_cost import RowCost
from services.gpu_worker.steps import Step, starter
from shared.speculative_config import MAX_SPECULATIVE_TOKENS

# How sure it is of a token, by the probability that it gave it: bounds of strengths, each a level of `acceptance`.
BOUNDS = (0.05, 0.15, 0.3, 0.45, 0.6, 0.75, 0.85, 0.92, 0.96, 0.985, 0.995)
STRENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)


def strength_of(logprob: float) -> int:
    probability = math.exp(min(0.0, logprob))
    return STRENGTHS[sum(probability >= bound for bound in BOUNDS)]


@dataclass(slots=True)
class _Shadow:
    """A sequence as this model sees it. own.token_ids: its tokens, num_known of them, and guesses behind them;
    own.num_computed of them are in the pool."""

    seq: Sequence
    own: Sequence
    num_known: int
    num_noted: int = 0  # whole blocks, in DraftBlocks
    guesses: list[SampledToken] = field(default_factory=list)

    @property
    def num_behind(self) -> int:
        return len(self.own.token_ids) - self.own.num_computed


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step of its engine. at: when it began."""

    chunks: Seq[Chunk]
    step: Step
    at: float


class DraftModel:
    """A `BatchProposer`. engine: of as many blocks as the target's, and of the target's vocabulary (see `vocab_map` for
    others). cost: what is known of its steps already."""

    def __init__(
        self, engine: Engine, cost: RowCost | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._start = starter(engine, overlap=engine.info.on_card)
        self._taken_at = 0.0
        self._cost = cost or RowCost()
        self._clock = clock
        self._blocks = DraftBlocks()
        self.max_drafts = MAX_SPECULATIVE_TOKENS
        self._shadows: dict[str, _Shadow] = {}

    def num_behind(self, seq: Sequence) -> int:
        shadow = self._shadows.get(seq.sid)
        if shadow is None or shadow.seq is not seq:
            size = self._engine.info.block_size
            return max(1, len(seq.token_ids) - size * self._blocks.num_held(seq.block_ids, seq.keys))
        return max(1, len(seq.token_ids) - min(shadow.own.num_computed, shadow.num_known))

    def seconds(self, num_sequences: int, num_drafts: int) -> float:
        return num_drafts * self._cost.seconds(num_sequences)

    def catch_up_seconds(self, num_tokens: int) -> float:
        return self._cost.seconds(num_tokens)

    def forget(self, seq: Sequence) -> None:
        """What of its tokens is sealed is still what was computed here."""
        shadow = self._shadows.get(seq.sid)
        if shadow is not None and shadow.seq is seq:
            self._update(shadow)
            del self._shadows[seq.sid]

    def propose(self, sequences: Seq[Sequence], most: Seq[int], num_tokens: int) -> list[Proposal]:
        """On a GPU a step begins before the one is over whose tokens it reads there, but for mapped vocabularies."""
        shadows = [self._follow(seq) for seq in sequences]
        chunks = self._catching_up(shadows, num_tokens)
        before: _Begun | None = None
        while chunks:
            begun: _Begun | None = self._begin(chunks)
            self._take(before)
            if begun is not None and not begun.step.may_be_followed:
                self._take(begun)
                begun = None
            drawing = {id(c.seq) for c in begun.chunks if c.sample} if begun else set()
            chunks = self._going_on(shadows, most, drawing)
            before = begun
        self._take(before)
        return [_proposal(s.guesses) for s in shadows]

    def _going_on(self, shadows: Seq[_Shadow], most: Seq[int], drawing: Set[int]) -> list[Chunk]:
        """One token of each whose last guess is known or being drawn, and that is to have more."""
        chunks = []
        for shadow, count in zip(shadows, most, strict=True):
            is_drawing = id(shadow.own) in drawing
            num_tokens = len(shadow.own.token_ids) + is_drawing
            if 0 < len(shadow.guesses) + is_drawing < count and self._has_room(shadow, num_tokens):
                chunks.append(Chunk(shadow.own, num_tokens - 1, 1, True))
        return chunks

    # --- sequences ---------------------------------------------------------------------------------------------------

    def _follow(self, seq: Sequence) -> _Shadow:
        """The shadow, with the tokens and blocks that the sequence has now."""
        shadow = self._shadows.get(seq.sid)
        if shadow is None or shadow.seq is not seq:
            params = seq.params.model_copy(update={"constraint": None, "logprobs": 0, "prompt_logprobs": None})
            own = Sequence(
                sid=seq.sid, epoch=seq.epoch, choice=seq.choice, params=params, num_prompt_tokens=seq.num_prompt_tokens,
                token_ids=list(seq.token_ids), block_ids=list(seq.block_ids),
            )  # fmt: skip
            shadow = _Shadow(seq, own, len(own.token_ids))
            shadow.num_noted = self._blocks.num_held(seq.block_ids, seq.keys)
            own.num_computed = min(shadow.num_noted * self._engine.info.block_size, len(own.token_ids) - 1)
            self._shadows[seq.sid] = shadow
        else:
            self._update(shadow)
        return shadow

    def _update(self, shadow: _Shadow) -> None:
        """Guesses that came true are computed; from the first that did not on, nothing is."""
        seq, own = shadow.seq, shadow.own
        right = shadow.num_known
        while right < min(len(own.token_ids), len(seq.token_ids)) and own.token_ids[right] == seq.token_ids[right]:
            right += 1
        own.num_computed = min(own.num_computed, right, len(seq.token_ids) - 1)
        own.token_ids[shadow.num_known :] = seq.token_ids[shadow.num_known :]
        shadow.num_known, shadow.guesses = len(seq.token_ids), []
        self._follow_blocks(shadow)
        self._note(shadow)

    def _follow_blocks(self, shadow: _Shadow) -> None:
        """A block may have become another one, equal to it, which this model has computed or not."""
        seq, own, size = shadow.seq, shadow.own, self._engine.info.block_size
        for index in range(-(-own.num_computed // size)):
            new = seq.block_ids[index]
            if own.block_ids[index] != new and not (index < len(seq.keys) and self._blocks.holds(new, seq.keys[index])):
                own.num_computed = index * size
                shadow.num_noted = min(shadow.num_noted, index)
                break
        own.block_ids[:] = seq.block_ids

    def _note(self, shadow: _Shadow) -> None:
        """Blocks that are sealed and computed here."""
        seq, size = shadow.seq, self._engine.info.block_size
        while shadow.num_noted < min(len(seq.keys), shadow.own.num_computed // size):
            self._blocks.fill(shadow.own.block_ids[shadow.num_noted], seq.keys[shadow.num_noted])
            shadow.num_noted += 1

    # --- steps -------------------------------------------------------------------------------------------------------

    def _catching_up(self, shadows: Seq[_Shadow], num_tokens: int) -> list[Chunk]:
        """One chunk of each that lacks little enough, up to the token after which it can guess."""
        chunks = []
        for shadow in sorted(shadows, key=lambda s: s.num_behind):
            if len(shadow.own.token_ids) > self._engine.info.max_model_len:
                continue
            behind = shadow.num_behind
            count = min(behind, 1 + num_tokens)
            num_tokens -= count - 1
            chunks.append(Chunk(shadow.own, shadow.own.num_computed, count, count == behind))
        return chunks

    def _has_room(self, shadow: _Shadow, num_tokens: int) -> bool:
        own, info = shadow.own, self._engine.info
        return num_tokens <= min(info.max_model_len, len(own.block_ids) * info.block_size)

    def _begin(self, chunks: Seq[Chunk]) -> _Begun:
        size, started = self._engine.info.block_size, self._clock()
        for chunk in chunks:
            end = chunk.start + chunk.count
            self._blocks.write(chunk.seq.block_ids[chunk.start // size : -(-end // size)])
        return _Begun(chunks, self._start(chunks), started)

    def _take(self, begun: _Begun | None) -> None:
        if begun is None:
            return
        chunks, drawn, ended = begun.chunks, begun.step.results(), self._clock()
        self._cost.observe(sum(c.count for c in chunks), ended - max(begun.at, self._taken_at))
        self._taken_at = ended
        for chunk, tokens in zip(chunks, drawn, strict=True):
            chunk.seq.num_computed += chunk.count
            if tokens:
                chunk.seq.token_ids.append(tokens[0].token_id)
                self._shadows[chunk.seq.sid].guesses.append(tokens[0])


def _proposal(guesses: Seq[SampledToken]) -> Proposal:
    if not guesses:
        return NOTHING
    return Proposal(tuple(g.token_id for g in guesses), tuple(strength_of(g.logprob) for g in guesses))
