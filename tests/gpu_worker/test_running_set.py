from __future__ import annotations

import pytest

from services.gpu_worker.admission import NotRunnable
from services.gpu_worker.composer import Budget
from services.gpu_worker.reports import report, running_state
from services.gpu_worker.running_set import Change, RunningSet
from services.gpu_worker.step_cost import StepCost
from shared import scripted_vocab as vocab
from shared.protocol import Outcome
from shared.wire import decode_as
from shared.worker_protocol import Cancel, Extend, ListInventory, Preempt, Reclaim, Remap, SetPolicy, TakeOver
from tests.gpu_worker.builders import (
    BLOCK_SIZE,
    admit,
    apply,
    ended,
    make_admit,
    make_engine,
    make_running,
    run_dry,
    step,
)

PROMPT = b"abcdef"  # one block of 4 and a half


def outcome_of(running: RunningSet) -> Outcome:
    (entry,) = [e for e in running.ledger.build().entries if e.outcome]
    return decode_as(Outcome, entry.outcome)


def output_of(running: RunningSet, sid: str) -> list[int]:
    """Tokens drawn so far, whether the sequence still runs or not."""
    (account,) = [a for a in running.ledger._accounts.values() if a.seq.sid == sid]
    return account.seq.token_ids[account.seq.num_prompt_tokens :]


# --- running and ending ----------------------------------------------------------------------------------------------


def test_a_sequence_runs_to_its_end_and_is_reported_with_its_seals() -> None:
    running = make_running()
    admit(running, PROMPT, block_ids=(0, 1, 2, 3), max_tokens=6)
    run_dry(running, make_engine(running))
    assert output_of(running, "r.0") == vocab.answer(PROMPT, 6)
    assert outcome_of(running) == Outcome(reason="length", num_tokens=6)
    carried = running.outbox.carry(())
    ids = (*PROMPT, *vocab.answer(PROMPT, 6))
    assert [(s.index, s.block_id, s.ids) for s in carried.seals] == [(0, 0, ids[:4]), (1, 1, ids[4:8])]
    assert ended(running) == [("r.0", 1, "length")]
    assert running.blocks.num_held == 0


def test_the_last_token_drawn_is_not_computed_so_its_block_is_not_sealed() -> None:
    running = make_running()
    admit(running, PROMPT, block_ids=(0, 1), max_tokens=2)  # 8 tokens in all, of which 7 are computed
    run_dry(running, make_engine(running))
    assert [s.index for s in running.outbox.carry(()).seals] == [0]


def test_a_stop_token_ends_it_and_is_committed() -> None:
    running = make_running()
    prompt = [vocab.SCRIPT, 1, 2]
    admit(running, prompt, max_tokens=9, stop_token_ids=(vocab.EOS,))
    run_dry(running, make_engine(running))
    assert output_of(running, "r.0") == [1, 2, vocab.EOS]
    assert outcome_of(running) == Outcome(reason="stop", num_tokens=3)


def test_a_stop_token_before_min_tokens_does_not_count() -> None:
    running = make_running()
    admit(running, [vocab.SCRIPT, 1, 1, 1, 1], max_tokens=9, min_tokens=2, stop_token_ids=(1,))
    run_dry(running, make_engine(running))
    assert output_of(running, "r.0") == [1, 1, 1]


def test_a_full_context_ends_it() -> None:
    running = make_running(max_model_len=9)
    admit(running, PROMPT, block_ids=(0, 1, 2), max_tokens=100)
    run_dry(running, make_engine(running))
    assert outcome_of(running) == Outcome(reason="length", num_tokens=3)


def test_a_full_pool_ends_it_where_it_could_not_be_taken_up_again() -> None:
    """With one token more its next place would need a block that no pool of this size has."""
    running = make_running(num_blocks=3)
    admit(running, PROMPT, block_ids=(0, 1, 2), max_tokens=100)
    run_dry(running, make_engine(running))
    assert outcome_of(running) == Outcome(reason="length", num_tokens=3 * BLOCK_SIZE - len(PROMPT))


