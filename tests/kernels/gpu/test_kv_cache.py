"""Keys and values in Triton: stored where the slots say, in every format, and blocks copied whole."""

from __future__ import annotations

import pytest
import torch

from kernels.kv_cache import KvCache, copy_blocks, copy_blocks_reference, empty_kv_cache, kv_store, kv_store_reference
from tests.kernels.gpu.checks import randn, same_bits, strided

FORMATS = (torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn)
SLOTS = torch.tensor([5, -1, 0, 17, 11])


def filled(dtype: torch.dtype, heads: int, block_size: int, dim: int) -> KvCache:
    cache = empty_kv_cache(6, heads, block_size, dim, dtype, "cpu")
    for i, tensor in enumerate(cache.tensors()):
        tensor.view(torch.uint8).copy_(torch.randint(0, 100, tensor.view(torch.uint8).shape) + i)
    return cache


def copy_of(cache: KvCache) -> KvCache:
    return KvCache(*(t.clone() for t in cache.tensors()))


def assert_same(a: KvCache, b: KvCache) -> None:
    assert [same_bits(x, y) for x, y in zip(a.tensors(), b.tensors(), strict=True)] == [True] * len(a.tensors())


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("heads,dim", [(1, 1), (3, 63), (9, 100)])
def test_store_is_that_of_the_specification(to: torch.dtype, heads: int, dim: int) -> None:
    """Bit by bit, slots that are not named included."""
    dtype = torch.float16 if to is torch.float16 else torch.float32
    k, v = (strided(randn(5, heads, dim, dtype=dtype, seed=seed) * 3) for seed in (0, 1))
    cache = filled(to, heads, 4, dim)
    want = copy_of(cache)
    kv_store(k, v, cache, SLOTS)
    kv_store_reference(k, v, want, SLOTS)
    assert_same(cache, want)


@pytest.mark.parametrize("to", [torch.int8, torch.float8_e4m3fn])
def test_a_token_is_stored_alike_alone_and_among_others(to: torch.dtype) -> None:
    k, v = (randn(5, 2, 20, seed=seed) for seed in (0, 1))
    together, alone = (empty_kv_cache(6, 2, 4, 20, to, "cpu") for _ in range(2))
    kv_store(k, v, together, SLOTS)
    for i in range(5):
        kv_store(k[i : i + 1], v[i : i + 1], alone, SLOTS[i : i + 1])
    assert_same(together, alone)


@pytest.mark.parametrize("to", FORMATS)
def test_what_is_read_back_is_near(to: torch.dtype) -> None:
    k = randn(1, 2, 64)
    cache = empty_kv_cache(1, 2, 4, 64, to, "cpu")
    kv_store(k, k, cache, torch.tensor([2]))
    scale = 1.0 if cache.k_scale is None else cache.k_scale[0, :, 2, None]
    error = (cache.k[0, :, 2].float() * scale - k[0]).abs().max()
    assert error < {torch.float32: 1e-9, torch.float16: 2e-3, torch.int8: 0.02, torch.float8_e4m3fn: 0.2}[to]


@pytest.mark.parametrize("to,dim", [(torch.float32, 7), (torch.int8, 7), (torch.float8_e4m3fn, 16)])
def test_blocks_are_copied_whole(to: torch.dtype, dim: int) -> None:
    cache = filled(to, 3, 3, dim)
    want = copy_of(cache)
    pairs = torch.tensor([4, 1, 4]), torch.tensor([0, 5, 2])
    copy_blocks(cache, *pairs)
    copy_blocks_reference(want, *pairs)
    assert_same(cache, want)


def test_refuses_other_shapes_and_types() -> None:
    cache, k = empty_kv_cache(2, 1, 4, 8, torch.float32, "cpu"), randn(1, 1, 8)
    with pytest.raises(ValueError, match="kv_store: k"):
        kv_store(randn(1, 2, 8), k, cache, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="slots"):
        kv_store(k, k, cache, torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="eight bits"):
        kv_store(k, k, KvCache(cache.k.to(torch.int8), cache.v.to(torch.int8)), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="copy_blocks"):
        copy_blocks(cache, torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))


def test_a_cache_of_latents_is_kept_once() -> None:
    for dtype, count in ((torch.float32, 1), (torch.int8, 2)):
        cache = empty_kv_cache(2, 1, 4, 24, dtype, "cpu", shared=True)
        assert len(cache.tensors()) == count and cache.k is cache.v
        row = randn(1, 1, 24)
        kv_store(row, row, cache, torch.tensor([5]))
        want = empty_kv_cache(2, 1, 4, 24, dtype, "cpu")
        kv_store_reference(row, row, want, torch.tensor([5]))
        assert torch.equal(cache.v.view(torch.uint8), want.v.view(torch.uint8))
