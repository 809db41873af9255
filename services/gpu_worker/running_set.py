"""The worker's running set: which sequences it runs, in which blocks, and what others must be told. *Pure.*

Single point of control for everything that plan changes and finished steps do to sequences. Changes are applied in the
order of the plan stream, before a step begins. Refuses instead of raising: what a scheduler asks for may be outdated.
- A change of a lower run term than the highest `TakeOver` is ignored, one of another epoch too. An `Admit` under an
  older pool term is refused; other changes under it are ignored, since the scheduler asks for the whole running state
  when a pool's term has changed.
- No block gets two writers (see `block_changes`). A cached prefix must be sealed here under the keys of these very
  tokens; every other block handed over must be free here. What a refused `Extend` or `Remap` was for ends as refused,
  for then the scheduler and the worker disagree about its blocks, and a new place is the way to agree again.

Knows no Redis, no clock and no engine. Not thread-safe: the engine loop's lock guards it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import cast

from services.gpu_worker.admission import (
    Admission,
    Answered,
    NotRunnable,
    Validate,
    finish_reason,
    is_full,
    sequence_of,
    whats_wrong,
    why_refused,
)
from services.gpu_worker.batch import AnswerFailed, Chunk, Drafter, Drawn, EngineInfo, Sequence
from services.gpu_worker.block_changes import BlockChanges
from services.gpu_worker.block_map import BlockMap
from services.gpu_worker.commits import Ledger, Place
from services.gpu_worker.composer import Budget, compose
from services.gpu_worker.drafting import NOTHING, Drafting, Prepared
from services.gpu_worker.outbox import Outbox
from services.gpu_worker.seals import SealedBlocks
from services.gpu_worker.step_limit import NO_LIMIT
from shared.protocol import FinishReason, Outcome
from shared.wire import Message
from shared.worker_protocol import (
    Admit,
    Cancel,
    Extend,
    ListInventory,
    Preempt,
    Reclaim,
    Remap,
    SetPolicy,
    Taken,
    TakeOver,
)

log = logging.getLogger(__name__)

ENGINE_ERROR = "the engine failed on this request"


@dataclass(frozen=True, slots=True)
class Change:
    """One entry of the plan stream. kind: run or pool; term: its sender's; admission comes with an `Admit`."""

    kind: str
    term: int
    message: Message
    admission: Admission | NotRunnable | None = None


