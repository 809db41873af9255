"""From a row of logits to a token: controls in a fixed order, then the argmax, of the logits or of logits plus noise.

Order: logit bias, bans (min_tokens), penalties, temperature, top-k, top-p, min-p, draw. The draw is Gumbel-max: the
noise of a token is a function of (seed, choice, position, token id), so that nothing about the batch, and no history
but the sequence's own tokens, can change what is drawn. Ties go to the lowest id everywhere. Sums over the vocabulary
run in one order whatever the batch or the number of threads. Log-probabilities are of the unmodified logits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from kernels.gumbel import NoiseKey, gumbel_noise_at
from kernels.gumbel_argmax import NativeOps, gumbel_argmax
from services.gpu_worker.batch import SampledToken
from shared.protocol import SamplingParams

GREEDY_BELOW = 1e-5  # a lower temperature is 0
LOGPROB_FLOOR = -9999.0  # JSON has no infinity
_LIKELY = -12.0  # scaled logits that top-p looks at first: nearly always enough, and far fewer than the vocabulary
_SUM_ROW = 256


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row is drawn for. token_ids: prompt and output so far, of which the first num_prompt are prompt."""

    params: SamplingParams
    choice: int
    token_ids: Seq[int]
    num_prompt: int

    @property
    def position(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def noise_key(self) -> NoiseKey:
        return NoiseKey(self.params.seed, self.choice, self.position)

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < GREEDY_BELOW

    @property
    def is_plain(self) -> bool:
        """The token is the argmax of the logits as they are, and nobody asks for log-probabilities."""
        return self.is_greedy and self.params.logprobs is None and not changes_logits(self.params, self.position)


def changes_logits(params: SamplingParams, position: int) -> bool:
    return bool(
        params.logit_bias
        or (params.stop_token_ids and position < params.min_tokens)
        or params.repetition_penalty != 1.0
        or (position and (params.frequency_penalty or params.presence_penalty))
    )


def needs_only_logits(params: SamplingParams, position: int) -> bool:
    """The token is the argmax of the logits, or of the logits over the temperature plus noise, and nothing more."""
    filtered = params.temperature >= GREEDY_BELOW and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
    return params.logprobs is None and not filtered and not changes_logits(params, position)


def validate(params: SamplingParams, vocab_size: int) -> str | None:
    """Why these parameters cannot be used with a vocabulary of this size, naming the field; None if they can."""
    for token_id in params.logit_bias:
        if not 0 <= token_id < vocab_size:
            return f"logit_bias: token id {token_id} is outside the vocabulary of {vocab_size}"
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            return f"stop_token_ids: {token_id} is outside the vocabulary of {vocab_size}"
    return None


def sample(logits: torch.Tensor, draws: Seq[Draw], native: NativeOps | None = None) -> list[SampledToken]:
    """One token a row of logits (float32 [S, V], without NaN). Does not modify them; ValueError as `validate`.

    native: to draw with; the tokens are the same."""
    if not draws:
        return []
    if all(draw.is_plain for draw in draws):
        return [SampledToken(token_id) for token_id in logits.argmax(-1).tolist()]
    for draw in draws:
        reason = validate(draw.params, logits.shape[1])
        if reason is not None:
            raise ValueError(reason)
    token_ids = draw_tokens([apply_controls(row, draw) for row, draw in zip(logits, draws, strict=True)], draws, native)
    return [
        SampledToken(token_id) if draw.params.logprobs is None else with_logprobs(row, token_id, draw.params.logprobs)
        for row, token_id, draw in zip(logits, token_ids, draws, strict=True)
    ]


def apply_controls(row: torch.Tensor, draw: Draw) -> torch.Tensor:
    """The logits after bias, bans and penalties; the row itself where nothing changes."""
    params = draw.params
    if not changes_logits(params, draw.position):
        return row
    row = row.clone()
    if params.logit_bias:
        row[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
    banned = set(params.stop_token_ids) if draw.position < params.min_tokens else set()
    if banned and len(banned) < row.numel():  # with every token banned there would be nothing to draw
        row[sorted(banned)] = -torch.inf
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(draw.token_ids)))
        values, penalty = row[seen], params.repetition_penalty
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if draw.position and (params.frequency_penalty or params.presence_penalty):
        times = Counter(draw.token_ids[draw.num_prompt :])
        output, counts = list(times), torch.tensor(list(times.values()), dtype=torch.float32)
        row[output] = row[output] - counts * params.frequency_penalty - params.presence_penalty
    return row


