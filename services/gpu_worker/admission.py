"""From a request's records and an `Admit` to a sequence that can run, or to why it cannot. *Pure.*

The service reads the records before the plan change is applied; whatever is wrong with them ends this sequence alone.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from services.gpu_worker.batch import Answer, EngineInfo, SampledToken, Sequence
from services.gpu_worker.block_map import BlockMap
from services.gpu_worker.commits import TokenLogprob
from services.gpu_worker.seals import SealedBlocks
from shared.protocol import SamplingParams, TokenChunk, log_start
from shared.records import RequestRecord, SequenceRecord
from shared.wire import ProtocolError, split_sequence_id, unpack_ids
from shared.worker_protocol import Admit

Validate = Callable[[SamplingParams, int], str | None]  # (parameters, vocabulary size) -> what is wrong with them


@dataclass(frozen=True, slots=True)
class Admission:
    """What the records say. output_ids: those in the durable log; logprobs: theirs, where the request asked; scores:
    what the log has of the prompt's tokens, from the second on, where it asked for that."""

    params: SamplingParams
    prompt_ids: list[int]
    salt: bytes
    output_ids: list[int]
    logprobs: list[TokenLogprob] | None
    prediction: tuple[int, ...] = ()
    scores: tuple[SampledToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Answered:
    """Comes some time after an `Admit` whose request has a constraint: what holds the answer to it, behind the tokens
    that the log had. problem: why there is nothing, for the client."""

    sid: str
    epoch: int
    answer: Answer | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class NotRunnable:
    """There is nothing to run: this place is not current any more (stale), or the records are unreadable (error)."""

    reason: str


def read_admission(
    admit: Admit, worker: str, request: RequestRecord | None, record: SequenceRecord | None, log: Seq[TokenChunk]
) -> Admission | NotRunnable:
    """ProtocolError when the records contradict each other.

    The log may be read before or after the record: if the record has the admitted epoch, nobody but this worker could
    have appended since.
    """
    if request is None or record is None:
        return NotRunnable("stale")
    if record.state != "placed" or record.epoch != admit.epoch or record.worker != worker:
        return NotRunnable("stale")
    params = request.spec.sampling
    output_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
    scores: list[SampledToken] = []
    position = request.spec.log_start
    for chunk in log:
        if chunk.first != position:
            raise ProtocolError(f"the log of {admit.sid} has a gap at {position}")
        position += len(chunk.ids)
        if chunk.first < 0:
            scores += scores_in(chunk)
            continue
        output_ids += chunk.ids
        if logprobs is not None:
            if chunk.logprobs is None:
                raise ProtocolError(f"the log of {admit.sid} lacks log-probabilities at {chunk.first}")
            logprobs += chunk.logprobs
    prediction = tuple(unpack_ids(request.spec.prediction))
    return Admission(
        params, request.prompt_ids, request.spec.salt, output_ids, logprobs, prediction=prediction, scores=tuple(scores)
    )


def scores_in(chunk: TokenChunk) -> list[SampledToken]:
    """Of one that lies in the prompt."""
    assert chunk.logprobs is not None and chunk.ranks is not None
    return [
        SampledToken(token_id, logprob, top, rank)
        for token_id, (logprob, top), rank in zip(chunk.ids, chunk.logprobs, chunk.ranks, strict=True)
    ]


def sequence_of(admit: Admit, admission: Admission, vocab_size: int) -> Sequence:
    """The sequence as it starts here; its blocks and cached prefix are for the running set to check. vocab_size: of the
    model, which cannot compute other tokens that a client predicts."""
    num_prompt_tokens, prediction = len(admission.prompt_ids), admission.prediction
    num_logged = len(admission.scores) + len(admission.output_ids)
    if max(prediction, default=0) >= vocab_size:
        prediction = tuple(t for t in prediction if t < vocab_size)
    return Sequence(
        sid=admit.sid, epoch=admit.epoch, choice=split_sequence_id(admit.sid)[1], params=admission.params,
        num_prompt_tokens=num_prompt_tokens, token_ids=admission.prompt_ids + admission.output_ids,
        block_ids=list(admit.block_ids), num_computed=admit.cached_length, salt=admission.salt, alone=admit.alone,
        cached_tokens=min(admit.cached_length, num_prompt_tokens - 1),
        num_committed=log_start(admission.params, num_prompt_tokens) + num_logged,
        awaits_answer=admission.params.constraint is not None, prediction=prediction,
        score_from=len(admission.scores),
    )  # fmt: skip


def whats_wrong(seq: Sequence, info: EngineInfo, validate: Validate) -> str:
    """Why no worker of this kind can run it, for the client; empty if this one can."""
    if seq.num_prompt_tokens < 1:
        return "prompt: empty"
    if seq.num_prompt_tokens + seq.draws > info.max_num_tokens:
        size = f"{seq.num_prompt_tokens} tokens{' and one more' * seq.draws}"
        return f"prompt: {size} are more than the {info.max_num_tokens} that fit"
    if max(seq.token_ids) >= info.vocab_size:
        return f"prompt: a token id is outside the vocabulary of {info.vocab_size}"
    return validate(seq.params, info.vocab_size) or ""


def why_refused(admit: Admit, seq: Sequence, pool_term: int, blocks: BlockMap, sealed: SealedBlocks) -> str:
    """Why its blocks cannot be given to it here and now, for the log; empty if they can.

    A cached prefix must be sealed under the keys of these very tokens; every other block must be free.
    """
    size, cached = sealed.block_size, admit.cached_length
    num_cached = cached // size
    if admit.pool_term < pool_term:
        return f"pool term {admit.pool_term} is over, it is {pool_term} now"
    if len(set(seq.block_ids)) < len(seq.block_ids) or len(seq.block_ids) * size < seq.num_prompt_tokens:
        return "its blocks do not hold the prompt"
    if cached % size or not 0 <= cached < len(seq.token_ids) or num_cached > len(seq.block_ids):
        return f"a cached prefix of {cached} tokens cannot be"
    if not all(map(blocks.is_free, seq.block_ids[num_cached:])):
        return "a block to write is another's"
    if cached > seq.score_from < seq.num_to_score:
        return "the cached prefix holds no log-probabilities, which are missing yet"
    held = [sealed.key_of(b) for b in seq.block_ids[:num_cached]]
    if held != sealed.prefix_keys(seq, num_cached) or blocks.spares.intersection(seq.block_ids):
        return "the cached prefix is not in these blocks"
    return ""


def finish_reason(seq: Sequence, max_num_tokens: int) -> str:
    """Why the sequence is over after its last token, or "" if it goes on.

    A stop token counts from position min_tokens on, and even where it is also the last token allowed.
    """
    position = seq.num_output_tokens - 1
    if position >= 0 and position >= seq.params.min_tokens and seq.token_ids[-1] in seq.params.stop_token_ids:
        return "stop"
    return "length" if is_full(seq, max_num_tokens) else ""


def is_full(seq: Sequence, max_num_tokens: int, num_drawing: int = 0) -> bool:
    """Does it have all the tokens that it may have, with so many more?"""
    return (
        seq.num_output_tokens + num_drawing >= seq.params.max_tokens
        or len(seq.token_ids) + num_drawing >= max_num_tokens
    )