@pytest.mark.parametrize(
    "output_ids, params, reason",
    [
        ([97, 98], {"max_tokens": 2}, "length"),
        ([97, 98], {"max_tokens": 9, "stop_token_ids": (98,)}, "stop"),
        ([], {"max_tokens": 0}, "length"),
    ],
)
def test_a_log_that_is_complete_ends_it_without_a_step(
    output_ids: list[int], params: dict[str, object], reason: str
) -> None:
    running = make_running()
    admit(running, PROMPT, output_ids=output_ids, **params)
    assert not running.prepare(64).chunks and ended(running) == [("r.0", 1, reason)]
    entry = running.ledger.build().entries[0]
    assert (entry.first, entry.count) == (len(output_ids), 0)
    assert outcome_of(running) == Outcome(reason=reason, num_tokens=len(output_ids))  # type: ignore[arg-type]


def test_a_resumed_sequence_draws_what_it_would_have_drawn() -> None:
    whole = vocab.answer(PROMPT, 8)
    running = make_running()
    admit(running, PROMPT, output_ids=whole[:3], block_ids=(0, 1, 2, 3))
    run_dry(running, make_engine(running))
    assert output_of(running, "r.0") == whole
    assert running.ledger.build().entries[0].first == 3


def test_a_sequence_that_runs_alone_has_no_mates() -> None:
    running = make_running()
    engine = make_engine(running)
    admit(running, PROMPT, sid="a.0", block_ids=(0, 1, 2, 3))
    admit(running, PROMPT, sid="x.0", block_ids=(4, 5, 6, 7), alone=True)
    admit(running, PROMPT, sid="b.0", block_ids=(8, 9, 10, 11))
    batches = []
    while chunks := step(running, engine):
        batches.append({c.seq.sid for c in chunks})
    assert {"a.0", "b.0"} in batches and {"x.0"} in batches
    assert all(b == {"x.0"} or "x.0" not in b for b in batches)


# --- bad requests end alone ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, params, field",
    [
        ([], {}, "prompt"),
        ([vocab.VOCAB_SIZE], {}, "prompt"),
        (list(bytes(64)), {}, "prompt"),
        (list(PROMPT), {"stop_token_ids": (9999,)}, "stop_token_ids"),
        (list(PROMPT), {"logit_bias": {9999: 1.0}}, "logit_bias"),
    ],
)
def test_an_invalid_request_ends_as_one_error_through_the_log(
    prompt: list[int], params: dict[str, object], field: str
) -> None:
    running = make_running()
    admit(running, prompt, block_ids=tuple(range(16)), **params)
    outcome = outcome_of(running)
    assert (outcome.reason, outcome.code) == ("error", "invalid_request") and outcome.message.startswith(field)
    assert ended(running) == [("r.0", 1, "error")] and running.blocks.num_held == 0


def test_an_engine_failure_ends_it_with_what_it_has() -> None:
    running = make_running()
    admit(running, PROMPT, block_ids=(0, 1, 2, 3))
    step(running, make_engine(running))
    running.fail(running.sequences["r.0"])
    outcome = outcome_of(running)
    assert (outcome.reason, outcome.code, outcome.num_tokens) == ("error", "engine_error", 1)
    assert "Error" not in outcome.message and "Exception" not in outcome.message


@pytest.mark.parametrize("reason", ["stale", "error"])
def test_records_that_say_no_end_it(reason: str) -> None:
    running = make_running()
    running.apply(Change("run", 1, make_admit(), NotRunnable(reason)))
    assert ended(running) == [("r.0", 1, reason)] and not running.has_work


# --- terms and epochs ------------------------------------------------------------------------------------------------


def test_changes_of_a_lower_run_term_are_ignored() -> None:
    running = make_running()
    apply(running, TakeOver(term=5, inbox="s"), term=5)
    admit(running, PROMPT)  # term 1
    apply(running, Extend(sid="", epoch=0, pool_term=0, block_ids=(7,)), term=4)
    assert not running.sequences and not running.blocks.spares and not ended(running)
    assert running.counts["fenced"] == 2
    apply(running, TakeOver(term=4, inbox="old"), term=4)
    assert running.run_term == 5 and [q.term for q in running.questions if isinstance(q, TakeOver)] == [5]


