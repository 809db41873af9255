"""What a sequence gets: shared blocks, its own, or a reason to wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.cache_store.holds import Endings, Sealed
from tests.cache_store.numbered import Numbered

PROMPT = list(range(100, 110))  # two whole blocks of 4 and two tokens


# --- ensure: what is shared, what is allocated -----------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (3, 1), (4, 2), (7, 2), (8, 3), (9, 3)])
def test_a_table_has_room_for_the_prompt_and_one_token(calls: Numbered, num_tokens: int, num_blocks: int) -> None:
    result = calls.ensure("a", list(range(num_tokens)))
    assert (result.status, len(result.block_ids), result.cached_length) == ("ok", num_blocks, 0)
    assert calls.num_free == 16 - num_blocks


def test_nothing_is_shared_before_it_is_sealed(calls: Numbered) -> None:
    a = calls.ensure("a", PROMPT)
    b = calls.ensure("b", PROMPT, wait_for_leader=False)
    assert b.cached_length == 0 and not set(a.block_ids) & set(b.block_ids)


def test_a_sealed_beginning_is_shared(calls: Numbered) -> None:
    a = calls.ensure("a", PROMPT)
    calls.seal("a", 0, PROMPT)
    b = calls.ensure("b", PROMPT[:7])
    assert b.cached_length == 4
    assert b.block_ids[0] == a.block_ids[0] and b.block_ids[1] not in a.block_ids
    calls.seal("a", 1, PROMPT)
    c = calls.ensure("c", PROMPT)
    assert c.cached_length == 8 and c.block_ids[:2] == a.block_ids[:2] and c.block_ids[2] not in a.block_ids


def test_sealed_blocks_are_found_after_their_last_holder_is_gone(calls: Numbered) -> None:
    table = calls.compute("a", PROMPT)
    assert calls.num_free == 16
    again = calls.ensure("b", PROMPT)
    assert again.cached_length == 8 and again.block_ids[:2] == table[:2]
    assert calls.num_free == 13


def test_an_output_block_is_found_by_the_next_turn(calls: Numbered) -> None:
    conversation = PROMPT + [7, 7]
    calls.ensure("a", PROMPT)
    calls.seal_all("a", conversation)
    calls.release("a")
    assert calls.match([*conversation, 1]) == 12


def test_another_salt_shares_nothing(calls: Numbered) -> None:
    calls.compute("a", PROMPT)
    assert calls.match(PROMPT) == 8
    assert calls.match(PROMPT, salt=b"\1" * 32) == 0
    assert calls.ensure("b", PROMPT, salt=b"\1" * 32).cached_length == 0


@pytest.mark.parametrize("num_tokens", [4, 8, 12])
def test_prefix_cache_correctness_the_last_token_is_computed_in_a_private_block_also_on_a_full_hit(
    calls: Numbered, num_tokens: int
) -> None:
    ids = list(range(num_tokens))
    table = calls.compute("a", ids)
    assert calls.match(ids) == num_tokens - 4
    b = calls.ensure("b", ids)
    assert b.cached_length == num_tokens - 4
    last = num_tokens // 4 - 1
    assert b.block_ids[:last] == table[:last]
    assert calls.manager.pool.num_refs(table[last]) == 0
    assert calls.seal("b", last, ids) == Sealed(True, twin=table[last])


def test_a_sequence_that_wants_every_position_matches_nothing_and_waits_for_nobody(calls: Numbered) -> None:
    table = calls.compute("a", PROMPT)
    b = calls.ensure("b", PROMPT, use_cached=False)
    assert (b.status, b.cached_length) == ("ok", 0) and not set(b.block_ids) & set(table[:2])
    assert calls.seal("b", 0, PROMPT).twin == table[0]


def test_match_changes_nothing_not_even_the_order_of_eviction(make_calls: Callable[[int], Numbered]) -> None:
    calls = make_calls(3)
    calls.compute("old", [1, 2, 3, 4])
    calls.compute("new", [5, 6, 7, 8])
    assert calls.match([1, 2, 3, 4, 9]) == 4
    calls.ensure("c", [9] * 4)
    assert (calls.match([1, 2, 3, 4, 9]), calls.match([5, 6, 7, 8, 9])) == (0, 4)


def test_hits_are_counted_in_tokens(calls: Numbered) -> None:
    calls.compute("a", PROMPT)
    calls.ensure("b", PROMPT)
    assert (calls.manager.counts.query_tokens, calls.manager.counts.hit_tokens) == (20, 8)


# --- ensure: a call is a state ---------------------------------------------------------------------------------------


def test_a_repeated_ensure_gives_the_same_table(calls: Numbered) -> None:
    calls.compute("x", PROMPT)
    first = calls.ensure("a", PROMPT)
    free = calls.num_free
    assert calls.ensure("a", PROMPT) == first
    assert calls.ensure("a", PROMPT, at=calls.last - 1) == first
    assert calls.num_free == free


def test_a_higher_epoch_replaces_what_the_sequence_held(calls: Numbered) -> None:
    calls.ensure("a", PROMPT, epoch=1)
    second = calls.ensure("a", PROMPT, epoch=2)
    assert calls.table("a", 1) == () and calls.table("a", 2) == second.block_ids
    assert calls.num_free == 13
    calls.release("a", epoch=1)
    assert calls.table("a", 2) == second.block_ids


def test_a_lower_epoch_is_stale(calls: Numbered) -> None:
    calls.ensure("a", PROMPT, epoch=2)
    assert calls.ensure("a", PROMPT, epoch=1).status == "stale"
    calls.release("a", epoch=2)
    assert calls.ensure("a", PROMPT, epoch=1).status == "stale"
    assert calls.num_free == 16


def test_a_lower_epoch_is_stale_also_where_the_higher_one_holds_nothing(make_calls: Callable[[int], Numbered]) -> None:
    calls = make_calls(2)
    assert calls.ensure("a", PROMPT, epoch=2, at=5).status == "full"
    assert calls.ensure("a", [1], epoch=1, at=4).status == "stale"


def test_an_ensure_that_its_release_overtook_is_stale(calls: Numbered) -> None:
    calls.last = 10
    calls.release("a")
    assert calls.ensure("a", PROMPT, at=9).status == "stale"
    assert calls.num_free == 16


def test_a_released_epoch_can_be_ensured_anew(calls: Numbered) -> None:
    calls.ensure("a", PROMPT)
    release = calls.last + 1
    calls.release("a")
    assert calls.ensure("a", PROMPT).status == "ok"
    calls.release("a", at=release)
    assert calls.table("a") != ()


def test_a_late_release_does_not_end_what_was_asked_for_again(calls: Numbered) -> None:
    calls.ensure("a", PROMPT, at=1)
    table = calls.ensure("a", PROMPT, at=3).block_ids
    calls.release("a", at=2)
    assert calls.table("a") == table


def test_a_full_pool_answers_full_and_changes_nothing(make_calls: Callable[[int], Numbered]) -> None:
    calls = make_calls(5)
    calls.compute("x", PROMPT[:5])
    calls.ensure("a", [1, 2, 3, 4, 5, 6, 7, 8])
    before = calls.manager.pool.num_refs(0), calls.num_free, calls.manager.pool.num_cached
    b = calls.ensure("b", PROMPT)
    assert (b.status, b.num_needed, b.block_ids) == ("full", 3, ())  # the cached block, and two of its own
    assert (calls.manager.pool.num_refs(0), calls.num_free, calls.manager.pool.num_cached) == before
    calls.release("a")
    assert calls.ensure("b", PROMPT).cached_length == 4


def test_blocks_kept_free_for_others_count_as_not_there(calls: Numbered) -> None:
    assert calls.ensure("a", PROMPT, keep_free=14).status == "full"
    assert calls.ensure("a", PROMPT, keep_free=13).status == "ok"


def test_shared_blocks_in_use_need_no_room(make_calls: Callable[[int], Numbered]) -> None:
    calls = make_calls(4)
    calls.ensure("a", PROMPT)
    calls.seal_all("a", PROMPT)
    assert calls.num_free == 1
    assert calls.ensure("b", PROMPT).status == "ok"


def test_endings_are_forgotten_in_order_and_calls_of_before_count_as_too_old() -> None:
    endings = Endings(limit=2)
    endings.record("a", 1, order=10)
    endings.record("b", 1, order=11)
    assert endings.is_over("a", 1, order=9) and not endings.is_over("c", 1, order=9)
    endings.record("a", 2, order=12)
    endings.record("c", 1, order=13)
    assert len(endings) == 2
    assert endings.is_over("b", 1, order=10) and endings.is_over("d", 1, order=11)
    assert not endings.is_over("d", 1, order=12)


# --- leaders: a shared prompt is computed once -----------------------------------------------------------------------


def test_a_sequence_waits_for_the_one_that_computes_its_next_block(calls: Numbered) -> None:
    calls.ensure("a", PROMPT)
    free = calls.num_free
    b = calls.ensure("b", PROMPT)
    assert (b.status, b.leader, b.leader_index, b.block_ids) == ("wait", "a", 1, ())
    assert calls.num_free == free and calls.table("b") == ()
    calls.seal("a", 0, PROMPT)
    assert calls.ensure("b", PROMPT).leader_index == 1
    calls.seal("a", 1, PROMPT)
    assert calls.ensure("b", PROMPT).cached_length == 8
    assert calls.manager.counts.waits == 2


def test_simultaneous_equal_prompts_are_computed_once(calls: Numbered) -> None:
    answers = [calls.ensure(f"r.{i}", PROMPT).status for i in range(4)]
    assert answers == ["ok", "wait", "wait", "wait"]
    calls.seal_all("r.0", PROMPT)
    assert [calls.ensure(f"r.{i}", PROMPT).cached_length for i in range(1, 4)] == [8, 8, 8]


def test_a_sequence_waits_only_for_blocks_it_can_share(calls: Numbered) -> None:
    calls.ensure("a", PROMPT)
    assert calls.ensure("b", PROMPT[:4]).status == "ok", "its only block holds its last token"
    assert calls.ensure("c", PROMPT[:8]).leader_index == 0


def test_a_leader_leads_only_whole_blocks_of_its_prompt(calls: Numbered) -> None:
    calls.ensure("a", PROMPT[:7])
    assert calls.ensure("b", PROMPT).leader_index == 0
    calls.seal("a", 0, PROMPT)
    assert calls.ensure("b", PROMPT).cached_length == 4


def test_the_rest_of_a_prompt_may_have_another_leader(calls: Numbered) -> None:
    calls.ensure("a", PROMPT[:5])
    calls.ensure("b", PROMPT, wait_for_leader=False)
    c = calls.ensure("c", PROMPT)
    assert (c.leader, c.leader_index) == ("a", 0)
    calls.seal("a", 0, PROMPT)
    c = calls.ensure("c", PROMPT)
    assert (c.leader, c.leader_index) == ("b", 1)


def test_who_does_not_want_to_wait_computes_too(calls: Numbered) -> None:
    calls.ensure("a", PROMPT)
    assert calls.ensure("b", PROMPT, wait_for_leader=False).status == "ok"


def test_nobody_waits_for_a_sequence_that_is_gone(calls: Numbered) -> None:
    calls.ensure("a", PROMPT)
    calls.seal("a", 0, PROMPT)
    calls.release("a")
    b = calls.ensure("b", PROMPT)
    assert (b.status, b.cached_length) == ("ok", 4)
    assert calls.ensure("c", PROMPT).leader == "b"


def test_a_higher_epoch_does_not_wait_for_its_own_past(calls: Numbered) -> None:
    calls.ensure("a", PROMPT, epoch=1)
    assert calls.ensure("a", PROMPT, epoch=2).status == "ok"
