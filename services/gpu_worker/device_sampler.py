"""Tokens of a step on the device: drawn where the logits are, read there by the next step, by the host when it asks.

The order of controls is `sampler`'s, and the tokens and log-probabilities are its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from kernels.draw_tokens import NOT_FINITE, draw_rows, draw_tokens
from kernels.log_sums import log_sum, log_sums, row_parts
from kernels.logit_edits import BANNED, SEEN, LogitEdits, edit_logits_
from kernels.token_mask import forbid_, num_words
from services.gpu_worker.batch import SampledToken
from services.gpu_worker.gpu_inputs import upload
from services.gpu_worker.sampler import LOGPROB_FLOOR, Draw, validate


class PendingTokens:
    """What a step has drawn or is about to: int64 [S] on the device, NOT_FINITE where there is none to draw."""

    def __init__(self, token_ids: torch.Tensor, logprobs: _Logprobs | None = None) -> None:
        self._token_ids = token_ids
        self._logprobs = logprobs
        self._copies = [_on_host(t) for t in (token_ids, *(logprobs.tensors if logprobs else ()))]
        self._ended = torch.cuda.Event() if token_ids.is_cuda else None  # type: ignore[no-untyped-call]
        if self._ended is not None:
            self._ended.record()

    @property
    def are_known(self) -> bool:
        return self._ended is None or bool(self._ended.query())  # type: ignore[no-untyped-call]

    def wait(self) -> list[SampledToken | None]:
        """None where the logits are not finite."""
        if self._ended is not None:
            self._ended.synchronize()
        tokens = [SampledToken(i) if i != NOT_FINITE else None for i in self._copies[0].tolist()]
        if self._logprobs is not None:
            for row, told in self._logprobs.told(*(copy.tolist() for copy in self._copies[1:])).items():
                tokens[row] = None if tokens[row] is None else told
        return tokens

    def fill_in(self, token_ids: torch.Tensor) -> None:
        """Puts the token of sample i where token_ids (on the device) has -1 - i. If none was drawn nobody will take the
        results of who reads it, so it may be any."""
        if self._token_ids.shape[0]:
            drawn = self._token_ids.clamp(min=0)[(-1 - token_ids).clamp(min=0, max=self._token_ids.shape[0] - 1)]
            token_ids.copy_(torch.where(token_ids < 0, drawn, token_ids))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is there once what is in the queue has run."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """rows: those that ask, and for how many of the best tokens. tensors, of these rows: the tokens that are asked
    about, their logits and ranks, the largest, sums of weights, ids and logits of the best."""

    rows: dict[int, int]
    tensors: tuple[torch.Tensor, ...]

    def told(
        self, tokens: list[int], logits: list[float], ranks: list[int], largest: list[float], totals: list[int],
        ids: list[list[int]], best: list[list[float]],
    ) -> dict[int, SampledToken]:  # fmt: skip
        told = {}
        for n, (row, num_top) in enumerate(self.rows.items()):
            if totals[n] > 0:  # else the logits are not finite
                whole = log_sum(largest[n], totals[n])
                top = zip(ids[n][:num_top], best[n][:num_top], strict=True)
                told[row] = SampledToken(
                    tokens[n],
                    max(LOGPROB_FLOOR, logits[n] - whole),
                    tuple((token_id, max(LOGPROB_FLOOR, logit - whole)) for token_id, logit in top),
                    ranks[n],
                )
        return told


def draw(logits: torch.Tensor, draws: Seq[Draw]) -> PendingTokens:
    """One token a row of logits (float32 [S, V] on a device), which it may change. ValueError as `sampler.validate`."""
    if not draws:
        return PendingTokens(torch.empty(0, dtype=torch.int64, device=logits.device))
    for d in draws:
        reason = validate(d.params, logits.shape[1])
        if reason is not None:
            raise ValueError(reason)
    asked = ((n, d.token_choice.num_top) for n, d in enumerate(draws))
    wanted = {n: min(count, logits.shape[1]) for n, count in asked if count is not None}
    rows, masks = draw_rows([d.token_choice for d in draws]), masks_of(draws, logits.shape[1])
    edits = edits_of(draws, logits.shape[1], masks)
    targets = [-1 if (target := draws[n].target) is None else target for n in wanted]
    asking = [torch.tensor(values, dtype=torch.int64) for values in (list(wanted), targets)]
    there = upload([*rows.tensors(), *asking, *_packed(masks), *edits.tensors()], logits.device)
    raw = logits.index_select(0, there[5]) if wanted else None  # before it is changed
    if masks:
        forbid_(logits, there[7], there[8])
    if edits.rows.shape[0]:
        edit_logits_(logits, LogitEdits(*there[9:]))
    token_ids = draw_tokens(logits, rows.with_tensors(there[:5]))
    if raw is None:
        return PendingTokens(token_ids)
    asked_ids = torch.where(there[6] < 0, token_ids.index_select(0, there[5]).clamp(min=0), there[6])
    logits_of = raw.gather(1, asked_ids[:, None])
    ranks = torch.zeros_like(asked_ids)
    if max(targets) >= 0:
        ranks = torch.where(there[6] < 0, ranks, _ranks(raw, asked_ids, logits_of))
    sums = log_sums(raw, max(wanted.values()))
    return PendingTokens(token_ids, _Logprobs(wanted, (asked_ids, logits_of[:, 0], ranks, *sums.tensors())))


def _ranks(raw: torch.Tensor, token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Of one token a row, among all, the best being 1; of equal ones the lower id comes first."""
    numbers, num_columns = torch.arange(raw.shape[1], device=raw.device), raw.shape[1]
    ranks = []
    own = row_parts(token_ids[:, None], num_columns), row_parts(logits, num_columns)
    for rows, ids, of_ids in zip(row_parts(raw), *own, strict=True):
        before = numbers < ids
        better = ((rows == of_ids) & before).logical_or_(rows > of_ids)
        del before
        ranks.append(better.sum(-1, dtype=torch.int32) + 1)  # summed as they are typed: int64 would be twice the logits
    return torch.cat(ranks)


