from __future__ import annotations

from services.gpu_worker.seals import MAX_PAGE_BYTES, SealedBlocks, inventory_pages
from shared.block_keys import chain, root_key
from shared.store_calls import Inventory, InventoryEntry
from shared.wire import decode_as, encode, pack_ids
from tests.gpu_worker.builders import BLOCK_SIZE, SALT, make_sequence


def test_blocks_are_sealed_once_as_their_tokens_are_computed() -> None:
    sealed = SealedBlocks(BLOCK_SIZE, "v")
    seq = make_sequence(14, first_block=3)
    keys = chain(root_key(SALT, "v"), pack_ids(seq.token_ids), BLOCK_SIZE)
    told = []
    for num_computed in (3, 4, 4, 13):
        seq.num_computed = num_computed
        told.append([(s.index, s.block_id, list(s.ids)) for s in sealed.seal_computed(seq)])
    ids = seq.token_ids
    assert told == [[], [(0, 3, ids[:4])], [], [(1, 4, ids[4:8]), (2, 5, ids[8:12])]]
    assert seq.keys == keys and [sealed.key_of(b) for b in (3, 4, 5, 6)] == [*keys, None]
    assert [e.parent_key for e in sealed.entries()] == [root_key(SALT, "v"), *keys[:2]]


def test_sealing_goes_on_after_a_cached_prefix() -> None:
    sealed = SealedBlocks(BLOCK_SIZE, "v")
    seq = make_sequence(9, num_computed=9)
    seq.keys, seq.num_sealed = sealed.prefix_keys(seq, 1), 1
    assert [s.index for s in sealed.seal_computed(seq)] == [1]
    assert seq.keys == chain(root_key(SALT, "v"), pack_ids(seq.token_ids), BLOCK_SIZE)


def test_a_block_sealed_again_is_the_newest() -> None:
    sealed = SealedBlocks(BLOCK_SIZE, "v")
    sealed.seal_computed(make_sequence(8, num_computed=8))
    sealed.seal_computed(make_sequence(4, sid="other.0", num_computed=4))  # block 0 again, with other tokens
    assert [e.block_id for e in sealed.entries()] == [1, 0]


def test_an_inventory_is_paged_and_its_end_is_said() -> None:
    entries = [
        InventoryEntry(block_id=i, key=bytes(32), parent_key=bytes(32), ids=pack_ids(range(16))) for i in range(5000)
    ]
    pages = list(inventory_pages(entries, "w", 3))
    assert [b for page in pages for b in page.blocks] == entries
    assert [p.last for p in pages] == [False] * (len(pages) - 1) + [True] and len(pages) > 1
    for page in pages:
        data = encode(page)
        assert len(data) <= MAX_PAGE_BYTES and decode_as(Inventory, data) == page


def test_an_empty_inventory_is_one_page() -> None:
    (page,) = inventory_pages([], "w", 3)
    assert page.last and not page.blocks and (page.worker, page.pool_term) == ("w", 3)