def test_an_admit_under_an_older_pool_term_is_refused_and_other_changes_ignored() -> None:
    running = make_running()
    admit(running, PROMPT, pool_term=1, block_ids=(0, 1))
    apply(running, ListInventory(pool_term=2, reply_to="cache:c"), kind="pool", term=2)
    admit(running, PROMPT, sid="q.0", pool_term=1, block_ids=(2, 3))
    assert ended(running) == [("q.0", 1, "refused")]
    apply(running, Extend(sid="r.0", epoch=1, pool_term=1, block_ids=(4,)))
    apply(running, Extend(sid="", epoch=0, pool_term=1, block_ids=(5,)))
    assert running.sequences["r.0"].block_ids == [0, 1] and not running.blocks.spares


def test_an_older_store_is_not_answered() -> None:
    running = make_running()
    apply(running, ListInventory(pool_term=2, reply_to="cache:new"), kind="pool", term=2)
    apply(running, ListInventory(pool_term=1, reply_to="cache:old"), kind="pool", term=1)
    assert running.pool_term == 2 and len(running.questions) == 1


def test_a_question_asked_again_is_answered_once() -> None:
    running = make_running()
    for inbox in ("s-old", "s-new"):
        apply(running, TakeOver(term=2, inbox=inbox), term=2)
        apply(running, ListInventory(pool_term=1, reply_to="cache:c"), kind="pool", term=1)
    assert running.questions == [TakeOver(term=2, inbox="s-new"), ListInventory(pool_term=1, reply_to="cache:c")]


@pytest.mark.parametrize("epoch", [1, 3])
def test_changes_of_another_epoch_are_ignored(epoch: int) -> None:
    running = make_running()
    admit(running, PROMPT, epoch=2)
    apply(running, Cancel(sid="r.0", epoch=epoch))
    apply(running, Preempt(sid="r.0", epoch=epoch))
    apply(running, Extend(sid="r.0", epoch=epoch, pool_term=0, block_ids=(9,)))
    apply(running, Remap(sid="r.0", epoch=epoch, pool_term=0, index=0, block_id=9))
    assert running.sequences["r.0"].block_ids == [0, 1] and not ended(running)


def test_a_higher_epoch_replaces_and_a_repeat_is_ignored() -> None:
    running = make_running()
    admit(running, PROMPT, epoch=2)
    step(running, make_engine(running))
    admit(running, PROMPT, epoch=2, block_ids=(4, 5))
    admit(running, PROMPT, epoch=1, block_ids=(4, 5))
    assert running.sequences["r.0"].block_ids == [0, 1] and not ended(running)
    admit(running, PROMPT, epoch=3, block_ids=(1, 2))  # the old place holds nothing any more
    assert running.sequences["r.0"].epoch == 3 and running.sequences["r.0"].block_ids == [1, 2]
    assert ended(running) == [("r.0", 2, "stale")]


def test_a_sequence_that_is_over_but_not_logged_is_not_admitted_again() -> None:
    running = make_running()
    admit(running, PROMPT, max_tokens=1)
    run_dry(running, make_engine(running))
    admit(running, PROMPT, max_tokens=1)
    assert not running.sequences and len(ended(running)) == 1


# --- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"block_ids": (0,)},
        {"block_ids": (0, 0)},
        {"block_ids": (0, 16)},
        {"block_ids": (-1, 0)},
        {"block_ids": ()},
        {"block_ids": (0, 1), "cached_length": 3},
        {"block_ids": (0, 1), "cached_length": 8},
        {"block_ids": (0, 1), "cached_length": -4},
        {"block_ids": (0, 1), "cached_length": 4},
    ],
)
def test_an_admit_whose_blocks_cannot_be_is_refused(fields: dict[str, object]) -> None:
    running = make_running()
    admit(running, PROMPT, **fields)
    assert ended(running) == [("r.0", 1, "refused")] and running.blocks.num_held == 0 and not running.has_work


