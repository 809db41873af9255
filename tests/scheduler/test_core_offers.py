"""A sequence whose best worker another scheduler leases is offered to it, once."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.actions import Finish, Offer
from services.scheduler.matching import MATCH_TIMEOUT_S, MIN_OFFER_GAIN_TOKENS, Neighbour
from services.scheduler.sequence import QueueState
from shared.store_calls import Ensure, Match
from tests.scheduler.hand import BLOCK_SIZE, NUM_BLOCKS, Hand, calls, member, only

LONG = 300


def neighbour(worker: str = "w9", num_sequences: int = 0, **fields: Any) -> Neighbour:
    return Neighbour(member(worker, **fields), "s9", "c9", 7, num_sequences)


def asked(h: Hand, num_tokens: int = LONG, sid: str = "r.0") -> list[Match]:
    h.queue(sid, num_tokens)
    return calls(h.until_quiet(), Match)


def offered(h: Hand, mine: int, theirs: int | None) -> tuple[list[Offer], list[Ensure]]:
    for match in asked(h):
        cached = theirs if match.worker == "w9" else mine
        if cached is not None:
            h.answer(match, cached_length=cached)
    h.now += MATCH_TIMEOUT_S
    actions = h.until_quiet()
    return only(actions, Offer), calls(actions, Ensure)


def hand(*neighbours: Neighbour, **fields: Any) -> Hand:
    h = Hand(**fields)
    h.core.set_neighbours(list(neighbours) or [neighbour()])
    return h


def test_a_much_longer_prefix_elsewhere_is_worth_an_offer() -> None:
    h = hand()
    offers, ensures = offered(h, 0, MIN_OFFER_GAIN_TOKENS)
    assert offers == [Offer("r.0", 0, "s9")] and not ensures
    h.core.on_offered(offers[0], "ok")
    assert not h.core.queue


def test_a_little_longer_prefix_elsewhere_is_not() -> None:
    offers, ensures = offered(hand(), 0, MIN_OFFER_GAIN_TOKENS - 1)
    assert not offers and len(ensures) == 1


def test_the_load_elsewhere_counts() -> None:
    offers, ensures = offered(hand(neighbour(num_sequences=3)), 0, 2 * MIN_OFFER_GAIN_TOKENS)
    assert not offers and len(ensures) == 1


def test_each_offer_counts_as_load() -> None:
    h = hand()
    assert offered(h, 0, MIN_OFFER_GAIN_TOKENS)[0]
    for match in asked(h, sid="q.0"):
        h.answer(match, cached_length=MIN_OFFER_GAIN_TOKENS if match.worker == "w9" else 0)
    assert [e.sid for e in calls(h.until_quiet(), Ensure)] == ["q.0"]


def test_who_does_not_answer_is_offered_nothing() -> None:
    offers, ensures = offered(hand(), 0, None)
    assert not offers and len(ensures) == 1


@pytest.mark.parametrize("fields", [{"num_tokens": MIN_OFFER_GAIN_TOKENS}, {"prefix_caching": False}])
def test_nobody_is_asked_where_nothing_can_be_gained(fields: dict[str, Any]) -> None:
    num_tokens = fields.pop("num_tokens", LONG)
    assert asked(hand(**fields), num_tokens) == []


def test_a_worker_that_is_too_small_is_not_asked() -> None:
    assert asked(hand(neighbour(num_blocks=LONG // BLOCK_SIZE))) == []


@pytest.mark.parametrize("status", ["gone", "offered"])
def test_an_offer_that_is_not_taken_is_not_repeated(status: str) -> None:
    h = hand()
    offers, _ = offered(h, 0, LONG - 1)
    h.core.on_offered(offers[0], status)
    actions = h.until_quiet()
    assert not calls(actions, Match) and not only(actions, Offer)
    assert [(e.sid, e.worker) for e in calls(actions, Ensure)] == [("r.0", "w")]


def test_an_offered_sequence_stays_here() -> None:
    h = hand()
    h.queue("r.0", LONG, offered=True)
    actions = h.until_quiet()
    assert not calls(actions, Match) and [e.worker for e in calls(actions, Ensure)] == ["w"]


def test_one_that_ended_meanwhile_is_forgotten() -> None:
    h = hand()
    offers, _ = offered(h, 0, LONG - 1)
    h.core.on_offered(offers[0], "stale")
    assert not h.core.queue


def test_an_answer_for_an_older_epoch_changes_nothing() -> None:
    h = hand()
    offers, _ = offered(h, 0, LONG - 1)
    h.queue("r.0", LONG, epoch=2)
    h.core.on_offered(offers[0], "ok")
    assert h.core.queue["r.0"].epoch == 2


def test_cancelled_while_it_is_offered() -> None:
    h = hand()
    offers, _ = offered(h, 0, LONG - 1)
    h.core.on_cancelled("r.0", h.now)
    h.core.on_offered(offers[0], "stale")
    assert not h.core.queue and not h.until_quiet()


def test_what_fits_only_elsewhere_is_offered_and_blocks_nobody() -> None:
    """It must not be refused: another scheduler's worker is large enough."""
    h = hand(neighbour(num_blocks=2 * NUM_BLOCKS))
    h.queue("large.0", NUM_BLOCKS * BLOCK_SIZE)
    h.queue("small.0", 10)
    actions = h.until_quiet()
    assert only(actions, Offer) == [Offer("large.0", 0, "s9")] and not only(actions, Finish)
    assert [e.sid for e in calls(actions, Ensure)] == ["small.0"]
    h.core.on_offered(Offer("large.0", 0, "s9"), "gone")
    assert not only(h.until_quiet(), Offer) and h.core.queue["large.0"].state is QueueState.WAITING
    h.core.set_neighbours([])
    assert [f.sid for f in only(h.until_quiet(), Finish)] == ["large.0"]


def test_a_store_elsewhere_that_never_answers_leaves_no_question() -> None:
    h = hand()
    assert len(asked(h)) == 2
    h.now += 2 * MATCH_TIMEOUT_S
    h.until_quiet()
    assert not h.pending(Match)