def needs_history(draw: Draw) -> bool:
    """Must all tokens before be known, to draw this one?"""
    p = draw.params
    if draw.target is not None:
        return False
    penalised = p.repetition_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0
    return penalised or p.constraint is not None


Mask = np.ndarray[tuple[int], np.dtype[np.uint8]]  # bits of the vocabulary, filled up to whole words


def masks_of(draws: Seq[Draw], vocab_size: int) -> dict[int, Mask]:
    """What the rows' grammars allow, of those that forbid something. AnswerFailed."""
    masks = {}
    for row, d in enumerate(draws):
        allowed = d.mask()
        if allowed is not None:
            mask = np.zeros(num_words(vocab_size) * 4, np.uint8)
            given = np.frombuffer(allowed, np.uint8)[: len(mask)]
            mask[: len(given)] = given
            masks[row] = mask
    return masks


def _packed(masks: dict[int, Mask]) -> tuple[torch.Tensor, torch.Tensor]:
    words = np.stack(list(masks.values())).view(np.int32) if masks else np.zeros((0, 0), np.int32)
    return torch.tensor(list(masks), dtype=torch.int32), torch.from_numpy(words)


def edits_of(draws: Seq[Draw], vocab_size: int, masks: Mapping[int, Mask]) -> LogitEdits:
    """What bias, bans and penalties change, on the host."""
    rows: list[int] = []
    token_ids: list[int] = []
    biases: list[float] = []
    flags: list[int] = []
    counts: list[int] = []
    for row, d in enumerate(draws):
        if not d.changes_logits:
            continue
        p = d.params
        banned = _banned(d, vocab_size, masks.get(row))
        seen = set(d.token_ids) if p.repetition_penalty != 1.0 else set()
        drawn = Counter(d.token_ids[d.num_prompt :] if p.frequency_penalty or p.presence_penalty else ())
        for token_id in {*p.logit_bias, *banned, *seen, *drawn}:
            rows.append(row)
            token_ids.append(token_id)
            biases.append(p.logit_bias.get(token_id, 0.0))
            flags.append(BANNED * (token_id in banned) + SEEN * (token_id in seen))
            counts.append(drawn[token_id])
    penalties = [(d.params.repetition_penalty, d.params.frequency_penalty, d.params.presence_penalty) for d in draws]
    ints = [torch.tensor(values, dtype=torch.int32) for values in (rows, token_ids, flags, counts)]
    floats = [torch.tensor(values, dtype=torch.float32) for values in (biases, penalties)]
    return LogitEdits(ints[0], ints[1], floats[0], ints[2], ints[3], floats[1])


def _banned(draw: Draw, vocab_size: int, mask: Mask | None) -> set[int]:
    """None where they are all there is to draw."""
    banned = set(draw.params.stop_token_ids) if draw.position < draw.params.min_tokens else set()
    if mask is None:
        return banned if len(banned) < vocab_size else set()
    left = mask.copy()
    for token_id in banned:
        left[token_id // 8] &= ~(1 << token_id % 8) & 0xFF
    return banned if np.unpackbits(left, bitorder="little")[:vocab_size].any() else set()
