from __future__ import annotations

import random

import pytest

from services.cache_store import fleet_store as fleet_store_module
from services.cache_store.fleet_learner import FleetLearner
from services.cache_store.fleet_store import PIECE_TOKENS, TENANT_BYTES, FleetStore
from shared.store_calls import FleetCall, FleetChanges
from shared.suffix_table import SuffixTable, place_of, unpack_words
from shared.wire import ProtocolError, pack_ids

A, B = b"a" * 32, b"b" * 32


def text(seed: int, size: int = 40) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(size)]


def tell(store: FleetStore, tenant: bytes, *answers: list[int], before: tuple[int, ...] = ()) -> None:
    told = tuple((tenant, pack_ids(before), pack_ids(answer)) for answer in answers)
    assert store.handle(FleetCall(worker="w", reply_to="plan:w", answers=told)) == []


def learn_all(store: FleetStore) -> None:
    while store.learn_piece():
        pass


def ask(store: FleetStore, tenant: bytes, version: int = 0) -> FleetChanges | None:
    replies = store.handle(FleetCall(worker="w", reply_to="plan:w", asks=((tenant, version),)))
    assert all(stream == "plan:w" for stream, _ in replies)
    return replies[0][1] if replies else None


def known(changes: FleetChanges | None) -> SuffixTable:
    table = SuffixTable()
    if changes is not None:
        table.put(unpack_words(changes.words))
    return table


def test_what_one_worker_tells_another_is_told() -> None:
    store, answer = FleetStore(lambda: "c"), text(1)
    tell(store, A, answer, answer, before=(1, 2))
    assert ask(store, A) is None, "it takes time"
    learn_all(store)
    changes = ask(store, A)
    assert changes is not None and changes.store == "c" and changes.is_all
    assert known(changes).best(place_of([1, 2]))[0] == answer[0]
    assert known(changes).best(place_of(answer[10:18]))[0] == answer[18]
    assert ask(store, A, changes.version) is None


def test_another_tenant_is_told_nothing_of_it() -> None:
    store, answer = FleetStore(lambda: "c"), text(1)
    tell(store, A, answer, answer)
    tell(store, B, text(2), text(2))
    learn_all(store)
    table = known(ask(store, B))
    assert table.num_entries and not any(table.best(place_of(answer[:at]))[1] for at in range(2, 40))


def test_a_long_answer_is_learnt_in_pieces_as_a_whole() -> None:
    store, answer, learner = FleetStore(lambda: "c"), text(3, 3 * PIECE_TOKENS), FleetLearner()
    tell(store, A, answer, answer)
    pieces = 1
    while store.learn_piece():
        pieces += 1
    learner.learn(answer)
    learner.learn(answer)
    assert pieces == 6 and store._learners[A].words == learner.words


def test_answers_that_cannot_wait_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_store_module, "MAX_WAITING_TOKENS", 1000)
    store, answer = FleetStore(lambda: "c"), text(4, 500)
    tell(store, A, answer, answer, answer)
    assert store.counts["answers_left_out"] == 1
    learn_all(store)
    assert (store.counts["answers_learnt"], store.has_waiting) == (2, False)
    tell(store, A, answer)
    assert store.counts["answers_left_out"] == 1


def test_an_answer_without_tokens_is_nothing() -> None:
    store = FleetStore(lambda: "c")
    tell(store, A, [], text(5), text(5))
    learn_all(store)
    assert store.counts["answers_learnt"] == 3 and ask(store, A) is not None


def test_what_is_no_answer_is_refused() -> None:
    with pytest.raises(ProtocolError):
        FleetStore(lambda: "c").handle(FleetCall(worker="w", reply_to="r", answers=((A, b"", b"abc"),)))


def test_a_large_table_is_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_store_module, "MAX_LINES", 50)
    store, table, version, replies = FleetStore(lambda: "c"), SuffixTable(), 0, 0
    answers = [text(seed) for seed in range(10)]
    for answer in answers:
        tell(store, A, answer, answer)
    learn_all(store)
    while (changes := ask(store, A, version)) is not None:
        table.put(unpack_words(changes.words))
        version, replies = changes.version, replies + 1
        assert changes.is_all == (ask(store, A, version) is None)
    assert replies > 3 and all(table.best(place_of(answer[4:12]))[0] == answer[12] for answer in answers)


def test_memory_is_bounded_and_the_longest_unused_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_store_module, "MAX_BYTES", 10 * (TENANT_BYTES + FleetLearner().num_bytes))
    store = FleetStore(lambda: "c")
    tenants = [bytes([n]) * 32 for n in range(30)]
    for tenant in tenants:
        tell(store, tenant, text(6, 9), text(6, 9))
        learn_all(store)
        assert ask(store, tenants[0]) is not None, "which is asked for all the time"
        actual = sum(TENANT_BYTES + learner.num_bytes for learner in store._learners.values())
        assert store.num_bytes == actual <= fleet_store_module.MAX_BYTES
    assert store.num_tenants == 10 and [ask(store, t) is not None for t in tenants[1:]] == 20 * [False] + 9 * [True]


def test_counts_of_what_it_holds() -> None:
    store = FleetStore(lambda: "c")
    tell(store, A, text(7), text(7))
    learn_all(store)
    assert 95 < store.num_entries <= 38 + 36 + 32 and store.counts["tokens_learnt"] == 80
    changes = ask(store, A)
    assert changes is not None and store.counts["bytes_told"] == len(changes.words) > 700
