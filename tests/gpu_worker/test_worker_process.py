"""The worker as a process of its own, with the scripted engine: start, service, death, stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator

import pytest

from services.gpu_worker.scripted_engine import CRASH_STATUS, ScriptedEngine, validate
from services.gpu_worker.service import WorkerService
from shared import scripted_vocab as vocab
from shared.bus import connect
from shared.runtime import EXIT_CONFIG, EXIT_HUNG, EXIT_MEMORY
from shared.settings import current_environ
from shared.worker_protocol import TakeOver
from tests.gpu_worker.builders import CAPACITY
from tests.gpu_worker.worker_bench import MODEL, SCHEDULER, Clock, WorkerBench
from tests.helpers import wait_until

PROMPT = list(b"abcdef")


class Process:
    def __init__(self, bench: WorkerBench, process: asyncio.subprocess.Process) -> None:
        self.bench = bench
        self.process = process

    async def status(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 20)

    async def is_done(self, sid: str) -> bool:
        return (await self.bench.record(sid)).state == "done"


async def spawn(url: str, **variables: str) -> asyncio.subprocess.Process:
    environ = {
        "HEADRACE_REDIS_URL": url, "HEADRACE_SERVED_MODEL_NAME": MODEL, "HEADRACE_MODEL": "scripted",
        "HEADRACE_ENGINE": "scripted", "HEADRACE_BLOCK_SIZE": "4", "HEADRACE_INCARNATION": "w-process",
    }  # fmt: skip
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gpu_worker", env=current_environ() | environ | variables,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def worker_process(url: str, *, starts_within_s: float = 20.0, **variables: str) -> AsyncIterator[Process]:
    """A worker process that a scheduler has taken over."""
    redis = connect(url)
    # never started: it lends its name to the bench
    absent = WorkerService(
        redis, MODEL, ScriptedEngine(num_blocks=1), capacity=CAPACITY, validate=validate, incarnation="w-process"
    )
    bench = WorkerBench(redis, absent, Clock())
    await bench.join_others()
    process = await spawn(url, **variables)
    try:
        await wait_until(lambda: redis.exists(bench.key("plan", "w-process")), timeout=starts_within_s)
        bench.term, _ = await bench.scripts.take_lease("run", "w-process", SCHEDULER, 60_000)
        await bench.plan(TakeOver(term=bench.term, inbox=SCHEDULER))
        await wait_until(bench.inbox)
        yield Process(bench, process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()
        await redis.aclose()


async def test_it_serves_and_stops_on_sigterm_with_its_sequences_handed_back(redis_url: str) -> None:
    async with worker_process(redis_url, HEADRACE_SCRIPTED_STEP_MS="5", HEADRACE_DRAIN_TIMEOUT_S="0.2") as worker:
        bench = worker.bench
        first = await bench.place(PROMPT, max_tokens=5)
        await wait_until(lambda: worker.is_done(first))
        assert await bench.log(first) == vocab.answer(PROMPT, 5)
        second = await bench.place(PROMPT, rid="q", block_ids=range(8, 512), max_tokens=2000)
        await wait_until(lambda: bench.log(second))
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.status() == 0
        record = await bench.record(second)
        assert (record.state, record.strikes) == ("queued", 0)
        assert not (await bench.records.members())["w-process"][1]


async def test_a_crash_on_a_marker_takes_the_process_down(redis_url: str) -> None:
    async with worker_process(redis_url) as worker:
        sid = await worker.bench.place([vocab.CRASH, 2, 7], max_tokens=5)
        assert await worker.status() == CRASH_STATUS
        assert (await worker.bench.record(sid)).state == "placed"
        log = await worker.bench.log(sid)
        assert log == vocab.answer([vocab.CRASH, 2, 7], 2)[: len(log)]


async def test_a_stopped_worker_that_goes_on_again_is_another_incarnation(redis_url: str) -> None:
    async with worker_process(redis_url, HEADRACE_SCRIPTED_STEP_MS="5") as worker:
        bench = worker.bench
        sid = await bench.place(PROMPT, block_ids=range(512), max_tokens=2000)
        await wait_until(lambda: bench.log(sid))
        worker.process.send_signal(signal.SIGSTOP)
        await wait_until(lambda: _is_lapsed(bench))
        length = len(await bench.log(sid))
        await bench.scripts.requeue(sid, 1, strikes=1)
        worker.process.send_signal(signal.SIGCONT)
        await wait_until(lambda: _num_workers(bench, alive=True))
        assert len(await bench.log(sid)) == length and (await bench.record(sid)).state == "queued"


async def _is_lapsed(bench: WorkerBench) -> bool:
    return not await bench.redis.exists(bench.key("lease", "worker", "w-process"))


async def _num_workers(bench: WorkerBench, alive: bool) -> int:
    members = (await bench.records.members()).values()
    return sum(leased == alive for m, leased in members if m.kind == "worker")


@pytest.mark.slow
async def test_a_worker_whose_engine_hangs_gives_its_process_up(redis_url: str) -> None:
    async with worker_process(redis_url) as worker:
        first = await worker.bench.place(PROMPT, max_tokens=2)
        await wait_until(lambda: worker.is_done(first))
        sid = await worker.bench.place([vocab.HANG, 0], rid="q", block_ids=(8, 9))
        assert await worker.status() == EXIT_HUNG
        assert not (await worker.bench.records.members())["w-process"][1]
        assert (await worker.bench.record(sid)).state == "placed"


async def test_a_worker_without_memory_says_so_by_its_exit_status(redis_url: str) -> None:
    async with worker_process(redis_url) as worker:
        sid = await worker.bench.place([vocab.OOM, 0])
        assert await worker.status() == EXIT_MEMORY
        assert (await worker.bench.record(sid)).state == "placed"


async def test_a_second_sigterm_cuts_the_drain_short(redis_url: str) -> None:
    async with worker_process(redis_url, HEADRACE_SCRIPTED_STEP_MS="5", HEADRACE_DRAIN_TIMEOUT_S="600") as worker:
        bench = worker.bench
        sid = await bench.place(PROMPT, block_ids=range(512), max_tokens=2000)
        await wait_until(lambda: bench.log(sid))
        worker.process.send_signal(signal.SIGTERM)
        await wait_until(lambda: _is_draining(bench))
        worker.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(worker.process.wait(), 4) == 0
        record = await bench.record(sid)
        assert (record.state, record.strikes) == ("queued", 0)


async def _is_draining(bench: WorkerBench) -> bool:
    return (await bench.records.members())["w-process"][0].draining


async def test_a_setting_that_cannot_be_used_is_named_and_restarting_does_not_help(redis_url: str) -> None:
    process = await spawn(redis_url, HEADRACE_ENGINE="torch", HEADRACE_MODEL="/nowhere/model.gguf")
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == EXIT_CONFIG and b"/nowhere/model.gguf" in errors and b"Traceback" not in errors


async def test_a_gpu_that_is_not_there_is_said_so_and_restarting_does_not_help(redis_url: str) -> None:
    process = await spawn(redis_url, HEADRACE_ENGINE="auto", HEADRACE_DEVICE="cuda", CUDA_VISIBLE_DEVICES="")
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == EXIT_CONFIG and b"device: cuda is not possible here: " in errors
    assert b"Traceback" not in errors


async def test_an_engine_of_a_cpu_computes_on_no_gpu(redis_url: str) -> None:
    process = await spawn(redis_url, HEADRACE_ENGINE="native", HEADRACE_DEVICE="cuda")
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == EXIT_CONFIG and b"engine: native computes on a CPU, and device is cuda" in errors
