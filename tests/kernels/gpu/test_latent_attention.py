"""Attention over a cache of latents in Triton: against the specification, whole and in parts, alone and with others."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kernels import attention as spec
from kernels.attention import AttentionBatch, AttentionOptions, attention_batch, attention_reference
from kernels.kv_cache import KvCache
from kernels.latent_attention import latent_attention
from tests.kernels.gpu.checks import randn, same_bits
from tests.kernels.gpu.test_attention import CHAIN_TREE, filled_cache, rows_of_products

SCALE = 0.1


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two tiles, so that few keys make several."""
    monkeypatch.setattr(spec, "PART", 64)


def filled(lengths: list[int], columns: int, dtype: torch.dtype = torch.float32) -> tuple[KvCache, list[list[int]]]:
    cache, block_ids = filled_cache(lengths, 1, columns, dtype)
    return KvCache(cache.k, cache.k, cache.k_scale, cache.k_scale), block_ids


def attended(q: torch.Tensor, cache: KvCache, batch: AttentionBatch, rank: int) -> torch.Tensor:
    out = torch.empty(*q.shape[:2], rank, dtype=q.dtype)
    latent_attention(q, cache, batch, SCALE, out)
    return out


def compare(q: torch.Tensor, cache: KvCache, batch: AttentionBatch, rank: int, tolerance: float) -> torch.Tensor:
    want = torch.empty(q.shape, dtype=torch.float32)
    attention_reference(q, cache, batch, AttentionOptions(SCALE), want)
    got = attended(q, cache, batch, rank)
    rows = slice(batch.first_row, batch.first_row + batch.num_rows)
    torch.testing.assert_close(got[rows].float(), want[rows, :, :rank], atol=tolerance, rtol=tolerance)
    assert torch.cat((got[: rows.start], got[rows.stop :])).isnan().all()
    return got


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize(("heads", "rank", "columns"), [(6, 40, 48), (40, 130, 139)])
def test_against_the_specification(
    parts: bool, heads: int, rank: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of one row, of several, and of one key; rows of q that are none of the batch's; more heads than a
    program has; queries apart in memory."""
    import kernels.gpu.attention_parts as op  # not before the interpreter is switched on

    monkeypatch.setattr(op, "FEW_PROGRAMS", 1000 if parts else 0)
    rows, lengths = [1, 1, 3], [1, 63, 100]
    cache, block_ids = filled(lengths, columns)
    q = randn(7, heads + 1, columns + 5)[:, 1:, :columns]
    compare(q, cache, attention_batch(rows, lengths, block_ids, heads, first_row=1), rank, 3e-6)


@pytest.mark.parametrize(
    ("cached", "tolerance", "dtype"),
    [
        (torch.float16, 2e-3, torch.float16),
        (torch.int8, 3e-3, torch.float16),
        (torch.float8_e4m3fn, 3e-3, torch.float32),
    ],
    ids=str,
)
def test_caches_of_other_formats(cached: torch.dtype, tolerance: float, dtype: torch.dtype) -> None:
    cache, block_ids = filled([70], 48, cached)
    compare(randn(2, 3, 48, dtype=dtype), cache, attention_batch([2], [70], block_ids, 3), 40, tolerance)


def test_trees() -> None:
    lengths = [80 + len(CHAIN_TREE), len(CHAIN_TREE)]
    cache, block_ids = filled(lengths, 24)
    tree = [(base + bits.bit_count() - 1, bits) for base in (80, 0) for bits in CHAIN_TREE]
    compare(randn(10, 4, 24), cache, attention_batch([5, 5], lengths, block_ids, 4, tree=tree), 16, 3e-6)


def test_a_row_has_one_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same query at the same position: alone in parts and whole, in a batch, in chunks cut here and there."""
    import kernels.gpu.attention_parts as op  # as above

    monkeypatch.setattr(np, "matmul", rows_of_products)
    total, heads = 140, 3
    cache, (blocks,) = filled([total], 24)
    q = randn(total, heads, 24)
    want = attended(q[100:], cache, attention_batch([40], [total], [blocks], heads), 16)
    for few in (0, 1000):
        monkeypatch.setattr(op, "FEW_PROGRAMS", few)
        for position in (100, 127, 128, 139):
            alone = attention_batch([1], [position + 1], [blocks], heads)
            assert same_bits(attended(q[position : position + 1], cache, alone, 16)[0], want[position - 100])
    cut = attended(q[120:130], cache, attention_batch([10], [130], [blocks], heads), 16)
    assert same_bits(cut, want[20:30])
    batch = attention_batch([1, 2], [128, 131], [blocks[:8], blocks], heads)
    assert same_bits(attended(q[[127, 129, 130]], cache, batch, 16), want[[27, 29, 30]])


def test_what_is_not_finite_stays_in_its_sequence() -> None:
    cache, block_ids = filled([20, 20], 24)
    q = randn(2, 1, 24)
    q[0, 0, 3] = torch.nan
    got = attended(q, cache, attention_batch([1, 1], [20, 20], block_ids, 1), 16)
    assert got[0].isnan().all() and got[1].isfinite().all()


def test_refuses_what_it_cannot_do() -> None:
    cache, block_ids = filled([20], 24)
    batch = attention_batch([1], [20], block_ids, 2)
    with pytest.raises(ValueError, match="cache"):
        attended(randn(1, 2, 16), cache, batch, 16)
    with pytest.raises(ValueError, match="V is not its K"):
        attended(randn(1, 2, 24), dataclasses.replace(cache, v=cache.k.clone()), batch, 16)
    with pytest.raises(ValueError, match="out"):
        attended(randn(1, 2, 24), cache, batch, 25)
    with pytest.raises(ValueError, match="other rows or heads"):
        attended(randn(0, 2, 24), cache, batch, 16)
    with pytest.raises(ValueError, match="other rows or heads"):
        attended(randn(1, 2, 24), cache, attention_batch([1], [20], block_ids, 2, fast=True), 16)
    with pytest.raises(ValueError, match="blocks hold"):
        attended(randn(1, 2, 24), cache, attention_batch([1], [40], block_ids, 2), 16)
