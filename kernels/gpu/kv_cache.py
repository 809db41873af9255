"""Triton: store keys and values in the paged cache, and copy its blocks (see `kernels.kv_cache`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import CompileCase, launch, on_paper
from kernels.gpu.numbers import scaled
from kernels.gpu.scaled_rows import carrier
from kernels.kv_cache import KvCache, copy_blocks, kv_store
from kernels.scaled_rows import LIMITS, SMALLEST

COPIED_WORDS = 4096  # a program


@triton.jit
def _kv_store_kernel(
    k_ptr,  # float [N, H, D]
    v_ptr,
    slots_ptr,  # int64 [N]
    k_cache_ptr,  # float, int8 or uint8 [blocks, H, block_size, D]
    v_cache_ptr,
    k_scale_ptr,  # float32 [blocks, H, block_size], or None
    v_scale_ptr,
    num_heads,
    dim,
    block_size,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    LIMIT: tl.constexpr,  # 0: stored as floats
    SMALLEST: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """cache[block, head, offset] = x[token, head], HEADS heads of one token a program."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    columns = tl.arange(0, DIM)
    known = (heads < num_heads) & (slot >= 0)
    mask = known[:, None] & (columns < dim)[None, :]
    row = ((slot // block_size) * num_heads + heads) * block_size + slot % block_size
    places = row[:, None] * dim + columns[None, :]
    k_places = k_ptr + token * k_row_stride + heads[:, None] * k_head_stride + columns[None, :]
    v_places = v_ptr + token * v_row_stride + heads[:, None] * v_head_stride + columns[None, :]
    k = tl.load(k_places, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(v_places, mask=mask, other=0.0).to(tl.float32)
    if LIMIT == 0:
        tl.store(k_cache_ptr + places, k.to(k_cache_ptr.dtype.element_ty), mask=mask)
        tl.store(v_cache_ptr + places, v.to(v_cache_ptr.dtype.element_ty), mask=mask)
    else:
        k_code, k_scale = scaled(k, LIMIT, SMALLEST)
        v_code, v_scale = scaled(v, LIMIT, SMALLEST)
        tl.store(k_cache_ptr + places, k_code, mask=mask)
        tl.store(v_cache_ptr + places, v_code, mask=mask)
        tl.store(k_scale_ptr + row, k_scale, mask=known)
        tl.store(v_scale_ptr + row, v_scale, mask=known)


@triton.jit
def _copy_blocks_kernel(
    words_ptr,  # int32 or uint8 [blocks, num_words]
    sources_ptr,  # int64 [n]
    targets_ptr,
    num_words,
    WORDS: tl.constexpr,
):
    """words[target] = words[source], WORDS of one block a program."""
    pair = tl.program_id(0)
    source, target = tl.load(sources_ptr + pair), tl.load(targets_ptr + pair)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    mask = words < num_words
    tl.store(
        words_ptr + target * num_words + words, tl.load(words_ptr + source * num_words + words, mask=mask), mask=mask
    )


def kv_store_triton(k: torch.Tensor, v: torch.Tensor, cache: KvCache, slots: torch.Tensor) -> None:
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    num_tokens, num_heads, dim = k.shape
    to = cache.k.dtype
    heads = min(8, triton.next_power_of_2(num_heads))
    args = (
        k, v, slots, cache.k.view(carrier(to)), cache.v.view(carrier(to)), cache.k_scale, cache.v_scale, num_heads,
        dim, cache.k.shape[2], k.stride(0), k.stride(1), v.stride(0), v.stride(1),
    )  # fmt: skip
    launch(
        _kv_store_kernel, (num_tokens, triton.cdiv(num_heads, heads)), args, num_warps=4, LIMIT=LIMITS.get(to, 0.0),
        SMALLEST=SMALLEST, HEADS=heads, DIM=triton.next_power_of_2(dim),
    )  # fmt: skip


def copy_blocks_triton(cache: KvCache, sources: torch.Tensor, targets: torch.Tensor) -> None:
    for tensor in cache.tensors():
        bytes_of = tensor.view(tensor.shape[0], -1).view(torch.uint8)
        words = bytes_of if bytes_of.shape[1] % 4 else bytes_of.view(torch.int32)
        num_words = words.shape[1]
        launch(
            _copy_blocks_kernel, (sources.shape[0], triton.cdiv(num_words, COPIED_WORDS)),
            (words, sources, targets, num_words), num_warps=8, WORDS=COPIED_WORDS,
        )  # fmt: skip


def _cache(heads: int, dim: int, dtype: torch.dtype) -> KvCache:
    k, v = (on_paper(1000, heads, 16, dim, dtype=dtype) for _ in range(2))
    if dtype not in LIMITS:
        return KvCache(k, v)
    return KvCache(k, v, *(on_paper(1000, heads, 16, dtype=torch.float32) for _ in range(2)))


def _case(heads: int, dim: int, dtype: torch.dtype, to: torch.dtype) -> CompileCase:
    cache, x = _cache(heads, dim, to), on_paper(64, 3 * heads, dim, dtype=dtype)
    slots = on_paper(64, dtype=torch.int64)
    return CompileCase(
        f"{heads} heads of {dim} {dtype} to {to}",
        lambda: kv_store(x[:, heads : 2 * heads], x[:, 2 * heads :], cache, slots),
    )


_pairs = on_paper(4, dtype=torch.int64)
COMPILE_CASES = (
    _case(8, 128, torch.bfloat16, torch.bfloat16),
    _case(8, 128, torch.bfloat16, torch.float8_e4m3fn),
    _case(8, 128, torch.bfloat16, torch.int8),
    _case(3, 64, torch.float16, torch.float16),
    _case(4, 256, torch.bfloat16, torch.bfloat16),
    CompileCase("blocks of 8 heads, e4m3", lambda: copy_blocks(_cache(8, 128, torch.float8_e4m3fn), _pairs, _pairs)),
)
