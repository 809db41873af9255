"""What others take for a GPU's ops, side by side: cuBLAS, torch's own attention, and FlashInfer where it is installed.

How FlashInfer is called has been read in its documentation alone: no GPU has been at hand.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from kernels.scaled_rows import scale_rows
from tests.bench.gpu_cases import Sizes

Runs = Iterator[tuple[str, Callable[[], object]]]
BLOCK_SIZE = 16


def products(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Runs:
    w = torch.randn(2 * sizes.inner, sizes.hidden, device=device).to(dtype)
    for rows in sizes.rows:
        x = torch.randn(rows, sizes.hidden, device=device).to(dtype)
        yield f"matmul dense {rows}: cuBLAS", lambda x=x: F.linear(x, w)
    codes = scale_rows(w.cpu().float(), torch.float8_e4m3fn)
    q, scale = codes.q.to(device), codes.scale.t().contiguous().to(device)
    for rows in sizes.rows:
        x8 = torch.ones(rows, sizes.hidden, device=device).to(torch.float8_e4m3fn)
        x_scale = torch.ones(rows, 1, device=device)
        yield (
            f"matmul fp8 {rows}: torch._scaled_mm",
            lambda x=x8, s=x_scale: torch._scaled_mm(x, q.t(), s, scale, out_dtype=dtype),
        )


def attention(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Runs:
    """Keys and values lie one after the other here, not in blocks."""
    for name, batch, rows in (("decode", max(sizes.batches), 1), ("chunk", 1, sizes.chunk)):
        length = max(sizes.context, rows)
        q = torch.randn(batch, sizes.heads, rows, sizes.dim, device=device).to(dtype)
        k, v = (torch.randn(batch, sizes.kv_heads, length, sizes.dim, device=device).to(dtype) for _ in "kv")
        yield (
            f"attention {name}, {batch} x {length}: SDPA",
            lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True),
        )
    if importlib.util.find_spec("flashinfer") is not None:
        yield _flashinfer(sizes, device, dtype)


def _flashinfer(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> tuple[str, Callable[[], object]]:
    import flashinfer  # not installed everywhere

    batch = max(sizes.batches)
    blocks = -(-sizes.context // BLOCK_SIZE)
    shape = (batch * blocks, sizes.kv_heads, BLOCK_SIZE, sizes.dim)
    cache = tuple(torch.randn(shape, device=device).to(dtype) for _ in "kv")
    q = torch.randn(batch, sizes.heads, sizes.dim, device=device).to(dtype)
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
    wrapper.plan(
        torch.arange(batch + 1, dtype=torch.int32, device=device) * blocks,
        torch.arange(batch * blocks, dtype=torch.int32, device=device),
        torch.full((batch,), (sizes.context - 1) % BLOCK_SIZE + 1, dtype=torch.int32, device=device),
        sizes.heads, sizes.kv_heads, sizes.dim, BLOCK_SIZE, q_data_type=dtype, kv_data_type=dtype,
    )  # fmt: skip
    return f"attention decode, {batch} x {sizes.context}: FlashInfer", lambda: wrapper.run(q, cache)
