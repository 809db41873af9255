"""From a row of logits to a token: controls in a fixed order, then the argmax, of the logits or of logits plus noise.

Order: logit bias, what a grammar forbids, bans (min_tokens), penalties, temperature, top-k, top-p, min-p, draw. The
draw is Gumbel-max: the noise of a token is a function of (seed, choice, position, token id), so that nothing about the
batch, and no history but the sequence's own tokens, can change what is drawn. Ties go to the lowest id everywhere.
Sums over the vocabulary are exact (see `kernels.token_filter`). Log-probabilities are of the unmodified logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from kernels.gumbel import NoiseKey
from kernels.native.structs import address
from kernels.sample_tokens import ChosenToken, NativeOps, TokenChoice, sample_tokens
from services.gpu_worker.batch import Answer, SampledToken, mask_after
from shared.protocol import SamplingParams

GREEDY_BELOW = 1e-5  # a lower temperature is 0
LOGPROB_FLOOR = -9999.0  # JSON has no infinity


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row is drawn for. token_ids: prompt and output so far, of which the first num_prompt are prompt; there
    are num_unknown more that are not known yet. target: where nothing is drawn, the token of the prompt that stands
    there, of which only log-probability and rank are asked."""

    params: SamplingParams
    choice: int
    token_ids: Seq[int]
    num_prompt: int
    num_unknown: int = 0
    answer: Answer | None = None
    sid: str = ""
    target: int | None = None

    @property
    def position(self) -> int:
        return len(self.token_ids) + self.num_unknown - self.num_prompt

    def mask(self) -> bytes | None:
        """Which tokens its grammar allows; None for any. AnswerFailed."""
        return None if self.target is not None else mask_after(self.sid, self.answer, self.token_ids[self.num_prompt :])

    @property
    def token_choice(self) -> TokenChoice:
        p = self.params
        if self.target is not None:
            return TokenChoice(NoiseKey(0, 0, 0), temperature=0.0, num_top=p.prompt_logprobs)
        key = NoiseKey(p.seed, self.choice, self.position)
        return TokenChoice(key, 0.0 if self.is_greedy else p.temperature, p.top_k, p.top_p, p.min_p, p.logprobs)

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < GREEDY_BELOW

    @property
    def is_plain(self) -> bool:
        """The token is the argmax of the logits as they are, and nobody asks for log-probabilities."""
        return self.target is None and self.is_greedy and self.params.logprobs is None and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        return self.target is None and changes_logits(self.params, self.position)


def changes_logits(params: SamplingParams, position: int) -> bool:
    return params.constraint is not None or _edits_logits(params, position)


def _edits_logits(params: SamplingParams, position: int) -> bool:
    """Changes some of them by more than a grammar's forbidding them."""
    return bool(
        params.logit_bias
        or (params.stop_token_ids and position < params.min_tokens)
        or params.repetition_penalty != 1.0
        or (position and (params.frequency_penalty or params.presence_penalty))
    )


def needs_only_logits(params: SamplingParams, position: int) -> bool:
    """The token is the argmax of the logits, or of the logits over the temperature plus noise, and nothing more: of all
    tokens, or of those that a grammar allows."""
    filtered = params.temperature >= GREEDY_BELOW and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
    return params.logprobs is None and not filtered and not _edits_logits(params, position)


def validate(params: SamplingParams, vocab_size: int) -> str | None:
    """Why these parameters cannot be used with a vocabulary of this size, naming the field; None if they can."""
    for token_id in params.logit_bias:
        if not 0 <= token_id < vocab_size:
            return f"logit_bias: token id {token_id} is outside the vocabulary of {vocab_size}"
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            return f"stop_token_ids: {token_id} is outside the vocabulary of {vocab_size}"
    return None


def sample(logits: Iterable[torch.Tensor], draws: Seq[Draw], native: NativeOps | None = None) -> list[SampledToken]:
    """One token a row of logits (float32 [V] each, without NaN). Does not modify them; ValueError as `validate`.

    native: to draw with; the tokens are the same."""
    if not draws:
        return []
    logits = list(logits)
    if all(draw.is_plain for draw in draws):
        return [SampledToken(int(row.argmax())) for row in logits]
    for draw in draws:
        reason = validate(draw.params, logits[0].numel())
        if reason is not None:
            raise ValueError(reason)
    rows = [apply_controls(row, draw, native) for row, draw in zip(logits, draws, strict=True)]
    chosen = sample_tokens(rows, logits, [draw.token_choice for draw in draws], native)
    return [_sampled(*each) for each in zip(chosen, logits, draws, strict=True)]


def _sampled(chosen: ChosenToken, row: torch.Tensor, draw: Draw) -> SampledToken:
    def logprob(logit: float) -> float:
        return max(LOGPROB_FLOOR, logit - chosen.log_sum)

    top = tuple((token_id, logprob(logit)) for token_id, logit in chosen.top)
    if draw.target is None:
        return SampledToken(chosen.token_id, logprob(chosen.logit), top)
    logit = row[draw.target]
    num_better = int((row > logit).sum()) + int((row[: draw.target] == logit).sum())
    return SampledToken(draw.target, logprob(float(logit)), top, num_better + 1)


def _forbid(row: torch.Tensor, mask: bytes | None, native: NativeOps | None) -> None:
    """All tokens without a bit in the mask; the row may be longer than it is."""
    if mask is None:
        return
    if native is not None:
        native[0].forbid(address(row), row.numel(), mask, len(mask))
        return
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: row.numel()]
    row[: bits.size].masked_fill_(torch.from_numpy(bits) == 0, -torch.inf)
    row[bits.size :] = -torch.inf


def apply_controls(row: torch.Tensor, draw: Draw, native: NativeOps | None = None) -> torch.Tensor:
    """The logits after bias, bans and penalties; the row itself where nothing changes."""
    params = draw.params
    if not draw.changes_logits:
        return row
    row = row.clone()
    if params.logit_bias:
        row[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
    _forbid(row, draw.mask(), native)
    banned = list(params.stop_token_ids) if draw.position < params.min_tokens else []
    if banned:
        kept = row[banned]
        row[banned] = -torch.inf
        if row.max() == -torch.inf:  # there would be nothing to draw
            row[banned] = kept
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(draw.token_ids)))
        values, penalty = row[seen], params.repetition_penalty
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if draw.position and (params.frequency_penalty or params.presence_penalty):
        times = Counter(draw.token_ids[draw.num_prompt :])
        output, counts = list(times), torch.tensor(list(times.values()), dtype=torch.float32)
        row[output] = row[output] - counts * params.frequency_penalty - params.presence_penalty
    return row
