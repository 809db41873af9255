"""The scheduler's shell on a real Redis: lost replies, ended lives, and everything else that is not the core's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.exceptions import ConnectionError, ResponseError

from services.scheduler import executor
from services.scheduler.service import SchedulerService
from shared.bus import connect
from shared.protocol import Event, Outcome, TokenChunk
from shared.runtime import Stop
from shared.store_calls import Ensure
from shared.wire import decode, decode_as, encode
from shared.worker_protocol import Admit, TakeOver
from tests.helpers import counting, wait_until
from tests.scheduler.pipeline import FakeStore, FakeWorker, Pipeline, pipeline_at
from tests.shared.script_world import CANCELLED, HOUR_MS, MODEL, World, world_at

LOST = ConnectionError("the reply is lost")


def lose_replies(monkeypatch: pytest.MonkeyPatch, scripts: Any) -> list[str]:
    """Every script runs, and the reply to its first call is lost; the names of those."""
    lost: list[str] = []
    seen: set[tuple[Any, ...]] = set()
    run = scripts._run

    async def lossy(name: str, *args: Any) -> Any:
        reply = await run(name, *args)
        if (name, *args) not in seen:
            seen.add((name, *args))
            lost.append(name)
            raise LOST
        return reply

    monkeypatch.setattr(scripts, "_run", lossy)
    return lost


async def persist(step: Callable[[], Awaitable[Any]]) -> Any:
    """As `forever` does it, without waiting."""
    for _ in range(100):
        try:
            return await step()
        except ConnectionError:
            continue
    raise AssertionError("it never comes through")


# --- from the queue to the worker ------------------------------------------------------------------------------------


async def test_a_request_runs_and_ends_and_nothing_is_left(any_redis_url: str) -> None:
    async with pipeline_at(any_redis_url) as p:
        service = await p.up()
        await p.w.admit("r", 3)
        await p.settle()
        assert set(p.worker.rows) == {"r.0", "r.1", "r.2"} and await p.w.queue() == [] and p.store.num_used() > 0
        for i in range(3):
            await p.worker.finish(f"r.{i}")
            await p.settle()
        assert await p.states("r.0", "r.1", "r.2") == ["done"] * 3 and await p.w.num_pending() == 0
        view = service.core.workers["w"]
        assert not service.core.queue and not view.num_sequences and p.store.num_used() == 0
        assert p.worker.spares == view.spares


@pytest.mark.parametrize(
    "record",
    [{"prompt": b""}, {"prompt": b"\1\0\0\0" * 2}, {"prompt": b"\1\0\0\0" * 9}, {"prompt": b"\1\0\0\0" * 2 + b"\1"},
     {"spec": b""}, {"spec": b"\xff"}, {"spec": b"\x91" * 10_000}, {"spec": encode(Event(kind="left", id="x"))}],
    ids=lambda record: str(record)[:30],
)  # fmt: skip
async def test_records_that_contradict_themselves_end_alone(any_redis_url: str, record: dict[str, bytes]) -> None:
    """No store is asked for blocks for them: it could not answer, and would be asked for ever, before all others."""
    async with pipeline_at(any_redis_url) as p:
        await p.up()
        await p.w.admit("bad", 2)
        await p.w.redis.hset(p.w.scripts.key("r:bad"), mapping=record)
        await p.w.admit("r")
        await p.settle()
        assert await p.states("bad.0", "bad.1", "r.0") == ["done", "done", "placed"]
        outcome = decode_as(Outcome, (await p.w.sequence("bad.0")).outcome)
        assert (outcome.reason, outcome.code) == ("error", "internal_error")
        assert await p.w.queue() == []


async def test_every_reply_may_be_lost(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pipeline_at(redis_url) as p:
        await p.w.gateway()
        await p.worker.start()
        await p.store.start(p.worker)
        service = SchedulerService(p.w.redis, MODEL, incarnation="s", clock=p.clock)
        lost = lose_replies(monkeypatch, service.scripts)
        monkeypatch.setattr(service, "_beat", service.scripts)
        await persist(service.begin_life)
        await persist(service.scan)
        await p.w.admit("r", 2)
        for _ in range(12):
            await persist(lambda: service.read_queue(0))
            await persist(lambda: service.read_inbox(0))
            await persist(service.pump)
            await p.worker.turn()
            await p.store.turn()
        assert {"join", "take_lease", "plan", "send", "assign"} <= set(lost)
        admits = [m for m in p.worker.seen if isinstance(m, Admit)]
        assert sorted(a.sid for a in admits) == ["r.0", "r.1"] and {a.epoch for a in admits} == {1}
        assert len([m for m in p.worker.seen if isinstance(m, TakeOver)]) == 1
        assert len(p.worker.spares) == len(service.core.workers["w"].spares) > 0
        for i in range(2):
            await p.worker.finish(f"r.{i}")
        for _ in range(4):
            await persist(lambda: service.read_inbox(0))
            await persist(service.pump)
            await p.store.turn()
        assert p.store.num_used() == 0 and await p.states("r.0", "r.1") == ["done", "done"]


async def test_everything_but_admission_works_on_a_full_server(any_redis_url: str) -> None:
    async with pipeline_at(any_redis_url) as p:
        await p.w.admit("r", 2)
        async with p.w.full_server():
            service = await p.up()
            await service.heartbeat()
            await service.claim()
            await p.settle()
            assert await p.states("r.0", "r.1") == ["placed", "placed"]
            await p.worker.finish("r.0")
            await p.worker.die()
            await service.scan()
            assert await p.states("r.0", "r.1") == ["done", "queued"]


async def test_actions_are_carried_out_in_order_and_one_at_a_time(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        inside = 0
        carry_out = service._executor.carry_out

        async def watched(*args: Any) -> int:
            nonlocal inside
            inside += 1
            assert inside == 1
            num_done = await carry_out(*args)
            inside -= 1
            return num_done

        monkeypatch.setattr(service._executor, "carry_out", watched)
        await p.w.admit("r", 6)
        await asyncio.gather(service.read_queue(0), service.pump(), service.scan(), service.pump())
        await p.settle()
        assert len(p.worker.rows) == 6


async def test_a_cancelled_request_leaves_the_queue(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        await p.w.admit("r", 20)
        await p.settle()
        waiting = sorted(service.core.queue)
        assert len(waiting) == 11
        await p.w.scripts.cancel_if(waiting[:1], 1, CANCELLED)
        await p.settle()
        assert sorted(service.core.queue) == waiting[1:]
        await p.w.scripts.cancel_if([f"r.{i}" for i in range(20)], 1, CANCELLED)
        await p.settle()
        assert not service.core.queue and await p.w.num_pending() == 0


async def test_an_output_that_is_there_is_read_with_the_prompt(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        await p.w.admit("r", tokens=5)
        await p.settle()
        await p.w.redis.rpush(p.w.key("s:r.0:log"), encode(TokenChunk(first=0, ids=(7, 8))))
        await p.w.redis.hset(p.w.key("s:r.0"), "num_tokens", 2)
        await p.w.scripts.requeue("r.0", 1)
        p.worker.rows.clear()
        await service.read_queue(0)
        messages = [dict(fields)[b"m"] for fields in await p.w.stream("cache:c")]
        ensures = [m for m in map(decode, messages) if isinstance(m, Ensure)]
        assert ensures[-1].epoch == 2 and len(ensures[-1].ids) == 4 * 7


@pytest.mark.parametrize("what", ["r:r", "log"])
async def test_records_that_cannot_be_read_end_one_request(redis_url: str, what: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        await p.w.admit("r")
        await p.w.admit("q")
        if what == "log":
            await p.settle()
            await p.w.redis.rpush(p.w.key("s:r.0:log"), b"garbage")
            await p.w.scripts.requeue("r.0", 1)
        else:
            await p.w.redis.hset(p.w.key("r:r"), "spec", b"garbage")
        await p.settle()
        assert await p.states("r.0", "q.0") == ["done", "placed"]
        assert decode_as(Outcome, (await p.w.sequence("r.0")).outcome).code == "internal_error"
        assert not service.core.queue


def fail_for(monkeypatch: pytest.MonkeyPatch, scripts: Any, name: str, sid: str) -> None:
    """That script fails for that sequence, as one does whose record makes no sense."""
    run = scripts._run

    async def failing(called: str, *args: Any) -> Any:
        if called == name and sid in args:
            raise ResponseError("attempt to perform arithmetic on a nil value")
        return await run(called, *args)

    monkeypatch.setattr(scripts, "_run", failing)


@pytest.mark.parametrize("script", ["assign", "finish"])
async def test_a_script_that_fails_for_one_sequence_ends_nothing_else(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        fail_for(monkeypatch, service.scripts, script, "odd.0")
        await p.w.admit("odd")
        await p.w.admit("r")
        if script == "finish":
            await p.w.redis.hset(p.w.key("r:odd"), "spec", b"garbage")
        await p.settle()
        assert await p.states("r.0") == ["placed"]
        view = service.core.workers["w"]
        assert not service.core.queue and not view.placing and set(view.running) == {"r.0"}


@pytest.mark.parametrize("script", ["requeue", "condemn", "cancel_if"])
async def test_a_script_that_fails_for_one_sequence_holds_up_no_cleaning(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        for rid in ("odd", "r"):
            await p.w.admit(rid)
        await p.settle()
        fail_for(monkeypatch, service.scripts, script, "odd.0")
        if script == "cancel_if":
            for rid in ("odd", "r"):
                await p.w.scripts.detach([f"{rid}.0"], 1, 0)
        else:
            await p.w.redis.delete(p.w.key("lease:worker:w"))
        if script == "condemn":
            for rid in ("odd", "r"):
                await p.w.redis.hset(p.w.key(f"s:{rid}.0"), "strikes", 5)
        await service.scan()
        assert await p.states("odd.0", "r.0") == ["placed", "queued" if script == "requeue" else "done"]


async def test_only_what_the_engine_failed_on_is_kept_for_people(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        await p.up()
        for rid in ("wrong", "failed"):
            await p.w.admit(rid)
        await p.settle()
        for rid, code in (("wrong", "invalid_request"), ("failed", "engine_error")):
            await p.worker.finish(f"{rid}.0", Outcome(reason="error", code=code))
        await p.settle()
        assert [fields[b"sid"] for _, fields in await p.w.redis.xrange(p.w.key("dead"))] == [b"failed.0"]


async def test_a_queue_entry_of_somebody_else_is_left_alone(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        await p.w.redis.xadd(p.w.key("requests"), {"sid": "r.0", "epoch": "x"})
        await p.w.redis.xadd(p.w.key("requests"), {"other": "fields"})
        assert await service.read_queue(0) == 2
        assert not service.core.queue and await p.w.num_pending() == 2


async def test_garbage_in_the_inbox_is_passed_over(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        for data in (b"garbage", encode(Event(kind="pool")), encode(Outcome(reason="stop"))):
            await p.w.scripts.send("inbox:s", data)
        await p.w.admit("r")
        await p.settle()
        assert await p.states("r.0") == ["placed"] and service.incarnation == "s"


# --- claims ----------------------------------------------------------------------------------------------------------


async def test_entries_are_claimed_when_there_is_room(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.service.CLAIM_IDLE_MS", 0)
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        await p.w.admit("r", 100)
        assert await p.w.read_queue("slow") == 100
        await service.claim()
        await p.settle()
        assert len(p.worker.rows) == 9
        assert len(service.core.queue) == 64 - 9
        await service.claim()  # no room: nothing more is taken
        assert len(service.core.queue) == 64 - 9
        num_done = 0
        while p.worker.rows:
            for sid in list(p.worker.rows):
                await p.worker.finish(sid)
                num_done += 1
            await p.settle()
            await service.claim()
            await p.settle()
        assert num_done == 100 and await p.w.num_pending() == 0


async def test_nothing_is_claimed_without_room(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.service.CLAIM_IDLE_MS", 0)
    async with pipeline_at(redis_url) as p:
        service = await p.scheduler()
        await p.w.admit("r")
        await p.w.read_queue("other")
        await service.claim()
        assert not service.core.queue
        assert await service.read_queue(0) == 0  # nor read, for that matter


# --- lives -----------------------------------------------------------------------------------------------------------


async def lapse(w: World) -> None:
    await w.redis.delete(w.key("lease:scheduler:s"))


async def lose_inbox(w: World) -> None:
    await w.redis.delete(w.key("inbox:s"))


@pytest.mark.parametrize("how", [lapse, lose_inbox])
async def test_an_ended_life_is_followed_by_another(
    redis_url: str, how: Callable[[World], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.scheduler.service.CLAIM_IDLE_MS", 0)
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        await p.w.admit("a")
        await p.settle()
        await p.w.admit("b", 12)
        await service.read_queue(0)
        await how(p.w)
        await service.heartbeat()
        assert service.incarnation != "s" and service.core.workers["w"].term == 2 and not service.core.queue
        await p.settle()
        assert service.core.workers["w"].running["a.0"].epoch == 1  # it ran on all the time
        await service.claim()
        await p.settle()
        assert len(p.worker.rows) == 9 and (await p.w.sequence("a.0")).epoch == 1
        await service.scan()
        assert "s" not in await p.w.records.members()


async def test_a_live_one_lives_on(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        await p.w.redis.pexpire(p.w.key("lease:scheduler:s"), HOUR_MS)
        for _ in range(3):
            await service.heartbeat()
        assert service.incarnation == "s" and await p.w.redis.pttl(p.w.key("lease:scheduler:s")) < HOUR_MS / 2
        assert await p.w.exists("metrics:scheduler:s")


async def test_a_new_life_that_fails_half_way_is_begun_again(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        await lapse(p.w)
        lose_replies(monkeypatch, service.scripts)
        monkeypatch.setattr(service, "_beat", service.scripts)
        service.membership.scripts = service.scripts
        await persist(service.heartbeat)
        monkeypatch.undo()
        await service.scan()
        await p.settle()
        assert service.incarnation != "s" and service.core.workers["w"].has_room()
        assert [m for m in await p.w.records.members() if m.startswith("s") and m != "s"] == [service.incarnation]


async def test_what_was_read_for_an_old_life_is_not_for_the_new_one(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        await p.w.scripts.send("inbox:s", encode(Event(kind="left", id="w")))
        reader = service.reader
        read = reader.read

        async def slow_read(block_ms: int) -> Any:
            entries = await read(block_ms)
            await lapse(p.w)
            await service.heartbeat()
            return entries

        monkeypatch.setattr(reader, "read", slow_read)
        assert await service.read_inbox(0) == 0
        assert service.incarnation != "s" and service._handled.keys() == {f"inbox:{service.incarnation}"}
        await service.heartbeat()


async def test_a_redis_that_has_forgotten_everything(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        await p.w.redis.flushall()
        assert await service.read_queue(0) == 0  # it says NOGROUP
        assert service.incarnation != "s"
        await p.w.admit("r")
        p.workers[:] = [FakeWorker(p.w, "w2")]
        await p.workers[0].start()
        p.stores[:] = [FakeStore(p.w, "c2")]
        await p.stores[0].start(p.workers[0])
        await service.scan()
        await p.settle()
        assert set(p.workers[0].rows) == {"r.0"}


async def test_any_other_error_of_the_queue_is_raised(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        await p.w.redis.delete(p.w.key("requests"))
        await p.w.redis.set(p.w.key("requests"), "not a stream")
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            await service.read_queue(0)


# --- leases ----------------------------------------------------------------------------------------------------------


async def test_a_fenced_plan_gives_the_worker_up(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        await p.w.scripts.drop_lease("run", "w", "s")
        assert await p.w.scripts.take_lease("run", "w", "other", HOUR_MS) == (2, "other")
        service.core.set_store("w", "c", 9)
        await service.pump()
        assert "w" not in service.core.workers and service._scan_now.is_set()
        assert [m for m in p.worker.seen if isinstance(m, TakeOver)] == [TakeOver(term=1, inbox="s", ask=1)]


async def test_a_fenced_assign_gives_the_worker_up(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        await p.w.admit("r")
        await service.read_queue(0)
        await p.store.turn()
        await p.w.scripts.drop_lease("run", "w", "s")
        await p.w.scripts.take_lease("run", "w", "other", HOUR_MS)
        await service.read_inbox(0)
        assert "w" not in service.core.workers and await p.states("r.0") == ["queued"]
        assert set(service.core.queue) == {"r.0"}


async def test_a_worker_that_reads_no_more_is_given_up_without_a_rush(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        await p.w.redis.delete(p.w.key("plan:w"))
        await p.w.admit("r")
        await p.settle()
        assert "w" not in service.core.workers and await p.states("r.0") == ["queued"]
        assert not service._scan_now.is_set()  # it would be found, and given up, again and again


async def test_a_store_that_reads_no_more_is_looked_for(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        await p.w.redis.delete(p.w.key("cache:c"))
        await p.w.admit("r")
        await p.settle()
        assert service.core.workers["w"].store == "" and await p.states("r.0") == ["queued"]
        p.stores[:] = [FakeStore(p.w, "c2")]
        await p.w.redis.delete(p.w.key("lease:pool:w"))
        await p.stores[0].start(p.worker)
        await service.scan()
        await p.settle()
        assert await p.states("r.0") == ["placed"]


async def test_what_the_worker_does_not_show_is_queued_again(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        await p.w.admit("a")
        await p.w.admit("b", priority=3)
        await p.settle()
        del p.worker.rows["a.0"]
        await p.w.redis.delete(p.w.key("lease:scheduler:s"))
        p.services.remove(service)
        second = await p.scheduler("s2")
        await p.settle()
        assert await p.states("a.0", "b.0") == ["placed", "placed"]
        records = [await p.w.sequence(sid) for sid in ("a.0", "b.0")]
        assert [(r.epoch, r.strikes) for r in records] == [(2, 0), (1, 0)]
        assert second.core.workers["w"].running["b.0"].priority == 3  # told by the record, not by the worker


# --- the process -----------------------------------------------------------------------------------------------------


async def test_it_serves_until_it_is_stopped_and_leaves_in_order(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        p = Pipeline(w)
        await w.gateway()
        await p.worker.start()
        await p.store.start(p.worker)
        clients = [connect(redis_url) for _ in range(3)]
        service = SchedulerService(clients[0], MODEL, incarnation="s", blocking=clients[1], heartbeat=clients[2])
        stop = Stop()
        running = asyncio.ensure_future(service.run(stop))
        await w.admit("r")

        async def placed() -> bool:
            await p.worker.turn()
            await p.store.turn()
            return bool(p.worker.rows)

        await wait_until(placed)
        stop.set()
        await running
        assert not await w.exists("lease:run:w") and not await w.exists("lease:scheduler:s")
        assert (await w.events())[-1] == ("left", "s")
        for client in clients:
            await client.aclose()


async def test_what_comes_at_once_is_read_and_assigned_at_once(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, and none waits for the reply to another: of each kind of call some are under way at a time."""
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        monkeypatch.setattr(executor, "MAX_TOGETHER", 4)
        most: dict[str, int] = {}
        for owner, name in ((service.records, "request"), (service.scripts, "assign")):
            monkeypatch.setattr(owner, name, counting(most, name, getattr(owner, name)))
        sids = [f"r{i}.0" for i in range(6)]
        for sid in sids:
            await p.w.admit(sid.removesuffix(".0"))
        await service.read_queue(0)
        await p.settle()
        assert most == {"request": 4, "assign": 4}
        assert [m.sid for m in p.worker.seen if isinstance(m, Admit)] == sids
