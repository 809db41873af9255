"""Whose turn it is, and what a key that floods leaves to others."""

from __future__ import annotations

from typing import Any

from services.scheduler.fairness import PREFILL_AHEAD_S, RECENT_S
from shared.store_calls import Ensure, Update
from shared.worker_protocol import Extend, Preempt
from tests.scheduler.hand import NUM_BLOCKS, Hand, calls, changes, row


def placed(h: Hand, num: int = 1000) -> list[str]:
    """Lets the core place what it wants, one after another; in that order."""
    sids = []
    for _ in range(num):
        ensures = h.pending(Ensure)
        if not ensures:
            break
        assign = h.give(ensures[0])
        h.core.on_assigned(assign, "ok", h.now)
        sids.append(assign.sid)
    return sids


def flood(h: Hand, key: str, num: int, **fields: Any) -> None:
    for i in range(num):
        h.queue(f"{key}{i}.0", key=key, **fields)


def end(h: Hand, *sids: str) -> None:
    h.report(ended=tuple((sid, h.view().running[sid].epoch, "stop") for sid in sids))
    h.answer_updates(h.until_quiet())


def test_keys_take_turns_by_tokens() -> None:
    h = Hand(max_num_seqs=9)
    flood(h, "big", 5, num_tokens=30)
    flood(h, "small", 9, num_tokens=10)
    assert [sid[0] for sid in placed(h)] == [*"sbsssbss"]


def test_drawn_tokens_count_too() -> None:
    h = Hand(max_num_seqs=8, num_blocks=1000)
    flood(h, "a", 1)
    flood(h, "b", 1)
    assert placed(h) == ["a0.0", "b0.0"]
    h.report(row("a0.0", num_tokens=30), row("b0.0"))  # 20 tokens, which weigh 40
    for i in range(1, 7):
        h.queue(f"a{i}.0", key="a", arrival_ms=0)
        h.queue(f"b{i}.0", key="b", arrival_ms=0)
    assert placed(h)[:5] == ["b1.0", "b2.0", "b3.0", "b4.0", "a1.0"]


def test_a_key_that_comes_back_has_saved_nothing_and_is_next() -> None:
    h = Hand(max_num_seqs=8, num_blocks=1000)
    flood(h, "a", 3)
    placed(h)
    for i in range(3, 6):
        h.queue(f"a{i}.0", key="a", arrival_ms=0)
        h.queue(f"new{i}.0", key="new", arrival_ms=0)
    assert placed(h) == ["new3.0", "a3.0", "new4.0", "a4.0"]


def test_one_key_alone_is_served_in_the_order_of_arrival_and_has_every_slot() -> None:
    h = Hand(max_num_seqs=4)
    flood(h, "a", 7)
    assert placed(h) == [f"a{i}.0" for i in range(5)]  # one more than the batch takes


def test_priority_comes_before_fairness() -> None:
    h = Hand(max_num_seqs=3)
    h.queue("b0.0", key="b", priority=1)
    flood(h, "a", 3)
    assert placed(h)[:2] == ["a0.0", "a1.0"]


def test_a_key_that_calls_all_of_its_own_urgent_only_orders_them() -> None:
    h = Hand(max_num_seqs=9)
    for i in range(3):
        h.queue(f"a{i}.0", key="a", priority=-i)
        h.queue(f"b{i}.0", key="b")
    assert placed(h) == ["a2.0", "b0.0", "a1.0", "b1.0", "a0.0", "b2.0"]


def test_as_far_as_the_operator_allows_it_passes_others() -> None:
    h = Hand(max_num_seqs=9, min_priority=-1)
    for i in range(3):
        h.queue(f"a{i}.0", key="a", priority=-i)
        h.queue(f"b{i}.0", key="b")
    assert placed(h) == ["a2.0", "a1.0", "b0.0", "b1.0", "a0.0", "b2.0"]


def test_while_another_key_is_about_a_slot_is_left_for_it() -> None:
    h = Hand(max_num_seqs=4)
    h.run("b0.0", key="b")
    end(h, "b0.0")
    flood(h, "a", 7)
    assert len(placed(h)) == 3
    assert h.ensure("b1.0", key="b").sid == "b1.0"  # at once
    h.now += RECENT_S + 1
    assert "b1.0" in h.core.queue  # it is still there
    placed(h)
    end(h, "b1.0")
    h.now += RECENT_S + 1
    assert len(placed(h)) == 2, "nobody else is about any more"


