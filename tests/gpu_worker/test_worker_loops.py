"""The worker as it lives in a process: its loops, its engine thread, its end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.gpu_worker import pacing
from services.gpu_worker.composer import Budget
from services.gpu_worker.failures import EngineDied, EngineHung, OutOfMemory, WorkerFailure
from services.gpu_worker.loops import WorkerLoops
from services.gpu_worker.scripted_engine import ScriptedEngine, validate
from services.gpu_worker.service import WorkerService
from shared import scripted_vocab as vocab
from shared.bus import connect
from shared.leases import BUSY_LEASE_MS
from shared.runtime import Stop
from shared.worker_protocol import RunningState, TakeOver
from tests.figures import note
from tests.gpu_worker.builders import BLOCK_SIZE
from tests.gpu_worker.worker_bench import MODEL, SCHEDULER, Clock, WorkerBench
from tests.helpers import wait_until

PROMPT = list(b"abcdef")
exits: list[int] = []  # what a stop would have ended this process with


class Running:
    def __init__(self, bench: WorkerBench, stop: Stop, task: asyncio.Task[None]) -> None:
        self.bench = bench
        self.stop = stop
        self.task = task

    async def take_over(self) -> None:
        bench = self.bench
        bench.term, _ = await bench.scripts.take_lease("run", bench.worker.incarnation, SCHEDULER, 60_000)
        await bench.plan(TakeOver(term=bench.term, inbox=SCHEDULER))

        async def answered() -> bool:
            return any(isinstance(m, RunningState) and m.term == bench.term for m in await bench.inbox())

        await wait_until(answered)

    async def state(self, sid: str) -> str:
        return (await self.bench.record(sid)).state


@contextlib.asynccontextmanager
async def worker_running(url: str, drain_timeout_s: float = 0.0, **engine_options: Any) -> AsyncIterator[Running]:
    clients = [connect(url) for _ in range(4)]
    engine = ScriptedEngine(num_blocks=64, block_size=BLOCK_SIZE, max_model_len=64, **engine_options)
    worker = WorkerService(
        clients[0], MODEL, engine, capacity=Budget(32, 8, 32), validate=validate, blocking=clients[1],
        heartbeat=clients[2],
    )  # fmt: skip
    bench = WorkerBench(clients[3], worker, Clock())
    await bench.join_others()
    stop = Stop(exit=exits.append)
    task = asyncio.create_task(WorkerLoops(worker, flush_interval_s=0.01).run(stop, drain_timeout_s))
    running = Running(bench, stop, task)
    try:
        await wait_until(lambda: worker.life.joined)
        await running.take_over()
        yield running
    finally:
        if not stop.is_set():
            stop.set()
        with contextlib.suppress(WorkerFailure):
            await task
        for client in clients:
            await client.aclose()


async def test_requests_are_served_and_the_worker_leaves_in_order(redis_url: str) -> None:
    async with worker_running(redis_url, step_s=0.001) as running:
        bench = running.bench
        sids = [
            await bench.place([n, *PROMPT], rid=f"r{n}", block_ids=range(8 * n, 8 * n + 8), max_tokens=20)
            for n in range(4)
        ]
        for n, sid in enumerate(sids):
            await wait_until(lambda sid=sid: _is(running, sid, "done"))  # type: ignore[misc]
            assert await bench.log(sid) == vocab.answer([n, *PROMPT], 20)
        running.stop.set()
        await running.task
        assert not (await bench.records.members())[bench.worker.incarnation][1]


async def _is(running: Running, sid: str, state: str) -> bool:
    return await running.state(sid) == state


async def test_a_first_token_does_not_wait_for_the_interval(redis_url: str) -> None:
    """The engine stands still after each token until the last one is in the log."""
    turns = threading.Semaphore(0)
    async with worker_running(redis_url, step_s=1.0, sleep=lambda _: turns.acquire(timeout=10)) as running:
        bench = running.bench
        sid = await bench.place(PROMPT, max_tokens=3)
        for count in (1, 2, 3):
            turns.release()
            await wait_until(lambda count=count: _has(bench, sid, count))  # type: ignore[misc]
        assert await running.state(sid) == "done"


async def test_tokens_do_not_wait_for_the_next_report(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a first nor a last token, which go at once: the engine stands still after the second one."""
    monkeypatch.setattr(pacing, "REPORT_S", 60.0)
    turns = threading.Semaphore(0)
    async with worker_running(redis_url, step_s=1.0, sleep=lambda _: turns.acquire(timeout=10)) as running:
        bench = running.bench
        sid = await bench.place(PROMPT, max_tokens=3)
        for count in (1, 2):
            turns.release()
            await wait_until(lambda count=count: _has(bench, sid, count))  # type: ignore[misc]
        turns.release()


