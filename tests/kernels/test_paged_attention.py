"""Paged attention and KV writes: against the plain specification, and bit by bit alone and batched."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.kv_cache import KvCache, empty_kv_cache, kv_store
from kernels.kv_write import kv_write
from kernels.paged_attention import QuerySpan, paged_attention, paged_attention_reference, shapes_agree
from services.gpu_worker import attention_plan
from services.gpu_worker.attention_plan import PREFILL_GROUP_ROWS, Geometry, plan_attention
from tests.kernels.threads import torch_threads

NUM_BLOCKS = 60


def geometry(heads: int = 6, kv_heads: int = 2, dim: int = 16, block_size: int = 16, row_multiple: int = 8) -> Geometry:
    return Geometry(
        num_blocks=NUM_BLOCKS, block_size=block_size, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        vocab_size=10, max_model_len=1000, row_multiple=row_multiple,
    )  # fmt: skip


def caches(g: Geometry, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (g.num_blocks + 1, g.num_kv_heads, g.block_size, g.head_dim)
    k, v = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    k[-1], v[-1] = 0, 0
    return k, v


def spans_of(sizes: list[tuple[int, int]], g: Geometry) -> list[QuerySpan]:
    """(first position, rows) of each sequence; blocks are dealt out in a scattered order. Single rows first."""
    order = torch.randperm(g.num_blocks).tolist()
    spans, row = [], 0
    for first, rows in sorted(sizes, key=lambda size: size[1] > 1):
        num_blocks = -(-(first + rows) // g.block_size)
        blocks, order = tuple(order[:num_blocks]), order[num_blocks:]
        spans.append(QuerySpan(row, rows, first, blocks))
        row += rows
    return spans


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: list[QuerySpan], g: Geometry, softcap: float = 0.0,
    window: int = 0,
) -> torch.Tensor:  # fmt: skip
    return torch.cat(
        [paged_attention(q, KvCache(k, v), plan, 0.3, softcap) for plan in plan_attention(spans, g, window)]
    )


SIZES = [(0, 1), (63, 1), (64, 1), (130, 1), (0, 63), (100, 2), (50, 100), (0, 33)]


@pytest.mark.parametrize(
    "g",
    [
        geometry(),
        geometry(heads=4, kv_heads=4),
        geometry(heads=9, kv_heads=3, dim=64),
        geometry(heads=16, kv_heads=1),
        geometry(block_size=8, heads=2, kv_heads=1),
        geometry(block_size=64),
    ],
    ids=str,
)
def test_against_the_specification(g: Geometry) -> None:
    torch.manual_seed(0)
    k, v = caches(g)
    for sizes in (
        [SIZES[0]],
        SIZES[:4],
        [SIZES[5]],
        SIZES[:2] + SIZES[4:5] + SIZES[7:] if g.block_size == 8 else SIZES,
    ):
        spans = spans_of(sizes, g)
        q = torch.randn(sum(s.num_rows for s in spans) + 3, g.num_heads, g.head_dim)
        want = paged_attention_reference(q, k, v, spans, 0.3)
        torch.testing.assert_close(attend(q, k, v, spans, g), want, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("window", [1, 5, 64, 70, 129, 1000])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_windows_and_soft_caps(window: int, softcap: float) -> None:
    torch.manual_seed(2)
    g = geometry()
    k, v = caches(g)
    spans = spans_of(SIZES, g)
    q = torch.randn(sum(s.num_rows for s in spans), g.num_heads, g.head_dim)
    want = paged_attention_reference(q, k, v, spans, 0.3, softcap, window)
    torch.testing.assert_close(attend(q, k, v, spans, g, softcap, window), want, atol=3e-6, rtol=3e-5)


def test_a_window_leaves_out_tiles() -> None:
    g = geometry()
    spans = spans_of([(500, 1), (300, 40)], g)
    assert [plan.item_group.numel() for plan in plan_attention(spans, g, 64)] == [2, 5]
    assert [plan.item_group.numel() for plan in plan_attention(spans, g)] == [8, 12]


def test_float16_cache() -> None:
    g = geometry()
    k, v = caches(g, torch.float16)
    spans = spans_of(SIZES[:5], g)
    q = torch.randn(100, g.num_heads, g.head_dim)
    want = paged_attention_reference(q, k, v, spans, 0.3)
    torch.testing.assert_close(attend(q, k, v, spans, g), want, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize(
    "g",
    [
        geometry(),
        geometry(heads=9, kv_heads=3, dim=64),
        geometry(heads=8, kv_heads=8),
        geometry(heads=9, kv_heads=3, dim=64, row_multiple=4),
    ],
    ids=str,
)
def test_a_row_has_one_result(g: Geometry, window: int) -> None:
    """The same query at the same position: decoded alone, in a batch, inside chunks cut in every way; by bits."""
    torch.manual_seed(1)
    if not shapes_agree((g.padded_group_rows(1), g.padded_group_rows(PREFILL_GROUP_ROWS)), g.head_dim):
        pytest.skip("this machine's products show these shapes")
    k, v = caches(g)
    total = 200
    whole = spans_of([(0, total)], g)[0]
    q = torch.randn(total, g.num_heads, g.head_dim)
    want = attend(q, k, v, [whole], g, window=window)
    for threads in (1, 2):
        with torch_threads(threads):
            for position in (0, 1, 63, 64, 65, 127, 199):
                alone = QuerySpan(0, 1, position, whole.block_ids)
                got = attend(q[position : position + 1], k, v, [alone], g, window=window)
                assert torch.equal(got[0], want[position])
            rows = list(range(0, total, 6))
            batch = [QuerySpan(i, 1, position, whole.block_ids) for i, position in enumerate(rows)]
            assert torch.equal(attend(q[rows], k, v, batch, g, window=window), want[rows])
            for cuts in ([0, 16, 33, 100, 200], [0, 2, 64, 65, 200], [0, 199, 200]):
                for start, end in zip(cuts, cuts[1:], strict=False):
                    chunk = QuerySpan(0, end - start, start, whole.block_ids)
                    got = attend(q[start:end], k, v, [chunk], g, window=window)
                    assert torch.equal(got, want[start:end]), (start, end)


def test_split_plans_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    g = geometry()
    k, v = caches(g)
    spans = spans_of(SIZES, g)
    q = torch.randn(sum(s.num_rows for s in spans), g.num_heads, g.head_dim)
    want = attend(q, k, v, spans, g)
    monkeypatch.setattr(attention_plan, "PLAN_BYTES", 1)
    assert len(list(plan_attention(spans, g))) == 4 + 2 + 1 + 4 + 2
    assert torch.equal(attend(q, k, v, spans, g), want)


def test_groups_of_one_size_serve_where_shapes_show() -> None:
    g = geometry()
    k, v = caches(g)
    spans = spans_of(SIZES, g)
    q = torch.randn(sum(s.num_rows for s in spans), g.num_heads, g.head_dim)
    one_size = dataclasses.replace(g, decode_group_rows=PREFILL_GROUP_ROWS)
    assert torch.equal(attend(q, k, v, spans, one_size), attend(q, k, v, spans, g))


def test_shapes_agree_sees_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shapes_agree((8, 96), 64)
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: bmm(a, b) + (a.shape[1] > 8) * 1e-3)
    assert not shapes_agree((8, 96), 64)


def test_what_lies_beyond_a_sequence_is_never_read() -> None:
    """Not the rest of its last block, not other blocks; even if it is not a number."""
    g = geometry()
    k, v = (torch.full_like(cache, torch.nan) for cache in caches(g))
    k[-1], v[-1] = 0, 0
    spans = spans_of([(20, 1), (0, 40)], g)
    q = torch.randn(41, g.num_heads, g.head_dim)
    for span in spans:
        tokens = span.first_position + span.num_rows
        kv = torch.randn(2, tokens, g.num_kv_heads, g.head_dim)
        slots = torch.tensor([span.block_ids[t // 16] * 16 + t % 16 for t in range(tokens)])
        rows = (slots // 16)[:, None] * 32 + torch.arange(2) * 16 + (slots % 16)[:, None]
        kv_write(kv[0], kv[1], KvCache(k, v), rows.flatten(), slots[slots % 16 == 0] // 16)
    got = attend(q, k, v, spans, g)
    assert got.isfinite().all()
    torch.testing.assert_close(got, paged_attention_reference(q, k, v, spans, 0.3), atol=2e-6, rtol=2e-5)
    untouched = sorted(set(range(NUM_BLOCKS)) - {b for s in spans for b in s.block_ids})
    assert k[untouched].isnan().all() and v[untouched].isnan().all()


def test_refuse_other_shapes() -> None:
    g = geometry()
    k, v = caches(g)
    plan = next(plan_attention(spans_of([(0, 1)], g), g))
    with pytest.raises(ValueError, match="float32"):
        paged_attention(torch.randn(1, 6, 16).double(), KvCache(k, v), plan, 1.0)
    with pytest.raises(ValueError, match="cache"):
        paged_attention(torch.randn(1, 5, 16), KvCache(k, v), plan, 1.0)
    odd = torch.zeros(3, 2, 10, 16)
    with pytest.raises(ValueError, match="tile"):
        paged_attention(torch.randn(1, 6, 16), KvCache(odd, odd), plan, 1.0)
    one, rows = torch.randn(1, 2, 16), torch.arange(2)
    with pytest.raises(ValueError, match="kv_write"):
        kv_write(one, one, KvCache(k, v), rows[:1], rows[:0])
    with pytest.raises(ValueError, match="kv_write"):
        kv_write(one, torch.randn(1, 2, 8), KvCache(k, v), rows, rows[:0])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_eight_bits_are_a_scale_for_each_token_s_head(dtype: torch.dtype) -> None:
    """What is written is what `kv_store` would, what is read are codes times scales; leftovers never show."""
    torch.manual_seed(3)
    g = geometry()
    shape = (g.num_blocks + 1, g.num_kv_heads, g.block_size, g.head_dim)
    cache, want = (empty_kv_cache(shape[0], shape[1], shape[2], shape[3], dtype, "cpu") for _ in range(2))
    assert cache.k_scale is not None and cache.v_scale is not None
    cache.k_scale[:-1], cache.v_scale[:-1] = torch.nan, torch.nan  # of earlier owners
    [span] = spans_of([(0, 100)], g)
    k, v = (torch.randn(100, g.num_kv_heads, g.head_dim) * torch.rand(100, 1, 1) * 2 for _ in "kv")
    slots = torch.tensor([span.block_ids[t // 16] * 16 + t % 16 for t in range(100)])
    rows = (slots // 16)[:, None] * 32 + torch.arange(2) * 16 + (slots % 16)[:, None]
    kv_write(k, v, cache, rows.flatten(), slots[slots % 16 == 0] // 16)
    kv_store(k, v, want, slots)
    used = sorted(set(span.block_ids))
    for got_tensor, want_tensor in zip(cache.tensors(), want.tensors(), strict=True):
        assert torch.equal(got_tensor.view(torch.uint8)[used], want_tensor.view(torch.uint8)[used])
    q = torch.randn(100, g.num_heads, g.head_dim)
    values = [codes.float() * scale[..., None] for codes, scale in
              ((want.k, want.k_scale), (want.v, want.v_scale)) if scale is not None]  # fmt: skip
    got = torch.cat([paged_attention(q, cache, plan, 0.3) for plan in plan_attention([span], g)])
    torch.testing.assert_close(got, paged_attention_reference(q, *values, [span], 0.3), atol=4e-6, rtol=4e-5)
