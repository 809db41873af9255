from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.gpu_worker.composer import Budget
from shared import scripted_vocab as vocab
from shared.leases import BUSY_LEASE_MS, IDLE_LEASE_MS, StreamLost
from shared.protocol import Outcome, TokenChunk
from shared.store_calls import Inventory
from shared.wire import decode_as
from shared.worker_protocol import Extend, ListInventory, Preempt, Report, RunningState, TakeOver
from tests.gpu_worker.builders import CAPACITY
from tests.gpu_worker.worker_bench import MODEL, SCHEDULER, STORE, WorkerBench, losing_reply, worker_bench
from tests.helpers import counting

PROMPT = list(b"abcdef")
CANCELLED = Outcome(reason="cancelled")


@pytest.fixture
async def bench(redis_url: str) -> AsyncIterator[WorkerBench]:
    async with worker_bench(redis_url) as bench:
        yield bench


def reports(messages: list[Any]) -> list[Report]:
    return [m for m in messages if isinstance(m, Report)]


def ends(messages: list[Any]) -> list[tuple[str, int, str]]:
    return [(e.sid, e.epoch, e.reason) for r in reports(messages) for e in r.ended]


# --- the ordinary way ------------------------------------------------------------------------------------------------


async def test_a_worker_announces_what_it_is(bench: WorkerBench) -> None:
    member, alive = (await bench.records.members())["w-first"]
    assert alive and (member.kind, member.name, member.variant) == ("worker", "test", "scripted")
    assert (member.num_blocks, member.block_size, member.max_model_len) == (32, 4, 64)
    assert (member.max_num_seqs, member.max_num_batched_tokens) == (CAPACITY.max_num_seqs, 32)
    assert member.vocab_size == vocab.VOCAB_SIZE


async def test_a_sequence_is_read_computed_committed_and_reported(bench: WorkerBench) -> None:
    sid = await bench.place(PROMPT, max_tokens=6)
    await bench.run_dry()
    answer = vocab.answer(PROMPT, 6)
    assert await bench.log(sid) == answer
    record = await bench.record(sid)
    assert record.state == "done" and decode_as(Outcome, record.outcome) == Outcome(reason="length", num_tokens=6)
    told = await bench.out()
    assert [i for field, m in told if field == sid for i in m.ids] == answer and told[-1][0] == f"!{sid}"
    messages = await bench.inbox()
    assert ends(messages) == [(sid, 1, "length")]
    seals = [(s.index, s.block_id) for r in reports(messages) for s in r.seals]
    assert seals == [(0, 0), (1, 1)]  # and before or with the end
    assert not bench.worker.pending and not bench.worker.running.has_work


async def test_a_moved_sequence_goes_on_where_the_log_ends(bench: WorkerBench) -> None:
    sid = await bench.place(PROMPT, max_tokens=8)
    await bench.worker.read_plan(0)
    for _ in range(3):
        bench.worker.step()
    await bench.worker.flush()
    await bench.scripts.requeue(sid, 1)
    await bench.assign(sid, 2 - 1, block_ids=(8, 9, 10, 11))
    await bench.run_dry()
    assert await bench.log(sid) == vocab.answer(PROMPT, 8) and (await bench.record(sid)).epoch == 2


async def test_logprobs_and_cached_tokens_are_in_the_log(bench: WorkerBench) -> None:
    await bench.place([*PROMPT, 1, 2, 3], max_tokens=1)
    await bench.run_dry()
    sid = await bench.place([*PROMPT, 1, 2, 4], rid="q", block_ids=(0, 1, 6), cached_length=8, logprobs=1, max_tokens=1)
    await bench.run_dry()
    (chunk,) = await bench.records.log(sid)
    assert chunk.cached_tokens == 8 and chunk.logprobs is not None and chunk.logprobs[0][1][0][0] == chunk.ids[0]


async def test_a_plan_entry_that_is_not_ours_is_left_out(bench: WorkerBench) -> None:
    key = bench.key("plan", "w-first")
    await bench.redis.xadd(key, {"k": "run", "t": 1, "m": b"\xc1"})
    await bench.redis.xadd(key, {"m": b"x"})
    sid = await bench.place(PROMPT, max_tokens=1)
    await bench.run_dry()
    assert (await bench.record(sid)).state == "done"


