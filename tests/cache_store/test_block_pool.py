"""Reference counts and the order in which free blocks are given out."""

from __future__ import annotations

import pytest

from services.cache_store.block_pool import BlockPool


def test_blocks_are_given_out_once_until_they_are_dropped() -> None:
    pool = BlockPool(4)
    assert sorted(pool.allocate(3) + pool.allocate(1)) == [0, 1, 2, 3]
    assert pool.num_free == 0
    pool.drop_ref(2, cached=False)
    assert pool.allocate(1) == [2]


def test_allocating_more_than_is_free_is_the_callers_fault() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="3 of 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_a_block_is_free_when_its_last_holder_drops_it() -> None:
    pool = BlockPool(1)
    (block_id,) = pool.allocate(1)
    pool.add_ref(block_id)
    assert not pool.drop_ref(block_id, cached=True)
    assert pool.num_free == 0
    assert pool.drop_ref(block_id, cached=True)
    assert pool.num_free == pool.num_cached == 1


def test_dropping_a_free_block_is_the_callers_fault() -> None:
    with pytest.raises(AssertionError, match="no holder"):
        BlockPool(1).drop_ref(0, cached=False)


def test_blank_blocks_go_first_then_cached_ones_from_the_longest_unreferenced() -> None:
    pool = BlockPool(4)
    a, b, c, d = pool.allocate(4)
    pool.drop_ref(c, cached=True)
    pool.drop_ref(a, cached=True)
    pool.drop_ref(d, cached=False)
    pool.drop_ref(b, cached=True)
    assert pool.allocate(4) == [d, c, a, b]


@pytest.mark.parametrize("cached", [True, False])
def test_a_free_block_that_is_referenced_again_leaves_the_free_list(cached: bool) -> None:
    pool = BlockPool(2)
    a, b = pool.allocate(2)
    pool.drop_ref(a, cached)
    pool.drop_ref(b, cached)
    pool.add_ref(a)
    assert (pool.num_refs(a), pool.num_free) == (1, 1)
    assert pool.allocate(1) == [b]
    pool.check_invariants()


def test_a_block_used_again_is_evicted_last() -> None:
    pool = BlockPool(3)
    a, b, c = pool.allocate(3)
    for block_id in (a, b, c):
        pool.drop_ref(block_id, cached=True)
    pool.add_ref(a)
    pool.drop_ref(a, cached=True)
    assert pool.allocate(3) == [b, c, a]


def test_a_block_found_to_be_sealed_is_evicted_after_the_blank_and_the_cached_ones() -> None:
    pool = BlockPool(3)
    pool.mark_cached(2)
    pool.mark_cached(0)
    assert pool.is_cached(2) and not pool.is_cached(1)
    assert pool.allocate(3) == [1, 2, 0]


def test_a_lost_block_is_noticed() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool._num_refs = [0, 0]
    with pytest.raises(AssertionError, match="lost"):
        pool.check_invariants()