def test_a_block_of_a_running_sequence_is_refused_to_another_writer() -> None:
    running = make_running()
    admit(running, PROMPT, sid="a.0", block_ids=(0, 1))
    admit(running, PROMPT, sid="b.0", block_ids=(1, 2))
    assert ended(running) == [("b.0", 1, "refused")]
    admit(running, PROMPT, sid="c.0", block_ids=(3, 4))
    apply(running, Extend(sid="c.0", epoch=1, pool_term=0, block_ids=(0,)))
    assert ended(running)[1:] == [("c.0", 1, "refused")]
    apply(running, Extend(sid="", epoch=0, pool_term=0, block_ids=(1, 7)))
    assert running.blocks.spares == {7} and running.counts["refused_spares"] == 1
    assert list(running.sequences) == ["a.0"]


def test_even_a_sealed_block_is_refused_to_a_writer_while_it_is_held() -> None:
    running = make_running()
    admit(running, PROMPT, sid="a.0", block_ids=(0, 1))
    step(running, make_engine(running))
    assert running.sealed.key_of(0) is not None
    admit(running, PROMPT, sid="b.0", block_ids=(0, 2))
    assert ended(running) == [("b.0", 1, "refused")]


def test_a_spare_block_is_refused_to_a_sequence() -> None:
    running = make_running()
    apply(running, Extend(sid="", epoch=0, pool_term=0, block_ids=(1,)))
    admit(running, PROMPT, block_ids=(0, 1))
    admit(running, PROMPT, sid="q.0", block_ids=(2, 3))
    apply(running, Extend(sid="q.0", epoch=1, pool_term=0, block_ids=(1,)))
    assert ended(running) == [("r.0", 1, "refused"), ("q.0", 1, "refused")]


def test_a_cached_prefix_is_used_and_shared() -> None:
    running = make_running()
    engine = make_engine(running)
    admit(running, PROMPT, sid="a.0", block_ids=(0, 1, 2, 3))
    step(running, engine)
    admit(running, b"abcdXYZ", sid="b.0", block_ids=(0, 4, 5, 6), cached_length=4)
    assert running.sequences["b.0"].cached_tokens == 4
    run_dry(running, engine)  # the engine checks that the tokens are there
    assert output_of(running, "b.0") == vocab.answer(b"abcdXYZ", 8)


@pytest.mark.parametrize("prompt, salt", [(b"abcXef", bytes(32)), (PROMPT, b"x" * 32)])
def test_a_prefix_of_other_tokens_or_another_tenant_is_refused(prompt: bytes, salt: bytes) -> None:
    running = make_running()
    admit(running, PROMPT, sid="a.0", block_ids=(0, 1))
    step(running, make_engine(running))
    admit(running, prompt, sid="b.0", block_ids=(0, 4), cached_length=4, salt=salt)
    assert ended(running) == [("b.0", 1, "refused")]


def test_a_block_leaves_the_inventory_when_it_is_handed_out_to_be_written() -> None:
    running = make_running()
    admit(running, b"abcdefghijklm", sid="old.0", block_ids=(0, 1, 2, 3), max_tokens=1)
    run_dry(running, make_engine(running))
    assert [e.block_id for e in running.sealed.entries()] == [0, 1, 2]
    admit(running, PROMPT, block_ids=(0, 14))
    apply(running, Extend(sid="r.0", epoch=1, pool_term=0, block_ids=(1,)))
    apply(running, Extend(sid="", epoch=0, pool_term=0, block_ids=(2,)))
    assert not running.sealed.entries()


def test_spare_blocks_are_taken_lowest_first_and_reported() -> None:
    running = make_running()
    engine = make_engine(running)
    apply(running, Extend(sid="", epoch=0, pool_term=0, block_ids=(9, 5)))
    admit(running, PROMPT, block_ids=(0, 1), max_tokens=8)
    step(running, engine), step(running, engine)
    assert running.sequences["r.0"].block_ids == [0, 1]  # no block before it is needed
    run_dry(running, engine)
    assert [(t.index, t.block_id) for t in running.outbox.carry(()).taken] == [(2, 5), (3, 9)]
    assert not running.blocks.spares and output_of(running, "r.0") == vocab.answer(PROMPT, 8)


