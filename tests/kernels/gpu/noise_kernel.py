"""The noise alone, as a kernel; imported in a test, when the interpreter is switched on."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.gumbel import gumbel_of


@triton.jit
def _noise_kernel(words_ptr, out_ptr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, COUNT)
    tl.store(out_ptr + places, gumbel_of(tl.load(words_ptr + places).to(tl.uint32, bitcast=True)))


def noise_of(words: torch.Tensor) -> torch.Tensor:
    """Of uint32 words held in int64; as many as a power of two."""
    out = torch.empty(words.numel())
    _noise_kernel[(1,)](words.to(torch.uint32).view(torch.int32), out, COUNT=words.numel())
    return out
