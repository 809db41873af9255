from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cache_store.fleet_learner import FleetLearner
from services.gpu_worker.batch import Sequence
from services.gpu_worker.speculative import fleet as fleet_module
from services.gpu_worker.speculative.fleet import MAX_ANSWER_TOKENS, MAX_WAITING, Fleet, FleetProposer, expected_of
from services.gpu_worker.speculative.proposer import NOTHING
from shared.suffix_table import LENGTHS, SuffixTable, place_of
from shared.wire import unpack_ids
from tests.gpu_worker.builders import make_params
from tests.suffix_words import word_of

VOCAB_SIZE = 1000


def text(seed: int, size: int = 40) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(size)]


def words_of(*answers: list[int]) -> list[int]:
    learner = FleetLearner()
    for answer in answers:
        learner.learn(answer)
        learner.learn(answer)
    return list(learner.changes_since(0, 1 << 20)[0])


def make_sequence(prompt: list[int], output: list[int], finish: str = "stop", salt: bytes = b"a" * 32) -> Sequence:
    return Sequence(
        sid="r.0", epoch=1, choice=0, params=make_params(max_tokens=10_000), num_prompt_tokens=len(prompt),
        token_ids=[*prompt, *output], block_ids=[], salt=salt, finish=finish,
    )  # fmt: skip


def knowing(*answers: list[int]) -> FleetProposer:
    table = SuffixTable()
    table.put(words_of(*answers))
    return FleetProposer(lambda: table)


def test_drafts_follow_what_others_had() -> None:
    answer = text(1)
    proposer = knowing(answer)
    for at, token_id in enumerate(answer[:30]):
        if at >= 2:
            assert proposer.propose(8).ids == tuple(answer[at : at + 8])
        proposer.append(token_id)


def test_without_a_table_there_is_nothing_and_once_it_has_come_there_is() -> None:
    tables: list[SuffixTable] = []
    proposer = FleetProposer(lambda: tables[0] if tables else None)
    answer = text(2)
    for token_id in answer[:5]:
        proposer.append(token_id)
    assert proposer.propose(3) == NOTHING
    tables.append(SuffixTable())
    tables[0].put(words_of(answer))
    assert proposer.propose(3).ids == tuple(answer[5:8])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=60))
def test_what_is_kept_of_earlier_drafts_is_what_would_be_looked_up(tokens: list[tuple[int, int]]) -> None:
    table = SuffixTable()
    table.put(words_of([0, 1, 2, 3] * 6, [3, 1, 2, 0] * 6))
    kept, read = FleetProposer(lambda: table), list[int]()
    for token_id, most in tokens:
        kept.propose(1)
        kept.append(token_id)
        read.append(token_id)
        fresh = FleetProposer(lambda: table)
        for known in read:
            fresh.propose(1)
            fresh.append(known)
        assert kept.propose(most) == fresh.propose(most)


def test_an_answer_is_told_with_the_end_of_its_prompt() -> None:
    fleet, prompt, output = Fleet(VOCAB_SIZE), text(3), text(4)
    fleet.ended(make_sequence(prompt, output))
    ((tenant, before, answer),) = fleet.take_ended(1 << 20)
    assert tenant == fleet.tenant_of(b"a" * 32)
    assert unpack_ids(before) == prompt[-LENGTHS[0] :] and unpack_ids(answer) == output
    assert fleet.take_ended(1 << 20) == []


@pytest.mark.parametrize("finish", ["", "error", "stale"])
def test_what_goes_on_elsewhere_or_has_failed_is_not_told(finish: str) -> None:
    fleet = Fleet(VOCAB_SIZE)
    fleet.ended(make_sequence(text(3), text(4), finish))
    fleet.ended(make_sequence(text(3), []))
    assert fleet.num_waiting == 0


def test_what_waits_to_be_told_is_bounded() -> None:
    fleet = Fleet(VOCAB_SIZE)
    for number in range(MAX_WAITING + 10):
        fleet.ended(make_sequence([1], [number] * (MAX_ANSWER_TOKENS + 5)))
    assert fleet.num_waiting == MAX_WAITING and fleet.num_ended == MAX_WAITING + 10
    told = fleet.take_ended(100_000)
    assert [unpack_ids(answer)[0] for _, _, answer in told] == [10, 11, 12, 13, 14, 15]
    assert all(len(answer) == 4 * MAX_ANSWER_TOKENS for _, _, answer in told)
    assert len(fleet.take_ended(0)) == 1, "however long it is"


def test_tenants_have_tables_of_their_own() -> None:
    fleet, answer = Fleet(VOCAB_SIZE), text(5)
    fleet.put(fleet.tenant_of(b"a" * 32), words_of(answer))
    drafts = []
    for salt in (b"a" * 32, b"b" * 32):
        proposer = fleet.proposer(make_sequence([1], [], salt=salt))
        for token_id in answer[:8]:
            proposer.append(token_id)
        drafts.append(proposer.propose(4).ids)
    assert drafts == [tuple(answer[8:12]), ()]


def test_another_vocabulary_is_another_tenant() -> None:
    assert Fleet(VOCAB_SIZE).tenant_of(b"a" * 32) != Fleet(VOCAB_SIZE + 1).tenant_of(b"a" * 32)


def test_tokens_that_the_model_does_not_have_are_not_let_in() -> None:
    fleet, tenant = Fleet(VOCAB_SIZE), b"t"
    fleet.put(tenant, words_of([1, 2, VOCAB_SIZE, 3, 4, VOCAB_SIZE - 1]))
    table = fleet.tables[0]
    held = {word >> 4 & 0xFFFFF for word in table.words if word}
    assert held == {3, 4, VOCAB_SIZE - 1}


def test_the_tables_of_tenants_that_are_not_here_any_more_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "MAX_TABLE_BYTES", 2 * SuffixTable().num_bytes)
    fleet = Fleet(VOCAB_SIZE)
    for tenant in (b"1", b"2"):
        assert fleet.use(tenant)
        fleet.put(tenant, words_of(text(6)))
    assert not fleet.use(b"1")
    fleet.put(b"3", words_of(text(6)))
    assert [fleet.use(tenant) for tenant in (b"1", b"2", b"3")] == [False, True, False]


def test_a_sequence_that_was_cut_is_told_from_its_beginning() -> None:
    fleet = Fleet(VOCAB_SIZE)
    fleet.ended(replace(make_sequence([], text(7)), finish="done"))
    ((_, before, answer),) = fleet.take_ended(1)
    assert before == b"" and unpack_ids(answer) == text(7)


def test_more_is_expected_of_what_has_come_more_often_and_always_more_than_of_chance() -> None:
    table = SuffixTable()
    chances = []
    for count in range(2, 16):
        table.put([word_of([1, 2], 3, count)])
        chances.append(expected_of(table.best(place_of([1, 2]))[1]))
    assert chances == sorted(chances) and 0.66 < chances[0] < chances[-1] < 1.0
