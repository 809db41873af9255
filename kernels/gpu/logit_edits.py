"""Triton: change a few logits (see `kernels.logit_edits`)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import CompileCase, launch, on_paper
from kernels.logit_edits import BANNED, SEEN, LogitEdits, edit_logits_

EDITS = 256  # a program


@triton.jit(do_not_specialize=("num_edits",))
def _edit_kernel(
    logits_ptr,  # float32 [B, V], rows stride apart, changed
    rows_ptr,  # int32 [E]
    token_ids_ptr,  # int32 [E]
    biases_ptr,  # float32 [E]
    flags_ptr,  # int32 [E]
    counts_ptr,  # int32 [E]
    penalties_ptr,  # float32 [B, 3]
    divided_ptr,  # float32 [E]: the biased logits over their row's repetition penalty
    num_edits,
    stride,
    DIVIDES: tl.constexpr,  # only makes what is divided: a division is made of fused operations, the rest has none
    BANNED: tl.constexpr,
    SEEN: tl.constexpr,
    EDITS: tl.constexpr,
):
    """EDITS edits, each of a logit of its own."""
    places = tl.program_id(0) * EDITS + tl.arange(0, EDITS)
    mask = places < num_edits
    row = tl.load(rows_ptr + places, mask=mask, other=0).to(tl.int64)
    logit = logits_ptr + row * stride + tl.load(token_ids_ptr + places, mask=mask, other=0)
    x = tl.load(logit, mask=mask, other=0.0) + tl.load(biases_ptr + places, mask=mask, other=0.0)
    flags = tl.load(flags_ptr + places, mask=mask, other=0)
    x = tl.where((flags & BANNED) != 0, -float("inf"), x)
    repetition = tl.load(penalties_ptr + row * 3, mask=mask, other=1.0)
    if DIVIDES:
        tl.store(divided_ptr + places, tl.div_rn(x, repetition), mask=mask)
    else:
        divided = tl.load(divided_ptr + places, mask=mask, other=0.0)
        x = tl.where((flags & SEEN) != 0, tl.where(x > 0, divided, x * repetition), x)
        count = tl.load(counts_ptr + places, mask=mask, other=0)
        frequency = tl.load(penalties_ptr + row * 3 + 1, mask=mask, other=0.0)
        presence = tl.load(penalties_ptr + row * 3 + 2, mask=mask, other=0.0)
        x = tl.where(count > 0, x - count.to(tl.float32) * frequency - presence, x)
        tl.store(logit, x, mask=mask)


def edit_logits_triton(logits: torch.Tensor, edits: LogitEdits) -> None:
    num_edits = edits.rows.shape[0]
    divided = torch.empty(num_edits, dtype=torch.float32, device=logits.device)
    args = (logits, *edits.tensors(), divided, num_edits, logits.stride(0))
    constants: dict[str, Any] = {"BANNED": BANNED, "SEEN": SEEN, "EDITS": EDITS}
    grid = (triton.cdiv(num_edits, EDITS),)
    launch(_edit_kernel, grid, args, num_warps=4, DIVIDES=True, **constants)
    launch(_edit_kernel, grid, args, num_warps=4, unfused=True, DIVIDES=False, **constants)


def _case() -> CompileCase:
    logits = on_paper(8, 128256, dtype=torch.float32)
    rows, token_ids, flags, counts = (on_paper(4096, dtype=torch.int32) for _ in range(4))
    biases, penalties = on_paper(4096, dtype=torch.float32), on_paper(8, 3, dtype=torch.float32)
    edits = LogitEdits(rows, token_ids, biases, flags, counts, penalties)
    return CompileCase("4096 edits", lambda: edit_logits_(logits, edits))


COMPILE_CASES = (_case(),)
