"""Tokens of a step on the device: drawn from the logits where they are, read by the next step there, and by the host
when it asks.

What needs only the logits, greedy or with a temperature, is drawn on the device; the rest from a copy of its logits.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from kernels.gumbel_argmax import gumbel_draw, key_words
from services.gpu_worker.batch import SampledToken
from services.gpu_worker.gpu_inputs import upload
from services.gpu_worker.sampler import Draw, needs_only_logits, sample

NOT_FINITE = -1


class PendingTokens:
    """What a step has drawn or is about to."""

    def __init__(self, token_ids: torch.Tensor, by_host: dict[int, SampledToken]) -> None:
        """token_ids int64 [S] on the device, NOT_FINITE where there is none to draw; by_host: instead of these."""
        self._token_ids = token_ids
        self._by_host = by_host
        self._copy = torch.empty(token_ids.shape, dtype=torch.int64, pin_memory=token_ids.is_cuda)
        self._copy.copy_(token_ids, non_blocking=True)
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
        tokens = [SampledToken(i) if i != NOT_FINITE else None for i in self._copy.tolist()]
        return [self._by_host.get(n, token) for n, token in enumerate(tokens)]

    def fill_in(self, token_ids: torch.Tensor) -> None:
        """Puts the token of sample i where token_ids (on the device) has -1 - i. If none was drawn nobody will take the
        results of who reads it, so it may be any."""
        if self._token_ids.shape[0]:
            drawn = self._token_ids.clamp(min=0)[(-1 - token_ids).clamp(min=0, max=self._token_ids.shape[0] - 1)]
            token_ids.copy_(torch.where(token_ids < 0, drawn, token_ids))


def draw(logits: torch.Tensor, draws: Seq[Draw]) -> PendingTokens:
    """One token a row of logits (float32 [S, V] on a device). ValueError as `sampler.validate`."""
    if not draws:
        return PendingTokens(torch.empty(0, dtype=torch.int64, device=logits.device), {})
    words = key_words([d.token_choice.key for d in draws])
    temperatures = torch.tensor([d.token_choice.temperature for d in draws], dtype=torch.float32)
    words, temperatures = upload([words, temperatures], logits.device)
    largest = logits.amax(-1, keepdim=True)
    token_ids = logits.argmax(-1)
    if not all(d.is_greedy for d in draws):
        noisy = gumbel_draw((logits - largest) / temperatures.clamp(min=1e-30)[:, None], words)
        token_ids = torch.where(temperatures > 0, noisy, token_ids)
    token_ids = torch.where(largest[:, 0].isfinite(), token_ids, NOT_FINITE)
    rest = [n for n, d in enumerate(draws) if not needs_only_logits(d.params, d.position)]
    if not rest:
        return PendingTokens(token_ids, {})
    rows = logits[rest].cpu()
    finite = [n for n, row in zip(rest, rows, strict=True) if row.amax().isfinite()]
    drawn = sample(rows[[rest.index(n) for n in finite]], [draws[n] for n in finite])
    return PendingTokens(token_ids, dict(zip(finite, drawn, strict=True)))
