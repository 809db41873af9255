"""Attention over the paged cache in Triton: against the specification, whole and in parts, alone and among others."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from kernels import attention as spec
from kernels.attention import AttentionBatch, AttentionOptions, attention, attention_batch, attention_reference
from kernels.kv_cache import KvCache, empty_kv_cache, kv_store_reference
from tests.kernels.gpu.checks import randn, same_bits

product = np.matmul
BLOCK_SIZE = 16
CHAIN_TREE = [0b1, 0b11, 0b101, 0b1011, 0b10101]  # of drafts: 1 and 2 follow 0, 3 follows 1, 4 follows 2


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one tile of 64 keys, so that few keys make several."""
    monkeypatch.setattr(spec, "PART", 64)


def rows_of_products(a: np.ndarray, b: np.ndarray, **options: Any) -> np.ndarray:
    """A product row by row. BLAS, with which the interpreter multiplies, sums in another order for 16 rows than for
    32; a GPU's matrix instruction does not."""
    return np.concatenate([product(row[None], b, **options) for row in a])


def filled_cache(
    lengths: list[int], heads: int, dim: int, dtype: torch.dtype, seed: int = 0
) -> tuple[KvCache, list[list[int]]]:
    """A cache of NaN, or of bytes that nobody has stored, with sequences in scattered blocks."""
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    cache = empty_kv_cache(sum(counts) + 2, heads, BLOCK_SIZE, dim, dtype, "cpu")
    for tensor in cache.tensors():
        tensor.view(torch.uint8).fill_(0x7F) if tensor.dtype.itemsize == 1 else tensor.fill_(torch.nan)
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).tolist()
    block_ids = []
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks, order = order[:count], order[count:]
        slots = torch.tensor([blocks[t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE for t in range(length)])
        k, v = (randn(length, heads, dim, seed=10 * i + j + seed) for j in (1, 2))
        kv_store_reference(k, v, cache, slots)
        block_ids.append(blocks)
    return cache, block_ids


def compare(
    q: torch.Tensor, cache: KvCache, batch: AttentionBatch, options: AttentionOptions, tolerance: float
) -> torch.Tensor:
    want = torch.empty(q.shape, dtype=torch.float32)
    attention_reference(q, cache, batch, options, want)
    rows = slice(batch.first_row, batch.first_row + batch.num_rows)
    got = attention(q, cache, batch, options)
    assert got.dtype == q.dtype
    torch.testing.assert_close(got[rows].float(), want[rows], atol=tolerance, rtol=tolerance)
    outside = torch.cat((got[: rows.start], got[rows.stop :]))
    assert outside.isnan().all()
    return got


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("heads,kv_heads,dim", [(2, 2, 64), (6, 2, 100)])
def test_against_the_specification(
    parts: bool, heads: int, kv_heads: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of one row, of several, and of one key; rows of q that are none of the batch's."""
    import kernels.gpu.attention_parts as op  # not before the interpreter is switched on

    monkeypatch.setattr(op, "FEW_PROGRAMS", 1000 if parts else 0)
    rows, lengths = [1, 1, 3], [1, 63, 100]
    cache, block_ids = filled_cache(lengths, kv_heads, dim, torch.float32)
    q = randn(7, heads + 2 * kv_heads, dim)[:, :heads]
    batch = attention_batch(rows, lengths, block_ids, heads // kv_heads, first_row=1)
    compare(q, cache, batch, AttentionOptions(dim**-0.5), 2e-6)


def test_tiles_are_alike_unless_speed_is_worth_more() -> None:
    ids = [range(70)]
    for rows, fast_rows in ((1, 16), (4, 16), (5, 32), (63, 32), (64, 64)):
        assert attention_batch([rows], [1000], ids, 4, fast=True).tile_rows == fast_rows
        assert attention_batch([rows], [1000], ids, 4).tile_rows == 32
    one = attention_batch([1], [1000], ids, 64, fast=True)
    assert one.tile_rows == 64 and one.part == spec.PART


@pytest.mark.parametrize(
    "cached,tolerance,dtype",
    [
        (torch.float16, 2e-3, torch.float16),
        (torch.int8, 3e-3, torch.float16),
        (torch.float8_e4m3fn, 3e-3, torch.float32),
    ],
    ids=str,
)
def test_caches_of_other_formats(cached: torch.dtype, tolerance: float, dtype: torch.dtype) -> None:
    """The specification reads the same bytes, so what differs is the product alone."""
    cache, block_ids = filled_cache([70], 1, 64, cached)
    batch = attention_batch([2], [70], block_ids, 3)
    compare(randn(2, 3, 64, dtype=dtype), cache, batch, AttentionOptions(0.125), tolerance)


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(0.125, window=40),
        AttentionOptions(0.5, softcap=2.0),
        AttentionOptions(0.125, sinks=torch.tensor([0.5, -3.0])),
        AttentionOptions(0.125, window=70, softcap=5.0, sinks=torch.tensor([4.0, -40.0])),
    ],
    ids=["window", "softcap", "sinks", "all"],
)
def test_windows_caps_and_sinks_in_parts_and_whole(options: AttentionOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    import kernels.gpu.attention_parts as op  # as above

    cache, block_ids = filled_cache([150], 1, 64, torch.float32)
    batch, q = attention_batch([3], [150], block_ids, 2), randn(3, 2, 64)
    monkeypatch.setattr(op, "FEW_PROGRAMS", 1000)
    in_parts = compare(q, cache, batch, options, 2e-6)
    monkeypatch.setattr(op, "FEW_PROGRAMS", 0)
    assert same_bits(attention(q, cache, batch, options), in_parts)


def test_a_long_sequence_among_short_ones_is_shared_between_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    import kernels.gpu.attention as op  # as above
    import kernels.gpu.attention_parts as parts

    merges: list[int] = []
    merge = op.merge_parts
    monkeypatch.setattr(parts, "FEW_PROGRAMS", 0)
    monkeypatch.setattr(op, "merge_parts", lambda *a: merges.append(a[0].shape[2]) or merge(*a))
    cache, block_ids = filled_cache([200, 20, 20, 20], 1, 64, torch.float32)
    q, options = randn(4, 2, 64), AttentionOptions(0.125)
    batch = attention_batch([1] * 4, [200, 20, 20, 20], block_ids, 2)
    assert batch.uneven and not attention_batch([1] * 4, [60, 50, 40, 60], block_ids, 2).uneven
    shared = attention(q, cache, batch, options)
    assert merges == [-(-200 // batch.part)] and merges[0] > 1
    assert same_bits(attention(q, cache, dataclasses.replace(batch, uneven=False), options), shared)
    assert len(merges) == 1


def test_parts_that_need_too_much_memory_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    import kernels.gpu.attention as op  # as above
    import kernels.gpu.attention_parts as parts

    cache, block_ids = filled_cache([150], 1, 64, torch.float32)
    batch, q, options = attention_batch([3], [150], block_ids, 2), randn(3, 2, 64), AttentionOptions(0.125)
    monkeypatch.setattr(parts, "MOST_PART_BYTES", 4 * 3 * 2 * 3 * 64)
    in_parts = attention(q, cache, batch, options)
    monkeypatch.setattr(parts, "MOST_PART_BYTES", parts.MOST_PART_BYTES - 1)
    monkeypatch.setattr(op, "merge_parts", lambda *_: pytest.fail("there are parts"))
    assert same_bits(attention(q, cache, batch, options), in_parts)


@pytest.mark.parametrize("window", [None, 70])
def test_trees(window: int | None) -> None:
    """A row sees the prefix within its window and its ancestors; two branches do not see each other."""
    lengths = [80 + len(CHAIN_TREE), len(CHAIN_TREE)]
    cache, block_ids = filled_cache(lengths, 2, 64, torch.float32)
    tree = [(base + bits.bit_count() - 1, bits) for base in (80, 0) for bits in CHAIN_TREE]
    batch = attention_batch([5, 5], lengths, block_ids, 2, tree=tree)
    compare(randn(10, 4, 64), cache, batch, AttentionOptions(0.125, window=window), 2e-6)


def test_a_chain_is_a_tree_of_one_branch() -> None:
    cache, block_ids = filled_cache([70], 1, 64, torch.float32)
    q, options = randn(4, 2, 64), AttentionOptions(0.125)
    chain = attention_batch([4], [70], block_ids, 2)
    tree = attention_batch([4], [70], block_ids, 2, tree=[(66 + i, (2 << i) - 1) for i in range(4)])
    assert same_bits(attention(q, cache, tree, options), attention(q, cache, chain, options))


@pytest.mark.slow
def test_a_tree_of_64_rows_uses_all_bits() -> None:
    cache, block_ids = filled_cache([65], 1, 64, torch.float32)
    tree = [(1 + i, (2 << i) - 1) for i in range(64)]
    batch = attention_batch([64], [65], block_ids, 1, tree=tree)
    compare(randn(64, 1, 64), cache, batch, AttentionOptions(0.125), 2e-6)


@pytest.mark.parametrize(
    "options",
    [AttentionOptions(0.125, window=80), pytest.param(AttentionOptions(0.125), marks=pytest.mark.slow)],
    ids=["window", "all"],
)
def test_a_row_has_one_result(options: AttentionOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same query at the same position: alone in parts and whole, in a batch, in chunks cut here and there."""
    import kernels.gpu.attention_parts as op  # as above

    monkeypatch.setattr(np, "matmul", rows_of_products)
    total = 140
    cache, (blocks,) = filled_cache([total], 1, 64, torch.float32)
    q = randn(total, 2, 64)
    want = attention(q[100:], cache, attention_batch([40], [total], [blocks], 2), options)

    def alone(position: int) -> torch.Tensor:
        batch = attention_batch([1], [position + 1], [blocks], 2)
        return attention(q[position : position + 1], cache, batch, options)[0]

    for few in (0, 1000):
        monkeypatch.setattr(op, "FEW_PROGRAMS", few)
        for position in (100, 127, 128, 139):
            assert same_bits(alone(position), want[position - 100])
    cut = attention(q[120:130], cache, attention_batch([10], [130], [blocks], 2), options)
    assert same_bits(cut, want[20:30])
    batch = attention_batch([1, 2], [128, 131], [blocks[:8], blocks], 2)
    assert same_bits(attention(q[[127, 129, 130]], cache, batch, options), want[[27, 29, 30]])


def test_long_chunks_may_be_computed_faster() -> None:
    cache, block_ids = filled_cache([150], 1, 64, torch.float32)
    batch = attention_batch([130], [150], block_ids, 2, fast=True)
    assert batch.tile_rows == 64 and batch.part == spec.WHOLE
    compare(randn(130, 2, 64), cache, batch, AttentionOptions(0.125), 2e-6)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter's maximum
def test_what_is_not_finite_stays_in_its_sequence() -> None:
    cache, block_ids = filled_cache([20, 20], 1, 64, torch.float32)
    q = randn(2, 1, 64)
    q[0, 0, 3] = torch.nan
    got = attention(q, cache, attention_batch([1, 1], [20, 20], block_ids, 1), AttentionOptions(0.125))
    assert got[0].isnan().all() and got[1].isfinite().all()


def test_the_specification_is_torchs_attention() -> None:
    cache, block_ids = filled_cache([40], 2, 64, torch.float32)
    q, out = randn(40, 4, 64), torch.empty(40, 4, 64)
    attention_reference(q, cache, attention_batch([40], [40], block_ids, 2), AttentionOptions(0.125), out)
    k, v = (
        x[block_ids[0]].transpose(1, 2).reshape(-1, 2, 64)[:40].repeat_interleave(2, 1).transpose(0, 1)
        for x in (cache.k, cache.v)
    )
    want = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True)
    torch.testing.assert_close(out, want.transpose(0, 1), atol=2e-6, rtol=2e-6)


def test_refuses_what_it_cannot_do() -> None:
    cache, block_ids = filled_cache([20], 1, 64, torch.float32)
    batch, options = attention_batch([1], [20], block_ids, 1), AttentionOptions(math.sqrt(1 / 64))
    with pytest.raises(ValueError, match="rows of sequences"):
        attention_batch([3], [2], block_ids, 1)
    with pytest.raises(ValueError, match="tree of 65"):
        attention_batch([65], [70], block_ids, 1, tree=[(0, 1)] * 65)
    with pytest.raises(ValueError, match="cache"):
        attention(randn(1, 1, 32), cache, batch, options)
    with pytest.raises(ValueError, match="other rows"):
        attention(randn(0, 1, 64), cache, batch, options)
    with pytest.raises(ValueError, match="window"):
        attention(randn(1, 1, 64), cache, batch, dataclasses.replace(options, window=0))
    with pytest.raises(ValueError, match="sinks"):
        attention(randn(1, 1, 64), cache, batch, dataclasses.replace(options, sinks=torch.zeros(2)))
    with pytest.raises(ValueError, match="blocks hold"):
        attention(randn(1, 1, 64), cache, attention_batch([1], [40], block_ids, 1), options)