def test_without_a_spare_it_starves_until_it_is_extended() -> None:
    running = make_running()
    engine = make_engine(running)
    admit(running, PROMPT, block_ids=(0, 1), max_tokens=8)
    admit(running, PROMPT, sid="q.0", block_ids=(2, 3, 4, 5), max_tokens=8)
    run_dry(running, engine)
    assert running.starved == {"r.0"} and running.outbox.urgent and "q.0" not in running.sequences
    apply(running, Extend(sid="r.0", epoch=1, pool_term=0, block_ids=(6,)))
    run_dry(running, engine)
    assert running.sequences["r.0"].block_ids == [0, 1, 6]


def test_a_repeated_extend_changes_nothing() -> None:
    running = make_running()
    admit(running, PROMPT)
    for _ in range(2):
        apply(running, Extend(sid="r.0", epoch=1, pool_term=0, block_ids=(6, 7)))
        apply(running, Extend(sid="", epoch=0, pool_term=0, block_ids=(8,)))
    assert running.sequences["r.0"].block_ids == [0, 1, 6, 7] and running.blocks.spares == {8}
    assert not ended(running) and not running.counts["refused_spares"]


def test_reclaim_takes_what_is_still_spare() -> None:
    running = make_running()
    engine = make_engine(running)
    apply(running, Extend(sid="", epoch=0, pool_term=0, block_ids=(5, 6)))
    admit(running, PROMPT, block_ids=(0, 1), max_tokens=4)
    run_dry(running, engine)
    carried = running.outbox.carry(())
    assert [t.block_id for t in carried.taken] == [5]
    running.outbox.acknowledged(carried)
    apply(running, Reclaim(pool_term=0, block_ids=(5, 6)))
    assert not running.blocks.spares and running.outbox.urgent  # the scheduler waits for a report that shows it


def test_remap_uses_the_equal_block_and_gives_the_old_one_up() -> None:
    running = make_running()
    engine = make_engine(running)
    for sid, blocks in (("a.0", (0, 1, 2, 3)), ("b.0", (4, 5, 6, 7))):
        admit(running, PROMPT, sid=sid, block_ids=blocks)
    step(running, engine)
    remap = Remap(sid="b.0", epoch=1, pool_term=0, index=0, block_id=0)
    apply(running, remap)
    apply(running, remap)  # a repeat
    assert running.sequences["b.0"].block_ids == [0, 5, 6, 7] and running.blocks.is_free(4)
    admit(running, b"other!", sid="c.0", block_ids=(4, 8, 9, 10))
    run_dry(running, engine)
    assert output_of(running, "b.0") == vocab.answer(PROMPT, 8)


@pytest.mark.parametrize("index, block_id", [(0, 9), (1, 0), (-1, 0), (7, 0)])
def test_a_remap_to_what_is_not_equal_is_refused(index: int, block_id: int) -> None:
    running = make_running()
    admit(running, PROMPT, sid="a.0", block_ids=(0, 1))
    admit(running, PROMPT, sid="b.0", block_ids=(4, 5))
    step(running, make_engine(running))
    apply(running, Remap(sid="b.0", epoch=1, pool_term=0, index=index, block_id=block_id))
    assert ended(running) == [("b.0", 1, "refused")] and running.blocks.is_free(4)


# --- stopping --------------------------------------------------------------------------------------------------------


def test_preempt_keeps_what_is_drawn_for_the_log() -> None:
    running = make_running()
    admit(running, PROMPT, block_ids=(0, 1))
    step(running, make_engine(running))
    apply(running, Preempt(sid="r.0", epoch=1))
    assert ended(running) == [("r.0", 1, "preempted")] and len(running.outbox.carry(()).seals) == 1
    entry = running.ledger.build().entries[0]
    assert entry.count == 1 and entry.outcome == b""


def test_cancel_drops_it_at_once() -> None:
    running = make_running()
    admit(running, PROMPT)
    step(running, make_engine(running))
    apply(running, Cancel(sid="r.0", epoch=1))
    assert ended(running) == [("r.0", 1, "cancelled")] and not running.has_work and running.blocks.is_free(0)


def test_results_for_a_sequence_that_left_during_the_step_are_passed_over() -> None:
    running = make_running()
    engine = make_engine(running)
    admit(running, PROMPT)
    chunks = running.draft(running.prepare(64))
    running.ledger.drop("r.0", 1)
    running.dropped("r.0", 1, "stale")
    running.advance(chunks, engine.step(chunks))
    assert not running.has_work and not running.outbox.carry(()).seals