async def test_records_of_what_is_assigned_at_once_are_read_at_once(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    most: dict[str, int] = {}
    for name in ("request", "sequence"):
        monkeypatch.setattr(bench.worker.records, name, counting(most, name, getattr(bench.worker.records, name)))
    sids = [await bench.place(PROMPT, rid=f"r{n}", block_ids=range(4 * n, 4 * n + 4), max_tokens=1) for n in range(3)]
    assert await bench.worker.read_plan(0) == 3
    bench.worker.step()
    assert most == {"request": 3, "sequence": 3} and [place[0] for place in bench.worker.running.places()] == sids


# --- lost replies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("draws_more", [True, False])
async def test_a_commit_whose_reply_is_lost_is_repeated_without_harm(
    bench: WorkerBench, applied: bool, draws_more: bool
) -> None:
    sid = await bench.place(PROMPT, max_tokens=6)
    await bench.worker.read_plan(0)
    commit = bench.worker.scripts.commit
    while bench.worker.step():
        bench.worker.scripts.commit = losing_reply(commit, applied=applied)  # type: ignore[method-assign]
        with pytest.raises(ConnectionError):
            await bench.worker.flush()
        if draws_more:
            bench.worker.step()
        await bench.worker.flush()
    await bench.worker.flush()
    assert await bench.log(sid) == vocab.answer(PROMPT, 6) and (await bench.record(sid)).state == "done"
    assert set(ends(await bench.inbox())) == {(sid, 1, "length")} and not bench.worker.running.has_work


async def test_a_log_that_ends_elsewhere_is_continued_from_there(bench: WorkerBench) -> None:
    sid = await bench.place(PROMPT, max_tokens=8)
    await bench.worker.read_plan(0)
    for _ in range(3):
        bench.worker.step()
    await bench.worker.flush()
    bench.worker.step()
    await bench.redis.delete(bench.key("s", sid, "log"))  # Redis came back without its last second
    await bench.redis.hset(bench.key("s", sid), "num_tokens", 0)
    await bench.run_dry()
    await bench.run_dry()
    assert await bench.log(sid) == vocab.answer(PROMPT, 8)


@pytest.mark.parametrize("applied", [True, False])
async def test_a_plan_read_half_way_is_taken_up_again(
    bench: WorkerBench, applied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sids = [await bench.place(PROMPT, rid=rid, block_ids=b, max_tokens=2) for rid, b in (("a", (0, 1)), ("b", (2, 3)))]
    read = bench.worker.records.request
    calls = 0

    async def fail_second(rid: str) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            await read(rid) if applied else None
            raise ConnectionError("the reply is lost")
        return await read(rid)

    monkeypatch.setattr(bench.worker.records, "request", fail_second)
    with pytest.raises(ConnectionError):
        await bench.worker.read_plan(0)
    assert await bench.worker.read_plan(0) == 2  # the first has waited with it
    await bench.run_dry()
    assert [(await bench.record(sid)).state for sid in sids] == ["done", "done"]


@pytest.mark.parametrize("applied", [True, False])
async def test_an_answer_is_repeated_and_no_report_overtakes_it(
    bench: WorkerBench, applied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.place(PROMPT, max_tokens=8)
    await bench.worker.read_plan(0)
    bench.worker.step()
    bench.term += 1
    await bench.plan(TakeOver(term=bench.term, inbox=SCHEDULER))
    await bench.worker.read_plan(0)
    bench.worker.step()
    send = bench.worker.scripts.send
    monkeypatch.setattr(bench.worker.scripts, "send", losing_reply(send, applied=applied))
    with pytest.raises(ConnectionError):
        await bench.worker.flush()
    bench.clock.now += 1.0
    await bench.worker.flush()
    bench.clock.now += 1.0
    await bench.worker.flush()
    new = [m for m in await bench.inbox() if m.term == bench.term]
    assert isinstance(new[0], RunningState) and isinstance(new[-1], Report)
    assert [type(m) for m in new].count(RunningState) == (2 if applied else 1)


@pytest.mark.parametrize("applied", [True, False])
async def test_an_answer_that_is_repeated_says_what_was_reported_meanwhile(
    bench: WorkerBench, applied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a report goes before it, to a scheduler that does not listen before it knows the running state."""
    sid = await bench.place(PROMPT, max_tokens=16, block_ids=[0, 1])
    grant = Extend(sid="", epoch=0, pool_term=0, block_ids=(8, 9, 10, 11))
    await bench.plan(grant, TakeOver(term=bench.term, inbox=SCHEDULER, ask=2))
    await bench.worker.read_plan(0)
    bench.worker.step()
    send = bench.worker.scripts.send
    monkeypatch.setattr(bench.worker.scripts, "send", losing_reply(send, applied=applied))
    with pytest.raises(ConnectionError):
        await bench.worker.flush()
    seq = bench.worker.running.sequences[sid]
    num_blocks = len(seq.block_ids)
    while len(seq.block_ids) < num_blocks + 2:
        bench.worker.step()
    await bench.inbox()  # up to here the scheduler may have heard nothing of use
    bench.clock.now += 1.0
    await bench.worker.flush()
    told = await bench.inbox()
    answered = [i for i, m in enumerate(told) if isinstance(m, RunningState)][-1]
    [row] = told[answered].running
    after = [t.block_id for m in told[answered:] if isinstance(m, Report) for t in m.taken]
    assert [*row.block_ids, *after] == seq.block_ids


async def test_a_join_whose_reply_is_lost_loses_no_plan(redis_url: str) -> None:
    async with worker_bench(redis_url) as bench:
        await bench.redis.delete(bench.key("lease", "worker", "w-first"))
        await bench.worker.flush()
        await bench.place(PROMPT)
        await bench.worker.read_plan(0)
        bench.worker.step()
        await bench.worker.flush()  # lapsed: a new life begins
        worker = bench.worker
        assert worker.incarnation != "w-first"
        join = worker.life.membership.join
        worker.life.membership.join = losing_reply(join, applied=True)  # type: ignore[method-assign]
        with pytest.raises(ConnectionError):
            await worker.start()
        bench.term, _ = await bench.scripts.take_lease("run", worker.incarnation, SCHEDULER, 60_000)
        await bench.plan(TakeOver(term=bench.term, inbox=SCHEDULER))
        await worker.start()
        assert await worker.read_plan(0) == 1


# --- refusals --------------------------------------------------------------------------------------------------------


async def test_a_stale_place_is_dropped_and_its_tokens_reach_nobody(bench: WorkerBench) -> None:
    sid = await bench.place(PROMPT, max_tokens=8)
    await bench.worker.read_plan(0)
    bench.worker.step()
    await bench.scripts.requeue(sid, 1)
    await bench.worker.flush()
    assert not bench.worker.running.has_work and await bench.log(sid) == []
    await bench.worker.flush()
    assert ends(await bench.inbox()) == [(sid, 1, "stale")] and bench.worker.running.blocks.num_held == 0


async def test_a_cancel_reaches_a_sequence_in_prefill(redis_url: str) -> None:
    async with worker_bench(redis_url, capacity=Budget(32, 8, prefill_chunk=4)) as bench:
        sid = await bench.place(list(range(40)), block_ids=range(11))
        await bench.worker.read_plan(0)
        bench.worker.step()
        await bench.worker.flush()
        assert await bench.scripts.cancel_if([sid], 1, CANCELLED) == 1
        bench.worker.step()
        await bench.worker.flush()
        assert not bench.worker.running.has_work and bench.worker.running.blocks.num_held == 0
        await bench.worker.flush()
        assert ends(await bench.inbox()) == [(sid, 1, "done")]


async def test_an_admit_whose_record_is_over_is_stale(bench: WorkerBench) -> None:
    done = await bench.place(PROMPT)
    await bench.scripts.finish(done, CANCELLED)
    requeued = await bench.place(PROMPT, rid="q", block_ids=(4, 5))
    await bench.scripts.requeue(requeued, 1)
    gone = await bench.place(PROMPT, rid="p", block_ids=(6, 7))
    await bench.redis.delete(bench.key("r", "p"))
    await bench.run_dry()
    assert ends(await bench.inbox()) == [(sid, 1, "stale") for sid in (done, requeued, gone)]


async def test_records_that_cannot_be_read_end_this_request_alone(bench: WorkerBench) -> None:
    bad = await bench.place(PROMPT)
    good = await bench.place(PROMPT, rid="q", block_ids=(4, 5, 6, 7), max_tokens=2)
    await bench.redis.hset(bench.key("r", "r"), "spec", b"\xc1")
    await bench.run_dry()
    outcome = decode_as(Outcome, (await bench.record(bad)).outcome)
    assert (outcome.reason, outcome.code) == ("error", "internal_error")
    assert ends(await bench.inbox()) == [(bad, 1, "error"), (good, 1, "length")]


async def test_an_invalid_request_ends_as_one_error(bench: WorkerBench) -> None:
    bad = await bench.place([1, 2, 9999])
    good = await bench.place(PROMPT, rid="q", block_ids=(4, 5, 6, 7), max_tokens=6)
    await bench.run_dry()
    outcome = decode_as(Outcome, (await bench.record(bad)).outcome)
    assert (outcome.reason, outcome.code, outcome.num_tokens) == ("error", "invalid_request", 0)
    assert await bench.log(good) == vocab.answer(PROMPT, 6)


async def test_a_failing_request_ends_as_one_error_and_its_mate_goes_on(bench: WorkerBench) -> None:
    bad = await bench.place([vocab.RAISE, 2, 7], max_tokens=6)
    good = await bench.place(PROMPT, rid="q", block_ids=(4, 5, 6, 7), max_tokens=6)
    await bench.run_dry()
    outcome = decode_as(Outcome, (await bench.record(bad)).outcome)
    assert (outcome.code, outcome.num_tokens, len(await bench.log(bad))) == ("engine_error", 2, 2)
    assert await bench.log(good) == vocab.answer(PROMPT, 6)


async def test_plan_entries_of_a_lower_term_are_ignored(bench: WorkerBench) -> None:
    sid = await bench.place(PROMPT, max_tokens=8)
    await bench.worker.read_plan(0)
    bench.worker.step()
    await bench.plan(TakeOver(term=bench.term + 1, inbox=SCHEDULER), term=bench.term + 1)
    await bench.plan(Preempt(sid=sid, epoch=1), term=bench.term)
    await bench.worker.read_plan(0)
    bench.worker.step()
    assert sid in bench.worker.running.sequences


async def test_a_block_of_a_running_sequence_is_refused_with_a_report(bench: WorkerBench) -> None:
    first = await bench.place(PROMPT, max_tokens=8)
    second = await bench.place(PROMPT, rid="q", block_ids=(3, 4), max_tokens=8)
    await bench.worker.read_plan(0)
    bench.worker.step()
    await bench.worker.flush()
    assert ends(await bench.inbox()) == [(second, 1, "refused")] and first in bench.worker.running.sequences


# --- questions -------------------------------------------------------------------------------------------------------


async def test_a_take_over_is_answered_with_the_running_set_and_the_term(bench: WorkerBench) -> None:
    sid = await bench.place(PROMPT, block_ids=(0, 1), max_tokens=8)
    await bench.plan(Extend(sid="", epoch=0, pool_term=0, block_ids=(9, 8)))
    await bench.worker.read_plan(0)
    for _ in range(4):
        bench.worker.step()
    await bench.plan(TakeOver(term=bench.term + 1, inbox=SCHEDULER), term=bench.term + 1)
    await bench.worker.read_plan(0)
    bench.worker.step()
    await bench.worker.flush()
    (state,) = [m for m in await bench.inbox() if isinstance(m, RunningState)]
    assert (state.worker, state.term, state.spare_block_ids) == ("w-first", bench.term + 1, (9,))
    (row,) = state.running
    assert (row.sid, row.epoch, row.num_tokens, row.num_computed, row.block_ids) == (sid, 1, 11, 10, (0, 1, 8))
    assert [(s.index, s.block_id) for s in state.seals] == [(0, 0), (1, 1)]
    assert bench.worker.life.run_term == bench.term + 1


async def test_what_is_drawn_is_committed_before_a_take_over_is_answered(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a finished sequence would look lost to the new scheduler, and be queued again."""
    sid = await bench.place(PROMPT, max_tokens=2)
    await bench.worker.read_plan(0)
    bench.worker.step()
    bench.worker.step()
    await bench.plan(TakeOver(term=bench.term + 1, inbox=SCHEDULER), term=bench.term + 1)
    await bench.worker.read_plan(0)
    bench.worker.step()
    send, states = bench.worker.scripts.send, []

    async def look_and_send(*args: Any, **kwargs: Any) -> Any:
        states.append((await bench.record(sid)).state)
        return await send(*args, **kwargs)

    monkeypatch.setattr(bench.worker.scripts, "send", look_and_send)
    await bench.worker.flush()
    (state,) = [m for m in await bench.inbox() if isinstance(m, RunningState)]
    assert not state.running and states == ["done"]


async def test_a_store_gets_all_sealed_blocks(bench: WorkerBench) -> None:
    await bench.place(list(range(20)), block_ids=range(6), max_tokens=1)
    await bench.run_dry()
    await bench.plan(ListInventory(pool_term=4, reply_to=f"cache:{STORE}"), kind="pool", term=4)
    await bench.run_dry()
    pages = [m for m in await bench.store_inbox() if isinstance(m, Inventory)]
    assert [(p.worker, p.pool_term, p.last) for p in pages] == [("w-first", 4, True)]
    assert [b.block_id for b in pages[0].blocks] == [0, 1, 2, 3, 4]


async def test_an_answer_to_nobody_is_forgotten(bench: WorkerBench) -> None:
    await bench.plan(ListInventory(pool_term=4, reply_to="cache:c-dead"), kind="pool", term=4)
    await bench.plan(TakeOver(term=9, inbox="s-dead"), term=9)
    await bench.run_dry()
    assert not await bench.redis.exists(bench.key("cache", "c-dead"), bench.key("inbox", "s-dead"))
    assert not bench.worker.urgent


# --- reports ---------------------------------------------------------------------------------------------------------


async def test_a_report_goes_along_when_it_changes_a_decision_or_is_old(bench: WorkerBench) -> None:
    await bench.place([1, 2], max_tokens=30)
    await bench.worker.read_plan(0)
    bench.worker.step()
    await bench.worker.flush()
    assert len(await bench.inbox()) == 1  # the last one is old
    bench.worker.step()
    await bench.worker.flush()
    assert not await bench.inbox()  # a token more is no news
    bench.worker.step()
    await bench.worker.flush()
    (told,) = reports(await bench.inbox())
    assert [s.index for s in told.seals] == [0]
    await bench.worker.flush()
    assert not await bench.inbox()
    bench.clock.now += 0.1
    await bench.worker.flush()
    (told,) = reports(await bench.inbox())
    assert told.num_steps == 3 and not told.seals


async def test_what_nobody_waits_for_is_reported_a_little_later(bench: WorkerBench) -> None:
    """Blocks that answers take and fill: several of them in one report, since each costs the store a call."""
    await bench.place([1, 2, 3, 4], block_ids=(0,), max_tokens=30)
    await bench.plan(Extend(sid="", epoch=0, pool_term=0, block_ids=(4, 5, 6, 7)))
    await bench.worker.read_plan(0)
    told = []
    for _ in range(9):
        bench.worker.step()
        bench.clock.now += 0.1
        await bench.worker.flush()
        told += reports(await bench.inbox())
    assert len(told) == 9
    said = {i: ([t.index for t in r.taken], [s.index for s in r.seals]) for i, r in enumerate(told)}
    assert {i: s for i, s in said.items() if any(s)} == {0: ([], [0]), 4: ([1], [1]), 8: ([2], [2])}


async def test_an_end_is_not_told_before_the_last_token_is_in_the_log(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gpu_worker.commits.MAX_CHUNK_TOKENS", 4)
    sid = await bench.place(PROMPT, max_tokens=6)
    await bench.worker.read_plan(0)
    while bench.worker.step():
        pass
    await bench.worker.flush()
    assert (await bench.record(sid)).state == "placed" and not ends(await bench.inbox())
    assert bench.worker.urgent
    await bench.worker.flush()
    assert (await bench.record(sid)).state == "done" and ends(await bench.inbox()) == [(sid, 1, "length")]


async def test_a_starved_sequence_is_reported_and_helped(bench: WorkerBench) -> None:
    sid = await bench.place(PROMPT, block_ids=(0, 1), max_tokens=6)
    await bench.run_dry()
    assert reports(await bench.inbox())[-1].running[0].starved
    await bench.plan(Extend(sid="", epoch=0, pool_term=0, block_ids=(7,)))
    await bench.run_dry()
    messages = reports(await bench.inbox())
    assert [(t.sid, t.index, t.block_id) for r in messages for t in r.taken] == [(sid, 2, 7)]
    assert (await bench.record(sid)).state == "done"


async def test_a_worker_without_a_scheduler_reports_to_nobody_and_goes_on(bench: WorkerBench) -> None:
    sid = await bench.place(PROMPT, max_tokens=6)
    await bench.redis.delete(bench.key("inbox", SCHEDULER))
    await bench.run_dry()
    assert await bench.log(sid) == vocab.answer(PROMPT, 6)
    assert not await bench.redis.exists(bench.key("inbox", SCHEDULER))


# --- lives -----------------------------------------------------------------------------------------------------------


async def test_the_lease_is_short_with_work_and_long_without(bench: WorkerBench) -> None:
    await bench.worker.heartbeat()
    assert BUSY_LEASE_MS < await bench.lease_ms() <= IDLE_LEASE_MS and not bench.worker.lease_is_short
    await bench.place(PROMPT, max_tokens=1)
    await bench.worker.read_plan(0)
    bench.worker.step()
    await bench.worker.flush()
    assert await bench.lease_ms() <= BUSY_LEASE_MS and bench.worker.lease_is_short
    assert bench.worker.lease_became_short.is_set()
    await bench.worker.heartbeat()
    assert await bench.lease_ms() > BUSY_LEASE_MS and not bench.worker.lease_is_short


async def test_a_commit_under_way_keeps_the_lease_short_to_the_heartbeat(bench: WorkerBench) -> None:
    """A refresh of an idle worker may be overtaken by a commit that shortens the lease."""
    await bench.place(PROMPT, max_tokens=1)
    await bench.worker.read_plan(0)
    bench.worker.step()
    commit = bench.worker.scripts.commit

    async def overtaken(*args: Any) -> Any:
        bench.worker.running.ledger.clear()  # nothing left to do, as if it had just been cancelled
        await bench.worker.heartbeat()
        return await commit(*args)

    bench.worker.scripts.commit = overtaken  # type: ignore[method-assign]
    await bench.worker.flush()
    assert bench.worker.lease_is_short


@pytest.mark.parametrize("learns_by", ["commit", "heartbeat", "stream"])
async def test_a_lapsed_life_is_followed_by_another_that_keeps_only_sealed_blocks(
    bench: WorkerBench, learns_by: str
) -> None:
    sid = await bench.place(PROMPT, max_tokens=8)
    await bench.worker.read_plan(0)
    for _ in range(3):
        bench.worker.step()
    await bench.redis.delete(
        bench.key("plan", "w-first") if learns_by == "stream" else bench.key("lease", "worker", "w-first")
    )
    await (bench.worker.flush() if learns_by == "commit" else bench.worker.heartbeat())
    await bench.worker.start()
    worker = bench.worker
    assert worker.incarnation != "w-first" and not worker.running.has_work and worker.running.run_term == 0
    members = await bench.records.members()
    assert members[worker.incarnation][1] and not members.get("w-first", (None, False))[1]
    record = await bench.record(sid)
    assert (record.state, record.strikes) == ("queued", 0)
    assert [e.block_id for e in worker.running.sealed.entries()] == [0, 1]
    await bench.take_over()
    await bench.assign(sid, 1, block_ids=(0, 5, 6, 7), cached_length=4)
    await bench.run_dry()
    assert await bench.log(sid) == vocab.answer(PROMPT, 8)


async def test_the_winding_up_of_a_life_is_repeated_until_it_is_done(bench: WorkerBench) -> None:
    sid = await bench.place(PROMPT)
    await bench.worker.read_plan(0)
    bench.worker.step()
    await bench.redis.delete(bench.key("lease", "worker", "w-first"))
    await bench.worker.flush()
    beat = bench.worker._beat
    beat.requeue = losing_reply(beat.requeue, applied=True)  # type: ignore[method-assign]
    beat.gone = losing_reply(beat.gone, applied=False)  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(ConnectionError):
            await bench.worker.read_plan(0)
    await bench.worker.read_plan(0)
    assert (await bench.record(sid)).state == "queued" and bench.worker.life.joined


async def test_what_an_old_life_was_reading_is_not_for_the_new_one(bench: WorkerBench) -> None:
    await bench.place(PROMPT)
    read = bench.worker.life.reader.read

    async def read_and_lapse(block_ms: int) -> Any:
        entries = await read(block_ms)
        bench.worker._end(bench.worker.life, "test")
        return entries

    bench.worker.life.reader.read = read_and_lapse  # type: ignore[method-assign]
    assert await bench.worker.read_plan(0) == 0
    bench.worker.step()
    assert not bench.worker.running.has_work


async def test_a_life_that_ends_while_records_are_read_takes_its_plan_with_it(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.place(PROMPT)
    read = bench.worker.records.request

    async def read_and_lapse(rid: str) -> Any:
        bench.worker._end(bench.worker.life, "test")
        return await read(rid)

    monkeypatch.setattr(bench.worker.records, "request", read_and_lapse)
    assert await bench.worker.read_plan(0) == 0
    bench.worker.step()
    assert not bench.worker.running.outbox and not bench.worker.running.has_work


async def test_answers_to_an_old_life_change_nothing_in_the_new_one(bench: WorkerBench) -> None:
    await bench.place(PROMPT)
    await bench.worker.read_plan(0)
    bench.worker.step()
    commit = bench.worker.scripts.commit

    async def commit_and_lapse(*args: Any) -> Any:
        answers = await commit(*args)
        bench.worker.running.outbox.touch()
        bench.worker._end(bench.worker.life, "test")
        return answers

    bench.worker.scripts.commit = commit_and_lapse  # type: ignore[method-assign]
    life = bench.worker.life
    await bench.worker.flush()
    assert bench.worker.life is not life and not bench.worker.life.inbox and not bench.worker.running.outbox


async def test_the_plan_is_trimmed_up_to_what_was_read(bench: WorkerBench) -> None:
    for _ in range(5):
        await bench.plan(Preempt(sid="x.0", epoch=1))
    await bench.worker.read_plan(0)
    await bench.worker.heartbeat()
    assert await bench.redis.xlen(bench.key("plan", "w-first")) == 1
    with pytest.raises(StreamLost):
        await bench.redis.delete(bench.key("plan", "w-first"))
        await bench.worker.life.membership.refresh(bench.worker.life.reader.last)


async def test_leaving_commits_and_hands_back_without_a_strike(bench: WorkerBench) -> None:
    sid = await bench.place(PROMPT, max_tokens=8)
    done = await bench.place(PROMPT, rid="q", block_ids=(4, 5), max_tokens=2)
    await bench.worker.read_plan(0)
    bench.worker.step()
    bench.worker.step()
    await bench.worker.leave()
    record = await bench.record(sid)
    assert (record.state, record.strikes, record.num_tokens) == ("queued", 0, 2)
    assert (await bench.record(done)).state == "done"
    assert not (await bench.records.members())["w-first"][1]
    assert await bench.redis.scard(bench.key("on", "w-first")) == 0


async def test_metrics_are_published(bench: WorkerBench) -> None:
    await bench.place(PROMPT, max_tokens=6)
    await bench.run_dry()
    await bench.worker.heartbeat()
    assert await bench.redis.exists(f"{bench.scripts.prefix}metrics:worker:w-first")
    value = bench.worker.metrics.registry.get_sample_value
    assert value("headrace_generation_tokens_total") == 6 and value("headrace_prefill_tokens_total") == 6
    assert value("headrace_worker_events_total", {"event": "ended_length"}) == 1
    assert value("headrace_worker_kv_blocks", {"state": "sealed"}) == 2
    assert value("headrace_steps_total") == value("headrace_step_seconds_count") == 6
    assert value("headrace_commit_seconds_count") == 6


async def test_keys_of_the_model_are_all_it_writes(bench: WorkerBench) -> None:
    await bench.place(PROMPT, max_tokens=2)
    await bench.run_dry()
    await bench.worker.heartbeat()
    assert all(key.startswith(f"hr1:{{{MODEL}}}:".encode()) for key in await bench.redis.keys("*"))


async def test_chunks_of_one_flush_reach_the_gateway_in_one_entry(bench: WorkerBench) -> None:
    for rid, blocks in (("a", (0, 1)), ("b", (2, 3)), ("c", (4, 5))):
        await bench.place(PROMPT, rid=rid, block_ids=blocks, max_tokens=2)
    await bench.worker.read_plan(0)
    bench.worker.step()
    before = await bench.redis.xlen(bench.key("out", "g-test"))
    await bench.worker.flush(urgent_only=True)
    assert await bench.redis.xlen(bench.key("out", "g-test")) == before + 1
    assert all(isinstance(m, TokenChunk) and len(m.ids) == 1 for _, m in await bench.out())
