"""Which drafts were right: those that equal what the model itself draws in their place, up to the first that does not.

A token's draw depends on nothing but the tokens before it (see `sampler`), so what is drawn with drafts, right or
wrong, is what is drawn without. *Pure.*
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from services.gpu_worker.batch import Answer, Chunk, Drawn, SampledToken
from services.gpu_worker.sampler import Draw
from services.gpu_worker.step_inputs import SequenceError


def draws_of(chunks: Seq[Chunk], sample_chunks: Seq[int]) -> list[Draw]:
    """What each sample row is drawn for. sample_chunks: the number of its chunk; a chunk's rows follow each other."""
    num_before: Counter[int] = Counter()
    forks: dict[int, Answer] = {}  # a grammar that fails on a draft must not fail the answer
    draws = []
    for number in sample_chunks:
        chunk, num_drafts = chunks[number], num_before[number]
        answer = chunk.seq.answer
        if num_drafts and answer is not None:
            answer = forks[number] if number in forks else forks.setdefault(number, answer.fork())
        draws.append(_draw_after(chunk, num_drafts, answer))
        num_before[number] += 1
    return draws


def _draw_after(chunk: Chunk, num_drafts: int, answer: Answer | None) -> Draw:
    seq, end = chunk.seq, chunk.start + chunk.count
    token_ids = seq.token_ids if end == len(seq.token_ids) else seq.token_ids[:end]
    if num_drafts:
        token_ids = [*token_ids, *chunk.draft_ids[:num_drafts]]
    if num_drafts and answer is not None and not answer.allows(token_ids[seq.num_prompt_tokens :]):
        answer = None  # behind such a draft nothing is taken
    num_unknown = max(0, end - len(seq.token_ids))
    return Draw(seq.params, seq.choice, token_ids, seq.num_prompt_tokens, num_unknown, answer, seq.sid)


def drawn_by_chunk(chunks: Seq[Chunk], sample_chunks: Seq[int], tokens: Seq[SampledToken | None]) -> list[Drawn]:
    """tokens: of each sample row, None where its logits are not finite. SequenceError where such a one is needed."""
    by_chunk: list[list[SampledToken | None]] = [[] for _ in chunks]
    for number, token in zip(sample_chunks, tokens, strict=True):
        by_chunk[number].append(token)
    return [_accepted(chunk, own) for chunk, own in zip(chunks, by_chunk, strict=True)]


def _accepted(chunk: Chunk, tokens: Seq[SampledToken | None]) -> Drawn:
    drawn: list[SampledToken] = []
    for token, draft_id in zip(tokens, (*chunk.draft_ids, -1), strict=False):
        if token is None:
            raise SequenceError(chunk.seq.sid, "its logits are not finite")
        drawn.append(token)
        if token.token_id != draft_id:
            break
    return tuple(drawn)
