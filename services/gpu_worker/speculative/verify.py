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
        chunk, scored = chunks[number], chunks[number].scored
        num_drafts = num_before[number] - len(scored)
        num_before[number] += 1
        if num_drafts < 0:
            draws.append(_score_of(chunk, scored[num_drafts] + 1))
            continue
        answer = chunk.seq.answer
        if num_drafts and answer is not None:
            answer = forks[number] if number in forks else forks.setdefault(number, answer.fork())
        draws.append(_draw_after(chunk, num_drafts, answer))
    return draws


def _score_of(chunk: Chunk, number: int) -> Draw:
    """Of the token with this number, which stands in the prompt."""
    seq = chunk.seq
    return Draw(seq.params, seq.choice, (), 0, sid=seq.sid, target=seq.token_ids[number])


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
    if len(tokens) == 1 and tokens[0] is not None:  # nearly always
        return (tokens[0],)
    drawn: list[SampledToken] = []
    expected = [*(token.token_id for token in tokens[: len(chunk.scored)] if token), *chunk.draft_ids, -1]
    for token, expected_id in zip(tokens, expected, strict=False):
        if token is None:
            raise SequenceError(chunk.seq.sid, "its logits are not finite")
        drawn.append(token)
        if token.token_id != expected_id:
            break
    return tuple(drawn)
