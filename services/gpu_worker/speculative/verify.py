"""Which drafts were right: those that equal what the model itself draws in their place, one behind the other.

A token's draw depends on nothing but the tokens before it (see `sampler`), so what is drawn with drafts, right or
wrong, is what is drawn without. *Pure.*
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace

from services.gpu_worker.batch import Answer, Chunk, Drawn, SampledToken
from services.gpu_worker.sampler import Draw
from services.gpu_worker.speculative.draft import ROOT, chain
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
        draws.append(_draw_after(chunk, num_drafts - 1, answer))
    return draws


def _score_of(chunk: Chunk, number: int) -> Draw:
    """Of the token with this number, which stands in the prompt."""
    seq = chunk.seq
    return Draw(seq.params, seq.choice, (), 0, sid=seq.sid, target=seq.token_ids[number])


def _draw_after(chunk: Chunk, place: int, answer: Answer | None) -> Draw:
    """place: of the draft that its row computes; ROOT: it computes the last token."""
    seq, end = chunk.seq, chunk.start + chunk.count
    token_ids = seq.token_ids if end == len(seq.token_ids) else seq.token_ids[:end]
    if place != ROOT:
        token_ids = [*token_ids, *chunk.draft.ids_to(place)]
    if place != ROOT and answer is not None and not answer.allows(token_ids[seq.num_prompt_tokens :]):
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
    num_scored = len(chunk.scored)
    drawn = [_known(chunk, token) for token in tokens[:num_scored]]
    if not chunk.sample:
        return tuple(drawn)
    place = ROOT
    while True:
        token = _known(chunk, tokens[num_scored + 1 + place])
        drawn.append(token)
        place = chunk.draft.child(place, token.token_id)
        if place == ROOT:
            return tuple(drawn)


def _known(chunk: Chunk, token: SampledToken | None) -> SampledToken:
    if token is None:
        raise SequenceError(chunk.seq.sid, "its logits are not finite")
    return token


def kept_of_trees(
    chunks: Seq[Chunk], drawn: Seq[Drawn], row_slots: Seq[int]
) -> tuple[list[Chunk], list[int], list[tuple[int, int]]]:
    """Of trees of drafts what was right, as if nothing else had been drafted: chunks, which of the rows are theirs, and
    from which slot to which K and V move, one after the other. row_slots: of the chunks' rows."""
    kept: list[Chunk] = []
    rows: list[int] = []
    moves: list[tuple[int, int]] = []
    first = 0
    for chunk, tokens in zip(chunks, drawn, strict=True):
        places = list(range(len(chunk.draft)))
        if not chunk.draft.is_chain:
            places = chunk.draft.follow(t.token_id for t in tokens[len(chunk.scored) :])
        end = first + chunk.count
        moves += [(row_slots[end + p], row_slots[end + i]) for i, p in enumerate(places) if p != i]
        rows += [*range(first, end), *(end + p for p in places)]
        kept.append(replace(chunk, draft=chain([chunk.draft.ids[p] for p in places])))
        first += chunk.num_rows
    return kept, rows, moves