def draw_tokens(rows: Seq[torch.Tensor], draws: Seq[Draw], native: NativeOps | None = None) -> list[int]:
    """The token of each row of controlled logits. Rows are filtered one by one, their noise is computed together."""
    token_ids = [-1] * len(rows)
    open_rows: dict[int, torch.Tensor] = {}
    filtered: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # scaled logits and ids of the tokens left
    for i, (row, draw) in enumerate(zip(rows, draws, strict=True)):
        if draw.is_greedy:
            token_ids[i] = int(row.argmax())
            continue
        scaled = (row - row.max()) / draw.params.temperature
        kept = filtered_ids(scaled, draw.params)
        if kept is None:
            open_rows[i] = scaled
        else:
            filtered[i] = (scaled[kept], kept)
    if open_rows:
        keys = [draws[i].noise_key for i in open_rows]
        drawn = gumbel_argmax(torch.stack(list(open_rows.values())), keys, native)
        for i, token_id in zip(open_rows, drawn, strict=True):
            token_ids[i] = token_id
    if filtered:
        noises = gumbel_noise_at([draws[i].noise_key for i in filtered], [kept for _, kept in filtered.values()])
        for (i, (scores, kept)), noise in zip(filtered.items(), noises, strict=True):
            token_ids[i] = int(kept[(scores + noise).argmax()])
    return token_ids


def filtered_ids(scaled: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
    """Token ids that top-k, top-p and min-p leave, ascending; None for all. scaled: the largest is 0."""
    kept: torch.Tensor | None = None
    if 0 < params.top_k < scaled.numel():
        kept = top_ids(scaled, params.top_k)
    if params.top_p < 1.0:
        kept = _nucleus(scaled, kept, params.top_p)
    if params.min_p > 0.0:
        least = math.log(params.min_p)
        kept = (scaled >= least).nonzero().flatten() if kept is None else kept[scaled[kept] >= least]
    return None if kept is None else kept.sort().values


def top_ids(row: torch.Tensor, count: int) -> torch.Tensor:
    """The ids of the count largest values, best first, equal ones by id; so which of several equal ones is defined."""
    threshold = row.topk(count).values[-1]
    above = (row > threshold).nonzero().flatten()
    equal = (row == threshold).nonzero().flatten()[: count - above.numel()]
    ids = torch.cat((above, equal))
    return ids[row[ids].argsort(descending=True, stable=True)]


def _nucleus(scaled: torch.Tensor, candidates: torch.Tensor | None, top_p: float) -> torch.Tensor:
    """Of the candidates (best first; None: all), the fewest whose probabilities, from the best on, reach top_p."""
    if candidates is not None:
        reached = scaled[candidates].exp().double().cumsum(0)
        return candidates[: _prefix(reached, top_p * float(reached[-1]))]
    weights = scaled.exp()
    wanted = top_p * ordered_sum(weights)
    for candidates in ((scaled >= _LIKELY).nonzero().flatten(), torch.arange(scaled.numel())):
        ranked = candidates[scaled[candidates].argsort(descending=True, stable=True)]
        reached = weights[ranked].double().cumsum(0)
        if reached[-1] >= wanted:
            break
    return ranked[: _prefix(reached, wanted)]


def _prefix(reached: torch.Tensor, wanted: float) -> int:
    """How many come before the sum has reached what is wanted, and the one that reaches it."""
    return int((reached < wanted).sum()) + 1


def ordered_sum(values: torch.Tensor) -> float:
    """The sum of a vector, in an order that depends on its length alone (torch's depends on its threads)."""
    missing = -values.numel() % _SUM_ROW
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return float(padded.view(-1, _SUM_ROW).sum(-1).double().cumsum(0)[-1])


def with_logprobs(row: torch.Tensor, token_id: int, num_top: int) -> SampledToken:
    """The token with its log-probability and the num_top best alternatives, under the unmodified logits."""
    largest = row.max()
    log_sum = float(largest) + math.log(ordered_sum((row - largest).exp()))
    ids = top_ids(row, min(num_top, row.numel())).tolist() if num_top else []
    logits = row[[token_id, *ids]].double().tolist()
    logprobs = [max(LOGPROB_FLOOR, value - log_sum) for value in logits]
    return SampledToken(token_id, logprobs[0], tuple(zip(ids, logprobs[1:], strict=True)))
