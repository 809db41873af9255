from __future__ import annotations

from typing import Any

import pytest

from services.gpu_worker.batch import Chunk, Sequence
from services.gpu_worker.scripted_engine import CRASH_STATUS, KVCorruption, ScriptedEngine, ScriptedFailure, validate
from shared import scripted_vocab as vocab
from tests.gpu_worker.builders import BLOCK_SIZE, make_params, make_sequence


def engine(**options: Any) -> ScriptedEngine:
    return ScriptedEngine(**({"num_blocks": 16, "block_size": BLOCK_SIZE} | options))


def whole(seq: Sequence) -> Chunk:
    return Chunk(seq, seq.num_computed, len(seq.token_ids) - seq.num_computed, True)


def with_prompt(ids: list[int], **fields: Any) -> Sequence:
    seq = make_sequence(len(ids), **fields)
    seq.token_ids = list(ids)
    return seq


def draw(e: ScriptedEngine, seq: Sequence) -> int:
    ((token,),) = e.step([whole(seq)])
    seq.num_computed = len(seq.token_ids)
    seq.token_ids.append(token.token_id)
    return token.token_id


def test_tokens_do_not_depend_on_mates_or_chunks() -> None:
    e, a, b = engine(), make_sequence(10), make_sequence(7, sid="b.0", first_block=8)
    assert e.step([Chunk(a, 0, 3, False), Chunk(b, 0, 7, True)])[0] == ()
    a.num_computed = 3
    assert [draw(e, a) for _ in range(5)] == vocab.answer(a.token_ids[:10], 5)


def test_a_seeded_sequence_draws_by_seed_and_choice() -> None:
    seq = make_sequence(5, temperature=1.0, seed=9)
    seq.choice = 2
    assert draw(engine(), seq) == vocab.answer(seq.token_ids[:5], 1, seed=9, choice=2)[0]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda seq, e: seq.block_ids.__setitem__(0, 9),  # never written
        lambda seq, e: seq.block_ids.reverse(),
        lambda seq, e: seq.token_ids.__setitem__(2, 255),  # other tokens than were written
        lambda seq, e: e.step([whole(make_sequence(4, sid="thief.0"))]),  # a second writer
        lambda seq, e: setattr(seq, "num_computed", 9),  # a token left out
        lambda seq, e: seq.block_ids.__setitem__(2, 99),
    ],
)
def test_a_wrong_block_table_is_noticed(spoil: Any) -> None:
    e, seq = engine(), make_sequence(8)
    draw(e, seq)
    seq.token_ids += [1, 2]
    spoil(seq, e)
    with pytest.raises(KVCorruption):
        e.step([whole(seq)])


def test_a_block_after_another_prefix_is_no_hit() -> None:
    e, seq = engine(), make_sequence(9)
    draw(e, seq)
    other = make_sequence(9, sid="b.0", first_block=8, num_computed=8)
    other.token_ids = [255, *seq.token_ids[1:9]]
    other.block_ids[1] = seq.block_ids[1]
    e.step([Chunk(other, 0, 4, False)])
    with pytest.raises(KVCorruption):
        e.step([whole(other)])


@pytest.mark.parametrize("prompt", [[vocab.CRASH, 1], [vocab.HANG, 1], [vocab.RAISE, 1]])
def test_markers_act_when_their_token_is_drawn(prompt: list[int]) -> None:
    acts: list[Any] = []
    e = engine(crash=acts.append, hang=lambda: acts.append("hang"))
    seq = with_prompt(prompt)
    draw(e, seq)
    assert not acts
    if prompt[0] == vocab.RAISE:
        with pytest.raises(ScriptedFailure):
            e.step([whole(seq)])
    else:
        draw(e, seq)
        assert acts == [CRASH_STATUS if prompt[0] == vocab.CRASH else "hang"]


def test_text_in_a_prompt_acts_like_a_marker() -> None:
    acts: list[int] = []
    e = engine(crash_on=b"boom", crash=acts.append)
    draw(e, with_prompt(list(b"say bo")))
    assert not acts
    draw(e, with_prompt(list(b"say boom"), first_block=8))
    assert acts == [CRASH_STATUS]


def test_a_step_takes_its_time() -> None:
    slept: list[float] = []
    e = engine(step_s=0.5, token_s=0.25, sleep=slept.append)
    seq = make_sequence(6)
    draw(e, seq)
    draw(e, seq)
    assert slept == [2.0, 0.5]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_logprobs_are_there_where_asked_for(count: int) -> None:
    ((token,),) = engine().step([whole(make_sequence(6, logprobs=count))])
    assert len(token.top) == count and token.logprob == -0.5
    assert not count or token.top[0] == (token.token_id, -0.5)


def test_ids_outside_the_vocabulary_are_named() -> None:
    assert validate(make_params(stop_token_ids=(vocab.EOS,), logit_bias={0: 1.0}), vocab.VOCAB_SIZE) is None
    assert "stop_token_ids" in str(validate(make_params(stop_token_ids=(vocab.VOCAB_SIZE,)), vocab.VOCAB_SIZE))
    assert "logit_bias" in str(validate(make_params(logit_bias={vocab.VOCAB_SIZE: 1.0}), vocab.VOCAB_SIZE))