def test_where_every_slot_is_taken_the_most_served_key_gives_way_to_a_newcomer() -> None:
    h = Hand(max_num_seqs=4)
    flood(h, "a", 7, num_tokens=20)
    sids = placed(h)
    h.now += 1
    h.queue("b0.0", key="b")
    preempts = [c for c in changes(h.until_quiet()) if isinstance(c, Preempt)]
    assert [p.sid for p in preempts] == [sids[-1]]
    h.now += 1
    assert not [c for c in changes(h.until_quiet()) if isinstance(c, Preempt)], "one at a time"
    h.report(ended=((sids[-1], 1, "preempted"),))
    h.answer_updates(h.until_quiet())
    h.queue(sids[-1], 21, epoch=1, key="a", arrival_ms=0)
    assert placed(h) == ["b0.0"]
    h.queue("b1.0", key="b")
    h.now += 1
    assert not [c for c in changes(h.until_quiet()) if isinstance(c, Preempt)], "it has its share"


def test_where_the_pool_is_full_the_most_served_key_gives_way_too() -> None:
    h = Hand(max_num_seqs=8)
    flood(h, "a", 3, num_tokens=20)
    placed(h)
    ensure = h.ensure("b0.0", key="b")
    h.answer(ensure, status="full", num_needed=3, num_free=0)
    assert [c.sid for c in changes(h.until_quiet()) if isinstance(c, Preempt)] == ["a2.0"]


def test_a_key_that_has_to_leave_blocks_does_not_stop_others_when_they_are_used_up() -> None:
    h = Hand(max_num_seqs=8)
    h.run("b0.0", key="b")
    end(h, "b0.0")
    h.run("a0.0", key="a")
    ensure = h.ensure("a1.0", key="a")
    assert ensure.keep_free == 1 + NUM_BLOCKS // 16
    h.answer(ensure, status="full", num_needed=3, num_free=8)
    h.until_quiet()
    assert h.pending(Ensure) == []
    other = h.ensure("b1.0", key="b")
    assert other.keep_free == 1
    h.core.on_assigned(h.give(other, num_free=8), "ok", h.now)
    assert h.pending(Ensure) == []
    end(h, "b1.0")
    assert [e.sid for e in h.pending(Ensure)] == ["a1.0"], "it is asked again when more may be free"


def test_beside_another_key_the_own_of_lower_priority_gives_way_too_and_no_other() -> None:
    h = Hand(max_num_seqs=8)
    h.run("b0.0", key="b", priority=9)
    h.run("low.0", key="a", priority=5)
    h.run("same.0", key="a")
    ensure = h.ensure("urgent.0", key="a")
    assert ensure.keep_free > 3, "some are left to others"
    h.answer(ensure, status="full", num_needed=3, num_free=8)
    assert [c for c in changes(h.until_quiet()) if isinstance(c, Preempt)] == [Preempt(sid="low.0", epoch=1)]
    h.report(ended=(("low.0", 1, "preempted"),))
    [update] = calls(h.until_quiet(), Update)
    h.answer(update, num_free=11)
    assert [e.sid for e in h.pending(Ensure)] == ["urgent.0"]


def test_a_flood_of_long_prompts_does_not_fill_a_worker_with_prefill() -> None:
    h = Hand(max_num_seqs=8)
    h.run("b0.0", key="b")
    h.report(row("b0.0", num_tokens=11), prefill_speed=10 / PREFILL_AHEAD_S)
    flood(h, "a", 5, num_tokens=11)
    assert placed(h) == ["a0.0"]
    h.report(row("b0.0", num_tokens=11), row("a0.0", num_tokens=11), prefill_speed=10 / PREFILL_AHEAD_S)
    assert placed(h) == ["a1.0"], "when it is computed, the next"


def test_a_key_whose_sequences_are_all_taken_over_is_nobody_yet() -> None:
    h = Hand(max_num_seqs=4)
    h.core.set_store("w", "c2", 6)
    h.make_ready("w", row("x.0", epoch=2))
    flood(h, "a", 5)
    assert len(placed(h)) == 4
    assert not [c for c in changes(h.until_quiet()) if isinstance(c, Extend | Preempt)]
