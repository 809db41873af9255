"""Finding sealed blocks by key, never by key alone; finding who computes the others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.cache_store.prefix_index import Entry, Leaders, PrefixIndex
from shared.block_keys import chain
from shared.store_calls import InventoryEntry
from shared.wire import pack_ids

ROOT = b"r" * 32
SIZE = 2
WIDTH = 4 * SIZE


def entries(ids: Sequence[int], root: bytes = ROOT) -> list[Entry]:
    packed = pack_ids(ids)
    keys = chain(root, packed, SIZE)
    return [Entry(k, p, packed[i * WIDTH : (i + 1) * WIDTH]) for i, (p, k) in enumerate(zip([root, *keys], keys))]  # noqa: B905


def listed(blocks: Sequence[int], ids: Sequence[int], root: bytes = ROOT) -> list[InventoryEntry]:
    return [
        InventoryEntry(block_id=b, key=e.key, parent_key=e.parent, ids=e.ids)
        for b, e in zip(blocks, entries(ids, root), strict=True)
    ]


def filled(blocks: Sequence[int], ids: Sequence[int]) -> PrefixIndex:
    index = PrefixIndex()
    for block_id, entry in zip(blocks, entries(ids), strict=True):
        index.add(block_id, entry)
    return index


def match(index: PrefixIndex, ids: Sequence[int]) -> list[int]:
    packed = pack_ids(ids)
    return index.match(chain(ROOT, packed, SIZE), packed, WIDTH)


def test_the_longest_sealed_beginning_is_found() -> None:
    index = filled([7, 3, 5], [1, 2, 3, 4, 5, 6])
    assert match(index, [1, 2, 3, 4, 9, 9]) == [7, 3]
    assert match(index, [1, 2, 3, 4, 5, 6, 7, 8]) == [7, 3, 5]
    assert match(index, [9, 2, 3, 4]) == []


def test_a_block_is_not_found_behind_another_beginning() -> None:
    assert match(filled([7, 3], [1, 2, 3, 4]), [3, 4]) == []


def test_a_removed_block_hides_its_continuations_until_it_comes_back() -> None:
    index = filled([7, 3, 5], [1, 2, 3, 4, 5, 6])
    assert index.remove(3) and not index.remove(3)
    assert match(index, [1, 2, 3, 4, 5, 6]) == [7]
    index.add(4, entries([1, 2, 3, 4])[1])
    assert match(index, [1, 2, 3, 4, 5, 6]) == [7, 4, 5]
    index.check_invariants()


def test_token_ids_are_compared_on_a_hit() -> None:
    index = PrefixIndex()
    (honest,) = entries([1, 2])
    index.add(0, honest._replace(ids=pack_ids([1, 3])))
    assert match(index, [1, 2]) == []


def test_the_keys_of_a_table_end_where_a_block_is_not_the_continuation() -> None:
    index = filled([7, 3, 5], [1, 2, 3, 4, 5, 6])
    keys = [e.key for e in entries([1, 2, 3, 4, 5, 6])]
    assert index.chain(ROOT, [7, 3, 5, 9]) == keys
    assert index.chain(ROOT, [7, 5, 3]) == keys[:1]
    assert index.chain(b"x" * 32, [7, 3, 5]) == []


def test_an_inventory_is_loaded_and_what_is_wrong_in_it_skipped() -> None:
    good = listed([4, 1], [1, 2, 3, 4])
    wrong = [
        good[0].model_copy(update={"block_id": 8}),  # the pool has 0..7
        good[0].model_copy(update={"block_id": -1}),
        good[0].model_copy(update={"block_id": 2, "ids": pack_ids([1, 3])}),
        good[0].model_copy(update={"block_id": 2, "ids": pack_ids([1, 2, 3])}),
        good[0].model_copy(update={"block_id": 2, "parent_key": b""}),
        good[0].model_copy(update={"block_id": 2, "key": b"k" * 32}),
    ]
    index = PrefixIndex()
    assert index.load([wrong[0], *good, *wrong[1:]], 8, SIZE) == len(wrong)
    assert match(index, [1, 2, 3, 4]) == [4, 1]
    assert len(index) == 2


def test_of_two_equal_blocks_in_an_inventory_the_first_is_kept() -> None:
    index = PrefixIndex()
    assert index.load(listed([4], [1, 2]) + listed([5], [1, 2]), 8, SIZE) == 0
    assert match(index, [1, 2]) == [4] and 5 not in index


def test_of_two_statements_about_a_block_the_later_holds() -> None:
    index = PrefixIndex()
    assert index.load(listed([4], [1, 2]) + listed([4], [3, 4]), 8, SIZE) == 0
    assert (match(index, [1, 2]), match(index, [3, 4])) == ([], [4])
    index.check_invariants()


def test_the_prefix_longest_not_continued_is_evicted_first_and_from_its_tail() -> None:
    index = PrefixIndex()
    old = listed([0, 1, 2], [1, 1, 1, 2, 1, 3])
    shared_beginning = listed([3], [5, 5])
    idle = listed([4, 5], [7, 7, 7, 8])
    continued = listed([3, 6], [5, 5, 5, 6])[1:]
    index.load(shared_beginning + old + idle + continued, 8, SIZE)
    assert index.leaves_first() == [2, 1, 0, 5, 4, 6, 3]


def test_an_index_that_contradicts_itself_is_noticed() -> None:
    index = filled([7], [1, 2])
    index._block_of[entries([1, 2])[0].key] = 6
    with pytest.raises(AssertionError, match="block 7"):
        index.check_invariants()


KEYS = [bytes([i]) * 32 for i in range(6)]


def test_the_first_to_compute_a_key_leads_it() -> None:
    leaders = Leaders()
    leaders.lead("a", KEYS[:2], 0)
    leaders.lead("b", KEYS[:4], 0)
    assert leaders.find(KEYS[:4]) == ("a", 1)
    assert leaders.find(KEYS[2:4]) == ("b", 3)
    assert leaders.find(KEYS[4:]) is None and leaders.find([]) is None


def test_a_leader_counts_up_to_the_first_gap() -> None:
    leaders = Leaders()
    leaders.lead("a", [KEYS[0], KEYS[1], KEYS[3]], 5)
    assert leaders.find(KEYS[:4]) == ("a", 6)


def test_a_forgotten_leader_leaves_the_keys_of_others() -> None:
    leaders = Leaders()
    leaders.lead("a", KEYS[:1], 0)
    leaders.lead("b", KEYS[:2], 0)
    leaders.forget("b")
    leaders.forget("b")
    assert leaders.sequences() == {"a"}
    assert leaders.find(KEYS[:2]) == ("a", 0)
    leaders.lead("b", KEYS[:2], 0)
    leaders.forget("a")
    assert leaders.find(KEYS[:2]) is None and leaders.find(KEYS[1:]) == ("b", 1)
    leaders.forget("b")
    assert leaders.sequences() == set()