async def test_the_lease_is_short_from_the_first_step_on(redis_url: str) -> None:
    """Before there is anything to commit: that step may be a long one, and the worker's last."""
    turns = threading.Semaphore(0)
    async with worker_running(redis_url, step_s=1.0, sleep=lambda _: turns.acquire(timeout=10)) as running:
        bench = running.bench
        assert await bench.lease_ms() > BUSY_LEASE_MS
        sid = await bench.place(PROMPT, max_tokens=1)

        async def short() -> bool:
            return await bench.lease_ms() <= BUSY_LEASE_MS

        await wait_until(short, timeout=3.0)  # by itself after five
        assert (await bench.record(sid)).num_tokens == 0
        turns.release()
        await wait_until(lambda: _is(running, sid, "done"))


async def _has(bench: WorkerBench, sid: str, count: int) -> bool:
    return (await bench.record(sid)).num_tokens == count


async def test_a_sigterm_hands_running_sequences_back(redis_url: str) -> None:
    async with worker_running(redis_url, step_s=0.005) as running:
        bench = running.bench
        sid = await bench.place(PROMPT, block_ids=range(16), max_tokens=50)
        await wait_until(lambda: _has_some(bench, sid))
        running.stop.set()
        await running.task
        record = await bench.record(sid)
        assert (record.state, record.strikes) == ("queued", 0)
        assert await bench.log(sid) == vocab.answer(PROMPT, record.num_tokens)


async def test_a_worker_that_drains_finishes_what_it_can_and_says_that_it_wants_no_more(redis_url: str) -> None:
    async with worker_running(redis_url, drain_timeout_s=30, step_s=0.01) as running:
        bench = running.bench
        short = await bench.place(PROMPT, rid="q", block_ids=range(16, 32), max_tokens=20)
        await wait_until(lambda: _has_some(bench, short))
        running.stop.set()
        await wait_until(lambda: _is_draining(bench))
        await running.task
        assert await running.state(short) == "done" and await bench.log(short) == vocab.answer(PROMPT, 20)


@pytest.mark.parametrize("ended_by", ["time", "a second signal"])
async def test_what_does_not_finish_in_the_drain_time_is_handed_over(redis_url: str, ended_by: str) -> None:
    timeout_s = 0.2 if ended_by == "time" else 60
    async with worker_running(redis_url, drain_timeout_s=timeout_s, step_s=0.02) as running:
        bench = running.bench
        sid = await bench.place(PROMPT, block_ids=range(16), max_tokens=50)
        await wait_until(lambda: _has_some(bench, sid))
        running.stop.set()
        await wait_until(lambda: _is_draining(bench))
        if ended_by != "time":
            running.stop.set()
        await asyncio.wait_for(running.task, 5)
        record = await bench.record(sid)
        assert (record.state, record.strikes) == ("queued", 0)
        assert await bench.log(sid) == vocab.answer(PROMPT, record.num_tokens)


async def _is_draining(bench: WorkerBench) -> bool:
    member, _ = (await bench.records.members()).get(bench.worker.incarnation, (None, False))
    return member is None or member.draining


async def test_a_worker_without_memory_hands_back_all_but_the_one_to_blame(redis_url: str) -> None:
    async with worker_running(redis_url, step_s=0.005) as running:
        bench = running.bench
        mate = await bench.place(PROMPT, rid="q", block_ids=range(16), max_tokens=50)
        await wait_until(lambda: _has_some(bench, mate))
        poison = await bench.place([vocab.OOM, 0, 7], block_ids=range(16, 20))
        placed_at = time.perf_counter()
        with pytest.raises(OutOfMemory):
            await asyncio.wait_for(asyncio.shield(running.task), 20)
        note(handed_back_s=time.perf_counter() - placed_at)
        record = await bench.record(mate)
        assert (record.state, record.strikes) == ("queued", 0)
        assert await bench.log(mate) == vocab.answer(PROMPT, record.num_tokens)
        assert await running.state(poison) == "placed"  # the scheduler finds it, and counts the strike
        assert not (await bench.records.members())[bench.worker.incarnation][1]


async def test_what_is_assigned_to_a_leaving_worker_is_handed_back_without_a_strike(redis_url: str) -> None:
    async with worker_running(redis_url, step_s=0.005) as running:
        bench = running.bench
        running.stop.set()
        sid = await bench.place(PROMPT)  # nobody reads the plan any more
        await running.task
        record = await bench.record(sid)
        assert (record.state, record.strikes) == ("queued", 0)
        assert await bench.redis.exists(bench.key("plan", bench.worker.incarnation)) == 0