def test_a_worker_that_stops_commits_what_is_drawn_and_names_whom_it_leaves() -> None:
    running = make_running()
    admit(running, PROMPT)
    step(running, make_engine(running))
    assert running.release_all() == [("r.0", 1)]
    assert not running.sequences and running.ledger.build().entries[0].count == 1


def test_a_new_life_keeps_only_the_sealed_blocks() -> None:
    running = make_running()
    apply(running, TakeOver(term=1, inbox="s"))
    apply(running, ListInventory(pool_term=3, reply_to="cache:c"), kind="pool", term=3)
    apply(running, Extend(sid="", epoch=0, pool_term=3, block_ids=(9,)))
    apply(running, SetPolicy(max_num_batched_tokens=1, max_num_seqs=1, prefill_chunk=1))
    admit(running, PROMPT, pool_term=3)
    admit(running, PROMPT, sid="q.0", pool_term=3, block_ids=(4, 5))
    run_dry(running, make_engine(running))
    running.reset()
    assert not running.has_work and not running.outbox and not running.questions and not running.blocks.spares
    assert (running.run_term, running.pool_term, running.blocks.num_held) == (0, 0, 0)
    assert running.budget.max_num_seqs == 8
    assert {e.block_id for e in running.sealed.entries()} >= {0, 4}


def test_a_policy_cannot_exceed_what_the_worker_announced() -> None:
    running = make_running(capacity=Budget(32, 4, 16))
    apply(running, SetPolicy(max_num_batched_tokens=8, max_num_seqs=100, prefill_chunk=5))
    assert running.budget == Budget(8, 4, 5)


# --- what others are told --------------------------------------------------------------------------------------------


def test_a_running_state_shows_everything_and_supersedes_the_outbox() -> None:
    running = make_running()
    engine = make_engine(running)
    apply(running, Extend(sid="", epoch=0, pool_term=0, block_ids=(9, 8)))
    admit(running, PROMPT, sid="a.0", block_ids=(0, 1))
    for _ in range(4):
        step(running, engine)
    admit(running, b"abcdXY", sid="b.0", block_ids=(0, 4), cached_length=4)
    state = running_state(running, "w", TakeOver(term=7, inbox="s", ask=3))
    rows = {r.sid: (r.num_tokens, r.num_computed, r.block_ids, r.salt) for r in state.running}
    assert rows == {"a.0": (10, 9, (0, 1, 8), bytes(32)), "b.0": (6, 4, (0, 4), bytes(32))}
    assert (state.worker, state.term, state.ask, state.spare_block_ids) == ("w", 7, 3, (9,))
    assert [(s.sid, s.index, s.block_id) for s in state.seals] == [("a.0", 0, 0), ("a.0", 1, 1), ("b.0", 0, 0)]
    carried = running.outbox.carry(())
    assert not carried.taken and not carried.seals


def test_a_report_is_a_state() -> None:
    running = make_running()
    apply(running, Extend(sid="", epoch=0, pool_term=0, block_ids=(9,)))
    admit(running, PROMPT)
    step(running, make_engine(running))
    cost = StepCost()
    cost.observe(1, 0, 5, 2.0)
    cost.observe(0, 100, 0, 0.5)
    told = report(running, running.outbox.carry(()), worker="w", term=3, num_steps=4, cost=cost)
    assert (told.worker, told.term, told.num_steps, told.tokens_per_second) == ("w", 3, 4, 2.5)
    assert told.prefill_tokens_per_second == 200.0
    assert told.spare_block_ids == (9,) and told.running[0].num_computed == 6 and told.running[0].block_ids == ()


def test_without_prefix_caching_nothing_is_sealed() -> None:
    plain = make_running()
    running = RunningSet(plain.info, plain.budget, plain._validate, enable_prefix_caching=False)
    admit(running, PROMPT)
    run_dry(running, make_engine(running))
    assert not len(running.sealed) and not running.outbox.carry(()).seals


# --- log-probabilities of prompts ------------------------------------------------------------------------------------

