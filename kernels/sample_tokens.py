"""Draw a token a row of logits: temperature, top-k, top-p and min-p, then the argmax of what is left plus Gumbel noise.

The C function is headrace_sample; it gives the very tokens and sums of the torch code here, which is the
specification. See `kernels.token_filter` for what the filters mean, `kernels.gumbel` for the noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kernels.gumbel import NoiseKey, gumbel_noise_at
from kernels.gumbel_argmax import gumbel_argmax
from kernels.log_sums import log_sum
from kernels.native.library import NativeLibrary, Pool
from kernels.native.structs import MAX_TOP, Sampled, SamplingRow
from kernels.native.structs import NoiseKey as NativeKey
from kernels.philox import MASK
from kernels.token_filter import filtered_ids, token_weights, top_ids

NativeOps = tuple[NativeLibrary, Pool]


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """How a row's token is chosen. temperature 0 is the argmax; num_top: best tokens to tell of, None for no
    log-probabilities at all."""

    key: NoiseKey
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    num_top: int | None = None


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """log_sum is that of the row's exponentials; logits are of the token and of the best ones: all only where asked."""

    token_id: int
    logit: float = 0.0
    log_sum: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


def sample_tokens(
    rows: Sequence[torch.Tensor], raw: Iterable[torch.Tensor], choices: Sequence[TokenChoice],
    native: NativeOps | None = None,
) -> list[ChosenToken]:  # fmt: skip
    """rows: float32 [V] each, to draw from, the largest finite; raw: as many, that log-probabilities are of."""
    raw = list(raw)
    shapes = {tuple(t.shape) for t in (*rows, *raw)}
    if not len(rows) == len(choices) == len(raw) or len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
        raise ValueError(f"sample_tokens: {len(rows)} rows, {len(choices)} choices, {len(raw)} raw, shapes {shapes}")
    if any(t.dtype != torch.float32 for t in (*raw, *rows)):
        raise TypeError("sample_tokens: float32 expected")
    if not choices:
        return []
    return _native(rows, raw, choices, *native) if native is not None else sample_tokens_reference(rows, raw, choices)


def sample_tokens_reference(
    rows: Sequence[torch.Tensor], raw: Iterable[torch.Tensor], choices: Sequence[TokenChoice]
) -> list[ChosenToken]:
    """The specification. Rows are filtered one by one, their noise is computed together."""
    token_ids = [int(row.argmax()) for row in rows]
    open_rows: dict[int, torch.Tensor] = {}
    filtered: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # scaled logits and ids of the tokens left
    for i, (row, choice) in enumerate(zip(rows, choices, strict=True)):
        if choice.temperature == 0.0:
            continue
        scaled = (row - row.max()) / choice.temperature
        kept = filtered_ids(scaled, choice.top_k, choice.top_p, choice.min_p)
        if kept is None:
            open_rows[i] = scaled
        else:
            filtered[i] = (scaled[kept], kept)
    if open_rows:
        drawn = gumbel_argmax(torch.stack(list(open_rows.values())), [choices[i].key for i in open_rows])
        for i, token_id in zip(open_rows, drawn, strict=True):
            token_ids[i] = token_id
    if filtered:
        noises = gumbel_noise_at([choices[i].key for i in filtered], [kept for _, kept in filtered.values()])
        for (i, (scores, kept)), noise in zip(filtered.items(), noises, strict=True):
            token_ids[i] = int(kept[(scores + noise).argmax()])
    return [_chosen(*each) for each in zip(token_ids, raw, choices, strict=True)]


def _chosen(token_id: int, row: torch.Tensor, choice: TokenChoice) -> ChosenToken:
    if choice.num_top is None:
        return ChosenToken(token_id)
    largest = row.max()
    total = int(token_weights(row - largest).sum())
    ids = top_ids(row, min(choice.num_top, row.numel())).tolist() if choice.num_top else []
    logit, *best = row[[token_id, *ids]].tolist()
    return ChosenToken(token_id, logit, log_sum(float(largest), total), tuple(zip(ids, best, strict=True)))


def _native(
    rows: Sequence[torch.Tensor], raw: list[torch.Tensor], choices: Sequence[TokenChoice], library: NativeLibrary,
    pool: Pool,
) -> list[ChosenToken]:  # fmt: skip
    rows, raw = [row.contiguous() for row in rows], [row.contiguous() for row in raw]
    vocab_size = raw[0].numel()
    table = (SamplingRow * len(rows))()
    for i, (row, c) in enumerate(zip(rows, choices, strict=True)):
        key = NativeKey(c.key.seed & MASK, c.key.seed >> 32, c.key.position, c.key.choice)
        least = math.log(c.min_p) if c.min_p > 0.0 else -math.inf
        num_top = -1 if c.num_top is None else min(c.num_top, vocab_size, MAX_TOP)
        table[i] = SamplingRow(key, row.data_ptr(), raw[i].data_ptr(), c.top_p, c.temperature, least, c.top_k, num_top)
    scratch = torch.empty(library.sample_scratch(pool.pointer, len(rows), vocab_size))
    sampled = (Sampled * len(rows))()
    library.sample(pool.pointer, table, len(rows), vocab_size, scratch.data_ptr(), sampled)
    return [
        ChosenToken(got.token_id) if c.num_top is None else _with_sums(got)
        for c, got in zip(choices, sampled, strict=True)
    ]


def _with_sums(got: Sampled) -> ChosenToken:
    top = tuple(zip(got.top_ids[: got.num_top], got.top_logits[: got.num_top], strict=True))
    return ChosenToken(got.token_id, got.logit, log_sum(got.largest, got.total), top)