async def test_the_lease_is_kept_while_the_last_step_ends(redis_url: str) -> None:
    """A step may take longer than a lease lasts; what it draws is committed all the same."""
    go_on = threading.Event()
    steps: list[float] = []

    def sleep(seconds: float) -> None:
        steps.append(seconds)
        if len(steps) == 3:
            go_on.wait(10)

    async with worker_running(redis_url, step_s=0.001, sleep=sleep) as running:
        bench = running.bench
        sid = await bench.place(PROMPT, block_ids=range(16), max_tokens=50)
        await wait_until(lambda: len(steps) == 3)
        running.stop.set()
        lease = bench.key("lease", "worker", bench.worker.incarnation)
        await bench.redis.pexpire(lease, 700)
        await wait_until(lambda: _lasts(bench, lease, 720))
        go_on.set()
        await running.task
        assert await bench.log(sid) == vocab.answer(PROMPT, 3)
        assert (await bench.record(sid)).state == "queued"


async def _lasts(bench: WorkerBench, lease: str, ms: int) -> bool:
    return int(await bench.redis.pttl(lease)) > ms


async def _has_some(bench: WorkerBench, sid: str) -> bool:
    return (await bench.record(sid)).num_tokens > 0


async def test_a_lapsed_worker_comes_back_by_itself(redis_url: str) -> None:
    async with worker_running(redis_url, step_s=0.005) as running:
        bench = running.bench
        sid = await bench.place(PROMPT, block_ids=range(16), max_tokens=50)
        await wait_until(lambda: _has_some(bench, sid))
        old = bench.worker.incarnation
        await bench.redis.delete(bench.key("lease", "worker", old))
        await wait_until(lambda: bench.worker.incarnation != old and bench.worker.life.joined)
        await running.take_over()
        await wait_until(lambda: _is(running, sid, "queued"))
        await bench.assign(sid, 1, block_ids=range(16, 32))
        await wait_until(lambda: _is(running, sid, "done"))
        assert await bench.log(sid) == vocab.answer(PROMPT, 50)


async def test_a_cut_connection_is_repeated_and_nothing_is_lost(redis_url: str) -> None:
    async with worker_running(redis_url, step_s=0.005) as running:
        bench = running.bench
        sid = await bench.place(PROMPT, block_ids=range(16), max_tokens=50)
        for _ in range(5):
            await wait_until(lambda: _has_some(bench, sid))
            await bench.redis.client_kill_filter(_type="normal", skipme=True)
        await wait_until(lambda: _is(running, sid, "done"))
        assert await bench.log(sid) == vocab.answer(PROMPT, 50)


async def test_an_idle_worker_sends_next_to_nothing(redis_url: str) -> None:
    async with worker_running(redis_url) as running:
        bench = running.bench
        sid = await bench.place(PROMPT, max_tokens=2)
        await wait_until(lambda: _is(running, sid, "done"))
        await wait_until(lambda: not bench.worker.lease_is_short)
        before = await _num_commands(bench)
        await asyncio.sleep(1.0)  # the time is what is measured
        assert await _num_commands(bench) - before <= 12


async def _num_commands(bench: WorkerBench) -> int:
    return int((await bench.redis.info("stats"))["total_commands_processed"])


async def test_a_hung_engine_ends_the_process_and_its_lease(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr("services.gpu_worker.step_cost.FIRST_HANG_S", 0.3)
    async with worker_running(redis_url, hang=lambda: never.wait(20)) as running:
        bench = running.bench
        sid = await bench.place([vocab.HANG, 0])
        with pytest.raises(EngineHung):
            await asyncio.wait_for(asyncio.shield(running.task), 20)
        never.set()
        assert not (await bench.records.members())[bench.worker.incarnation][1]
        assert await running.state(sid) == "placed"  # the scheduler finds it, and counts the strike


async def test_a_hung_engine_is_known_as_that_also_while_the_worker_stops(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    monkeypatch.setattr("services.gpu_worker.step_cost.FIRST_HANG_S", 0.3)
    async with worker_running(redis_url, hang=lambda: never.wait(20)) as running:
        bench = running.bench
        sid = await bench.place([vocab.HANG, 0])
        await wait_until(lambda: bench.worker.engine_loop.hung)
        running.stop.set()
        with pytest.raises(EngineHung):
            await asyncio.wait_for(asyncio.shield(running.task), 20)
        never.set()
        assert not (await bench.records.members())[bench.worker.incarnation][1]
        assert await running.state(sid) == "placed"


async def test_a_dead_engine_thread_ends_the_process(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with worker_running(redis_url) as running:
        bench = running.bench
        monkeypatch.setattr(bench.worker.running, "prepare", lambda *_, **__: 1 / 0)
        await bench.place(PROMPT)
        with pytest.raises(EngineDied, match="ZeroDivisionError"):
            await asyncio.wait_for(asyncio.shield(running.task), 20)