ASKING = {"prompt_logprobs": 1, "temperature": 0.0}


def test_a_prompt_is_scored_once_and_then_answered() -> None:
    running = make_running()
    engine = make_engine(running)
    admit(running, b"prompt", block_ids=range(4), max_tokens=3, **ASKING)
    run_dry(running, engine)
    [account] = running.ledger._accounts.values()
    assert [s.token_id for s in account.scores] == list(b"rompt") and account.seq.num_output_tokens == 3
    assert ended(running) == [("r.0", 1, "length")]


def test_where_nothing_is_to_be_drawn_the_prompt_is_all() -> None:
    running = make_running()
    engine = make_engine(running)
    admit(running, b"prompt", block_ids=range(2), max_tokens=0, **ASKING)
    assert [(c.count, c.sample) for c in step(running, engine)] == [(5, False)]
    [account] = running.ledger._accounts.values()
    assert account.outcome is not None and (account.outcome.reason, account.outcome.num_tokens) == ("length", 0)
    assert not running.sequences and len(account.scores) == 5


def test_a_step_that_has_begun_may_have_the_last_of_a_prompt_that_nothing_is_drawn_after() -> None:
    """The one before does not end the sequence, though nothing is left to begin."""
    running = make_running(capacity=Budget(max_num_batched_tokens=4, max_num_seqs=8, prefill_chunk=4))
    engine = make_engine(running)
    admit(running, b"prompts", block_ids=range(2), max_tokens=0, **ASKING)
    begun = [running.draft(running.prepare(64)) for _ in range(3)]
    assert [[c.count for c in chunks] for chunks in begun] == [[4], [2], []]
    for chunks in begun[:2]:
        running.advance(chunks, engine.step(chunks))
    [account] = running.ledger._accounts.values()
    assert len(account.scores) == 6 and outcome_of(running) == Outcome(reason="length", num_tokens=0)


@pytest.mark.parametrize("room", [{"num_blocks": 2}, {"max_model_len": 2 * BLOCK_SIZE}])
def test_a_prompt_that_fills_context_or_pool_is_scored_where_nothing_is_drawn(room: dict[str, int]) -> None:
    running, prompt = make_running(**room), b"promptly!"
    admit(running, prompt[:8], block_ids=range(2), max_tokens=0, **ASKING)
    run_dry(running, make_engine(running))
    [account] = running.ledger._accounts.values()
    assert len(account.scores) == 7 and outcome_of(running) == Outcome(reason="length", num_tokens=0)
    for size, max_tokens in ((8, 1), (9, 0)):
        running = make_running(**room)
        admit(running, prompt[:size], block_ids=range(3), max_tokens=max_tokens, **ASKING)
        outcome = outcome_of(running)
        assert outcome and (outcome.reason, outcome.code) == ("error", "invalid_request")
        assert f"{size} tokens" in outcome.message and ("and one more" in outcome.message) == (max_tokens > 0)


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    running = make_running()
    admit(running, b"p", block_ids=range(1), max_tokens=0, **ASKING)
    assert ended(running) == [("r.0", 1, "length")] and not running.prepare(64).chunks


def test_an_error_before_all_of_a_prompt_is_known_names_no_length() -> None:
    """A gateway would wait for a log that ends there, and never does."""
    running = make_running()
    admit(running, b"prompt", block_ids=range(2), **ASKING)
    running.fail(running.sequences["r.0"])
    [account] = running.ledger._accounts.values()
    assert account.outcome is not None and (account.outcome.reason, account.outcome.num_tokens) == ("error", -1)


def test_a_cached_prefix_is_refused_while_its_log_probabilities_are_missing() -> None:
    running = make_running()
    engine = make_engine(running)
    admit(running, b"a prompt of blocks", block_ids=range(6), max_tokens=1)
    run_dry(running, engine)
    again: dict[str, object] = {"block_ids": [0, 1, *range(8, 12)], "cached_length": 8, "max_tokens": 1}
    admit(running, b"a prompt of blocks", sid="s.0", **again, **ASKING)
    assert ended(running)[-1] == ("s.0", 1, "refused")
    admit(running, b"a prompt of blocks", sid="t.0", **again)
    assert "t.0" in running.sequences