class RunningSet:
    """capacity bounds what a policy may ask for. drafter: who guesses tokens, if anybody does. counts: events since the
    start of the process, for metrics."""

    def __init__(
        self, info: EngineInfo, capacity: Budget, validate: Validate, drafter: Drafter | None = None, *,
        enable_prefix_caching: bool = True,
    ) -> None:  # fmt: skip
        self.info = info
        self.sequences: dict[str, Sequence] = {}  # in order of admission
        self.blocks = BlockMap(info.num_blocks)
        self.sealed = SealedBlocks(info.block_size, info.variant)
        self.ledger = Ledger()
        self.outbox = Outbox()
        self.questions: list[TakeOver | ListInventory] = []  # to be answered, in order
        self.counts: Counter[str] = Counter()
        self.run_term = 0
        self.pool_term = 0
        self.budget = capacity
        self.drafting = Drafting(drafter, info, self.blocks, self._take_spare)
        self.starved: frozenset[str] = frozenset()
        self._block_changes = BlockChanges(self.blocks, self.sealed, self.outbox, self.counts)
        self._capacity = capacity
        self._validate = validate
        self._seals_blocks = enable_prefix_caching
        self._turn = 0

    @property
    def has_work(self) -> bool:
        return bool(self.sequences or len(self.ledger))

    def places(self) -> list[Place]:
        """All that is placed here: running, or over and not yet in the log."""
        return self.ledger.places()

    def reset(self) -> None:
        """A new life: nothing of the old one is valid but the bytes in sealed blocks."""
        for seq in self.sequences.values():
            self.drafting.drafter.forget(seq)
        self.sequences.clear()
        self.blocks.clear()
        self.ledger.clear()
        self.outbox.clear()
        self.questions.clear()
        self.run_term = self.pool_term = 0
        self.budget = self._capacity
        self.starved = frozenset()

    # --- plan changes ------------------------------------------------------------------------------------------------

    def apply(self, change: Change | Answered) -> None:
        if isinstance(change, Answered):
            self._answer(change)
            return
        message = change.message
        if change.kind == "pool":
            if isinstance(message, ListInventory) and message.pool_term >= self.pool_term:
                self.pool_term = message.pool_term
                self._ask(message)
            return
        if change.term < self.run_term:
            self.counts["fenced"] += 1
            return
        match message:
            case TakeOver():
                self.run_term = message.term
                self._ask(message)
            case Admit():
                self._admit(message, change.admission)
            case SetPolicy():
                wanted = Budget(message.max_num_batched_tokens, message.max_num_seqs, message.prefill_chunk)
                self.budget = wanted.within(self._capacity)
            case Cancel() | Preempt():
                self._stop(message)
            case Extend() | Remap() | Reclaim():
                if message.pool_term < self.pool_term:
                    self.counts["fenced"] += 1
                else:
                    self._change_blocks(message)

    def _ask(self, question: TakeOver | ListInventory) -> None:
        """One asked again, before the first was answered, is answered once, to the last who asked."""
        self.questions = [q for q in self.questions if type(q) is not type(question)] + [question]

    def answered(self, question: TakeOver | ListInventory) -> None:
        """Not where it has been asked again meanwhile."""
        self.questions = [q for q in self.questions if q is not question]

    def _admit(self, admit: Admit, admission: Admission | NotRunnable | None) -> None:
        known = self.sequences.get(admit.sid)
        if self.ledger.has(admit.sid, admit.epoch):
            return  # a repeat, or overtaken
        if known is not None:
            self.ledger.drop(known.sid, known.epoch)
            self._remove(known, "stale")
        if not isinstance(admission, Admission):
            self._note_end(admit.sid, admit.epoch, admission.reason if admission else "stale")
            return
        seq = sequence_of(admit, admission, self.info.vocab_size)
        problem = whats_wrong(seq, self.info, self._validate)
        reason = "" if problem or seq.is_scoring else finish_reason(seq, self.info.max_num_tokens)
        if problem or reason:  # over before it begins: holds nothing, says so through the log
            self.ledger.open(seq, admission.logprobs, admission.scores)
            self._conclude(seq, "error" if problem else reason, "invalid_request" if problem else "", problem)
            return
        refusal = why_refused(admit, seq, self.pool_term, self.blocks, self.sealed)
        if refusal:
            log.warning("%s refused: %s", admit.sid, refusal)
            self._note_end(admit.sid, admit.epoch, "refused")
            return
        seq.num_sealed = admit.cached_length // self.info.block_size
        seq.keys = self.sealed.prefix_keys(seq, seq.num_sealed)
        self.sealed.forget(seq.block_ids[seq.num_sealed :])
        self.blocks.hold(seq.sid, seq.block_ids)
        self.sequences[seq.sid] = seq
        self.ledger.open(seq, admission.logprobs, admission.scores)
        self.counts["cached_tokens"] += seq.cached_tokens

    def awaits_answer(self, sid: str, epoch: int) -> bool:
        seq = self._current(sid, epoch)
        return seq is not None and seq.awaits_answer

    def _answer(self, answered: Answered) -> None:
        seq = self._current(answered.sid, answered.epoch)
        if seq is None or not seq.awaits_answer:
            return
        seq.answer, seq.awaits_answer = answered.answer, False
        if answered.answer is None:
            self._conclude(seq, "error", "invalid_request", answered.problem)

    def _stop(self, message: Cancel | Preempt) -> None:
        seq = self._current(message.sid, message.epoch)
        if seq is None:
            return
        if isinstance(message, Preempt):
            self.ledger.close(seq, None)
            self._remove(seq, "preempted")
        else:
            self.ledger.drop(seq.sid, seq.epoch)
            self._remove(seq, "cancelled")

    def _change_blocks(self, message: Extend | Remap | Reclaim) -> None:
        if isinstance(message, Reclaim):
            self._block_changes.reclaim(message)
            return
        if isinstance(message, Extend) and not message.sid:
            self._block_changes.grant(message)
            return
        seq = self._current(message.sid, message.epoch)
        if seq is not None and not self._block_changes.apply(seq, message):
            log.warning("%s ends: %s cannot be applied to its blocks", seq.sid, message.TAG)
            self.ledger.close(seq, None)
            self._remove(seq, "refused")

    # --- steps -------------------------------------------------------------------------------------------------------

    def prepare(self, max_prefill_tokens: int, max_num_tokens: int = NO_LIMIT, *, may_think: bool = True) -> Prepared:
        """The next step, of at most max_num_tokens; takes spare blocks for sequences that need one. No chunks: nobody
        can go on. With a step in flight it is the one after that, also for a sequence that may turn out to have ended
        there: its row is computed in vain, in a slot of its own. To be begun by `draft` before anything is applied;
        may_think: between the two a model may guess."""
        most = self.info.max_num_tokens
        ready: list[Sequence] = []
        starving: list[str] = []
        for seq in self.sequences.values():
            if seq.awaits_answer or (is_full(seq, most, seq.num_drawing) and not seq.is_scoring):
                continue
            if self._has_slot(seq):
                ready.append(seq)
            else:
                starving.append(seq.sid)
        starved = frozenset(starving)
        if starved != self.starved:
            self.starved = starved
            self.outbox.touch()
        if not ready:
            return NOTHING
        self._turn += 1
        budget = self.budget
        if max_num_tokens < budget.max_num_batched_tokens:
            budget = replace(budget, max_num_batched_tokens=max_num_tokens)
        chunks = compose(
            ready, budget, block_size=self.info.block_size, max_prefill_tokens=max_prefill_tokens, turn=self._turn
        )
        return self.drafting.prepare(chunks, budget, len(self.sequences), may_think=may_think)

    def draft(self, prepared: Prepared) -> list[Chunk]:
        """Begins a step that is prepared, with drafts; empty if nobody is left in it."""
        chunks = self.drafting.with_drafts(prepared, self.sequences.values())
        self.begin(chunks)
        return chunks

    def expects_drafts(self) -> bool:
        """Would the next step have some, if the tokens of those in flight were known?"""
        return self.drafting.expects(self.sequences.values(), self.budget)

    def begin(self, chunks: Seq[Chunk]) -> None:
        """These are being computed from now on. Only to repeat them after `recall`: `draft` does it by itself."""
        for chunk in chunks:
            chunk.seq.num_ahead += chunk.count
            chunk.seq.num_drawing += chunk.sample

    def recall(self) -> None:
        """A step has failed: nothing of those in flight counts."""
        self.drafting.drafter.failed()
        for seq in self.sequences.values():
            seq.num_ahead = seq.num_drawing = 0

    def _has_slot(self, seq: Sequence) -> bool:
        """For its next token to compute; takes a spare block where its own are full."""
        return seq.next_position < len(seq.block_ids) * self.info.block_size or self._take_spare(seq)

    def _take_spare(self, seq: Sequence) -> bool:
        block_id = self.blocks.take_spare()
        if block_id is None:
            return False
        taken = Taken.unchecked(sid=seq.sid, epoch=seq.epoch, index=len(seq.block_ids), block_id=block_id)
        self.blocks.hold(seq.sid, [block_id])
        seq.block_ids.append(block_id)
        self.outbox.took(taken)
        if len(self.blocks.spares) < len(self.sequences):
            self.outbox.touch()  # they would not last until the next regular report
        return True

    def advance(self, chunks: Seq[Chunk], drawn: Seq[Drawn], seconds: float = 0.0) -> int:
        """What the oldest step in flight has computed and drawn; how many of its tokens count: those of sequences that
        have left do not, nor those behind an end. seconds: how long it took, if that is known."""
        taken = [self._take(chunk, tokens) for chunk, tokens in zip(chunks, drawn, strict=True)]
        self.drafting.drafter.observe(chunks, taken, seconds)
        return sum(map(len, taken))

    def _take(self, chunk: Chunk, tokens: Drawn) -> Drawn:
        """Those that count."""
        seq = chunk.seq
        if self.sequences.get(seq.sid) is not seq:
            return ()
        assert seq.num_computed == chunk.start, (seq.sid, seq.num_computed, chunk.start)
        seq.num_ahead -= chunk.count
        seq.num_drawing -= chunk.sample
        if num_scored := len(chunk.scored):
            self.ledger.scored(seq, tokens[:num_scored])
            tokens = tokens[num_scored:]
        num_before = len(seq.token_ids)
        reason = self._append(seq, tokens)
        # all but the last of what was drawn were drafts, and so they are computed
        seq.num_computed = len(seq.token_ids) - 1 if tokens else chunk.start + chunk.count
        if self._seals_blocks:
            self._seal(seq)
        if not seq.draws and seq.num_computed >= seq.num_to_score:
            reason = "length"
        if reason:
            self._conclude(seq, reason)
        return tokens[: len(seq.token_ids) - num_before]

    def _append(self, seq: Sequence, tokens: Drawn) -> str:
        """Up to the token that ends it; why that does, or ""."""
        for token in tokens:
            seq.token_ids.append(token.token_id)
            self.ledger.drew(seq, token)
            reason = finish_reason(seq, self.info.max_num_tokens)
            if reason:
                return reason
        return ""

    def _seal(self, seq: Sequence) -> None:
        """Whole blocks that are computed now. Others may wait for those of a prompt; those of an answer have time."""
        if (seq.num_sealed + 1) * self.info.block_size > seq.num_computed:
            return
        was_prefill = seq.num_sealed * self.info.block_size < seq.num_prompt_tokens
        self.outbox.sealed(self.sealed.seal_computed(seq))
        if was_prefill:
            self.outbox.touch()

    def fail(self, seq: Sequence) -> None:
        """The engine cannot compute this one, even alone."""
        if self.sequences.get(seq.sid) is seq:
            self._conclude(seq, "error", "engine_error", ENGINE_ERROR)

    def fail_answer(self, chunks: Seq[Chunk], error: AnswerFailed) -> None:
        """In a step of these chunks. One that had drafts stays: the grammar may have failed behind a wrong one."""
        for seq in (c.seq for c in chunks if c.seq.sid == error.sid and not c.draft):
            if self.sequences.get(seq.sid) is seq:
                self._conclude(seq, "error", "grammar_too_complex", f"structured output: {error.reason}")

    # --- ends --------------------------------------------------------------------------------------------------------

    def dropped(self, sid: str, epoch: int, reason: str) -> None:
        """Redis says that this place is over; its account is gone already."""
        seq = self._current(sid, epoch)
        if seq is not None:
            seq.finish = reason
            self._remove(seq, reason)

    def release_all(self, kept: Collection[Place] = ()) -> list[Place]:
        """The worker stops: what is drawn goes into the log, and others go on; who they are. kept: not these."""
        released = [s for s in self.sequences.values() if (s.sid, s.epoch) not in kept]
        for seq in released:
            self.ledger.close(seq, None)
            self._remove(seq, "preempted")
        return [(seq.sid, seq.epoch) for seq in released]

    def _conclude(self, seq: Sequence, reason: str, code: str = "", message: str = "") -> None:
        """Ends a sequence with an outcome that goes through the log."""
        seq.finish = reason
        num_tokens = -1 if self.ledger.is_scoring(seq) else seq.num_output_tokens
        outcome = Outcome(reason=cast(FinishReason, reason), num_tokens=num_tokens, code=code, message=message)
        self.ledger.close(seq, outcome)
        if self.sequences.get(seq.sid) is seq:
            self._remove(seq, reason)
        else:
            self._note_end(seq.sid, seq.epoch, reason)

    def _remove(self, seq: Sequence, reason: str) -> None:
        del self.sequences[seq.sid]
        self.drafting.drafter.forget(seq)
        self.blocks.release(seq.sid, seq.block_ids)
        self._note_end(seq.sid, seq.epoch, reason)

    def _note_end(self, sid: str, epoch: int, reason: str) -> None:
        self.outbox.ended(sid, epoch, reason)
        self.counts[f"ended_{reason}"] += 1

    def _current(self, sid: str, epoch: int) -> Sequence | None:
        seq = self.sequences.get(sid)
        return seq if seq is not None and seq.epoch == epoch else None
