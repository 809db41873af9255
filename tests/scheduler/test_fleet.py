"""Who is alive, who is dead, and what is cleaned up after the dead."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.scheduler import fleet as fleet_module
from services.scheduler.fleet import ORPHAN_GRACE_S, STALL_S
from services.scheduler.service import SchedulerService
from shared.leases import IDLE_LEASE_MS
from shared.protocol import Outcome
from shared.wire import decode_as, encode
from shared.worker_protocol import Report, RunningSequence
from tests.scheduler.pipeline import FakeStore, FakeWorker, Pipeline, pipeline_at
from tests.shared.script_world import World, entry

LEASE_S = IDLE_LEASE_MS / 1000


async def running(p: Pipeline, *rids: str, n: int = 1, resume_ms: int = 0) -> SchedulerService:
    """A scheduler whose worker runs these requests."""
    service = await p.up()
    for rid in rids:
        await p.w.admit(rid, n, resume_ms=resume_ms)
    await p.settle()
    assert set(p.worker.rows) == {f"{rid}.{i}" for rid in rids for i in range(n)}
    return service


async def successor(p: Pipeline, name: str) -> FakeWorker:
    worker = FakeWorker(p.w, name)
    p.workers = [worker]
    await worker.start()
    await p.store.open(worker)
    return worker


async def outcome(w: World, sid: str) -> Outcome:
    return decode_as(Outcome, (await w.sequence(sid)).outcome)


async def test_who_is_said_to_be_gone_is_remembered_while_something_names_it(redis_url: str) -> None:
    """Else every incarnation that ever left would be."""
    async with pipeline_at(redis_url) as p:
        service = await running(p, "a")
        pool = p.w.key("lease:pool:w")
        owner = await p.w.redis.get(pool)
        await p.w.redis.set(pool, "c-old")
        for id in ("w-long-ago", "c-old"):
            service.fleet.on_left(id)
        await service.scan()
        assert service.fleet._said_gone == {"c-old"}
        await p.w.redis.set(pool, owner)
        await service.scan()
        assert service.fleet._said_gone == set()


# --- workers ---------------------------------------------------------------------------------------------------------


async def test_a_dead_workers_sequences_run_elsewhere(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await running(p, "a", "b")
        await p.worker.die()
        second = await successor(p, "w2")
        await service.scan()
        await p.settle()
        for sid in ("a.0", "b.0"):
            record = await p.w.sequence(sid)
            assert (record.state, record.worker, record.epoch, record.strikes) == ("placed", "w2", 2, 1)
        assert set(second.rows) == {"a.0", "b.0"}
        assert sorted(await p.w.records.members()) == ["c", "g", "s", "w2"] and not await p.w.exists("plan:w")


async def test_two_schedulers_clean_up_once(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        first = await running(p, "a")
        second = await p.scheduler("s2")
        await p.worker.die()
        for service in (first, second, first):
            await service.scan()
        record = await p.w.sequence("a.0")
        assert (record.state, record.epoch, record.strikes) == ("queued", 1, 1) and await p.w.queue() == [("a.0", 1)]


async def test_a_worker_that_drains_gets_nothing_more(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await running(p, "a")
        assert await p.w.scripts.amend(p.worker.member.model_copy(update={"draining": True}))
        await p.settle()  # reads the event
        await service.scan()
        await p.w.admit("b")
        await p.settle()
        assert await p.states("a.0", "b.0") == ["placed", "queued"]
        await successor(p, "w2")
        await service.scan()
        await p.settle()
        assert (await p.w.sequence("b.0")).worker == "w2"


async def test_who_hands_back_gets_no_strike(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await running(p, "a")
        await p.w.scripts.requeue("a.0", 1)
        await p.w.scripts.gone("worker", "w")
        await service.scan()
        assert (await p.w.sequence("a.0")).strikes == 0 and "w" not in await p.w.records.members()


async def test_what_workers_die_of_ends(redis_url: str) -> None:
    """After two deaths it runs alone; the third ends it, and nobody else."""
    async with pipeline_at(redis_url) as p:
        service = await running(p, "a", "poison")
        for death in (1, 2):
            await p.workers[0].die()
            await successor(p, f"w{death}")
            await service.scan()
            await p.settle()
        (admit,) = [m for m in p.workers[0].seen if m.TAG == "admit"]
        assert admit.alone  # one suspect at a time
        suspect, other = ("a.0", "poison.0") if admit.sid == "a.0" else ("poison.0", "a.0")
        await p.workers[0].die()
        await service.scan()
        assert await p.states(suspect, other) == ["done", "queued"]
        end = await outcome(p.w, suspect)
        assert (end.reason, end.code) == ("error", "poison_request") and "3 workers" in end.message
        assert [dict(f)[b"sid"].decode() for f in await p.w.stream("dead")] == [suspect]
        assert (await p.w.told())[-1] == b"!" + suspect.encode() and (await p.w.sequence(other)).strikes == 2


async def test_a_worker_whose_engine_stands_still_loses_its_lease(redis_url: str) -> None:
    """Though it reports regularly. What it commits later is refused as a whole."""
    async with pipeline_at(redis_url) as p:
        service = await running(p, "a")
        row = RunningSequence(sid="a.0", epoch=1, num_tokens=4, num_computed=3)
        for _ in range(65):
            p.clock.now += 0.1
            report = Report(worker="w", term=p.worker.term, pool_term=1, running=(row,), num_steps=9, hang_s=5.0)
            await p.w.scripts.send("inbox:s", encode(report))
            await service.read_inbox(0)
        await p.settle()
        await service.scan()
        record = await p.w.sequence("a.0")
        assert (record.state, record.epoch, record.strikes) == ("queued", 1, 1)
        assert await p.w.commit(entry("a.0", 1, count=1)) is None


async def test_how_many_deaths_end_it_can_be_chosen(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        await p.w.placed("a")
        service = await p.scheduler(max_strikes=0)
        await p.worker.die()
        await service.scan()
        assert await p.states("a.0") == ["done"]


async def test_nobody_is_dead_for_one_lease_time_after_redis_was_away(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await running(p, "a")
        service.fleet.distrust_leases()
        await p.worker.die()
        p.clock.now += LEASE_S - 0.1
        await service.scan()
        assert await p.states("a.0") == ["placed"] and "w" in await p.w.records.members()
        p.clock.now += 0.2
        await service.scan()
        assert await p.states("a.0") == ["queued"]


async def test_an_end_that_redis_has_forgotten_is_found(redis_url: str) -> None:
    """A replica that takes over may lack the last moment: there the sequence still runs, and nobody runs it."""
    async with pipeline_at(redis_url) as p:
        service = await running(p, "a", "b")
        del p.worker.rows["a.0"]  # it has ended, and was told so by the Redis that is no more
        service.on_redis_lost()
        await p.settle()
        again = await p.w.sequence("a.0")
        assert (again.state, again.epoch, again.strikes) == ("placed", 2, 0) and "a.0" in p.worker.rows
        assert (await p.w.sequence("b.0")).epoch == 1, "what runs goes on"


async def test_a_redis_that_stood_still_was_away(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped and continued: no connection was lost, and yet every lease has run out."""
    async with pipeline_at(redis_url) as p:
        service = await running(p, "a")
        members = service.records.members

        async def slow_members() -> object:
            p.clock.now += STALL_S + 0.1
            return await members()

        await p.worker.die()
        monkeypatch.setattr(service.records, "members", slow_members)
        await service.scan()
        assert await p.states("a.0") == ["placed"]
        monkeypatch.undo()
        p.clock.now += LEASE_S
        await service.scan()
        assert await p.states("a.0") == ["queued"]


async def test_its_own_word_counts_at_once(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await running(p, "a")
        service.fleet.distrust_leases()
        await p.w.scripts.gone("worker", "w")
        await p.settle()  # reads the event
        assert service._scan_now.is_set()
        await service.scan()
        assert await p.states("a.0") == ["queued"] and not service.core.workers


async def test_a_live_worker_is_left_alone(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await running(p, "a")
        for _ in range(3):
            p.clock.now += 100
            await service.scan()
        assert await p.states("a.0") == ["placed"] and service.core.workers["w"].term == 1


# --- schedulers ------------------------------------------------------------------------------------------------------


async def test_a_dead_schedulers_workers_and_queue_are_taken_over(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.scheduler.service.CLAIM_IDLE_MS", 0)
    async with pipeline_at(redis_url) as p:
        first = await running(p, "a")
        await p.w.admit("b", 20)
        assert await first.read_queue(0) == 20  # read, and partly placed
        p.services.remove(first)
        second = await p.scheduler("s2")
        assert not second.core.workers  # the other one may be alive
        await p.w.redis.delete(p.w.key("lease:scheduler:s"))
        await second.scan()
        await p.settle()
        assert second.core.workers["w"].term == 2
        await second.claim()
        await p.settle()
        states = await p.states("a.0", *(f"b.{i}" for i in range(20)))
        assert states.count("placed") == 9 and len(second.core.queue) == 12  # one more than its batch takes
        assert len(p.worker.rows) == 9
        await second.scan()
        assert "s" not in await p.w.records.members()
        consumers = await p.w.redis.xinfo_consumers(p.w.key("requests"), "schedulers")
        assert [c["name"] for c in consumers] == [b"s2"]


async def test_a_dead_scheduler_is_remembered_while_it_holds_entries(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        first = await p.up()
        await p.w.admit("b")
        assert await first.read_queue(0) == 1
        p.services.remove(first)
        second = await p.scheduler("s2")
        await p.w.scripts.gone("scheduler", "s")
        await second.read_inbox(0)
        for _ in range(2):
            await second.scan()
            assert "s" in await p.w.records.members()
        await p.w.redis.xautoclaim(p.w.key("requests"), "schedulers", "s2", 0)
        await second.scan()
        assert "s" not in await p.w.records.members()


async def test_workers_are_shared(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        first = await p.up()
        worker = FakeWorker(p.w, "w2")
        await worker.start()
        await p.store.open(worker)
        p.workers.append(worker)
        await first.scan()
        assert set(first.core.workers) == {"w", "w2"}
        second = await p.scheduler("s2")
        await first.scan()
        await second.scan()
        assert [set(s.core.workers) for s in (first, second)] == [{"w"}, {"w2"}]


async def test_each_knows_the_workers_of_the_other(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        first = await running(p, "a")
        worker = FakeWorker(p.w, "w2")
        await worker.start()
        await p.store.open(worker)
        p.workers.append(worker)
        second = await p.scheduler("s2")
        for service in (first, second, first):
            await service.scan()
        (neighbour,) = second.core._neighbours.values()
        assert (neighbour.worker, neighbour.scheduler, neighbour.store) == ("w", "s", "c")
        assert neighbour.num_sequences == 1 and neighbour.pool_term > 0
        assert set(first.core._neighbours) == {"w2"}
        await p.w.redis.delete(p.w.key("lease:scheduler:s"))
        await second.scan()
        assert "w" not in second.core._neighbours, "nothing is offered to the dead"


async def test_a_worker_is_handed_over_when_nothing_is_on_its_way_there(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        first = await p.up()
        worker = FakeWorker(p.w, "w2")
        await worker.start()
        await p.store.open(worker)
        p.workers.append(worker)
        await first.scan()
        await p.settle()
        await p.scheduler("s2")
        first.core.workers["w2"].placing.add("r.0")
        await first.scan()
        assert first.core.workers["w2"].handing_over and not first.core.workers["w2"].has_room()
        first.core.workers["w2"].placing.clear()
        await first.scan()
        assert set(first.core.workers) == {"w"}


async def test_a_worker_that_is_lost_during_the_look_does_no_harm(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pipeline_at(redis_url) as p:
        first = await p.up()
        await p.scheduler("s2")
        share = fleet_module.share_leases

        async def share_and_lose(*args: object, **kwargs: object) -> object:
            first.core.lose_worker("w")
            return await share(*args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(fleet_module, "share_leases", share_and_lose)
        await first.scan()


# --- stores ----------------------------------------------------------------------------------------------------------


async def test_a_dead_store_is_forgotten_and_its_successor_found(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        await p.w.redis.delete(p.w.key("lease:store:c"), p.w.key("lease:pool:w"))
        p.stores = [FakeStore(p.w, "c2")]
        await p.stores[0].start(p.worker)
        await service.scan()
        assert "c" not in await p.w.records.members()
        view = service.core.workers["w"]
        assert (view.store, view.pool_term) == ("c2", 2)
        await p.settle()
        assert view.has_room()


async def test_a_pool_of_a_dead_store_is_not_asked(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        await p.worker.start()
        await p.store.start(p.worker)
        await p.w.redis.delete(p.w.key("lease:store:c"))
        service = await p.scheduler()
        assert service.core.workers["w"].store == ""


# --- orphans ---------------------------------------------------------------------------------------------------------


def killed(w: World) -> object:
    return w.redis.delete(w.key("lease:gateway:g"))


def left(w: World) -> object:
    return w.scripts.gone("gateway", "g")


@pytest.mark.parametrize("how", [killed, left])
async def test_orphans_are_cancelled_after_the_grace_time(redis_url: str, how: Callable[[World], object]) -> None:
    async with pipeline_at(redis_url) as p:
        service = await running(p, "a", n=2)
        await how(p.w)  # type: ignore[misc]
        await service.scan()
        p.clock.now += ORPHAN_GRACE_S - 0.1
        await service.scan()
        assert await p.states("a.0", "a.1") == ["placed", "placed"]
        p.clock.now += 0.2
        await service.scan()
        assert await p.states("a.0", "a.1") == ["done", "done"]
        assert (await outcome(p.w, "a.0")).reason == "cancelled"


async def test_who_may_come_back_later_than_the_grace_time_is_waited_for(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await running(p, "a", resume_ms=60_000)
        await killed(p.w)  # type: ignore[misc]
        await service.scan()
        for _ in range(3):
            p.clock.now += 19.9
            await service.scan()
        assert await p.states("a.0") == ["placed"]
        p.clock.now += 0.4
        await service.scan()
        assert await p.states("a.0") == ["done"]


async def test_whom_its_client_has_left_is_cancelled_when_its_time_is_over(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await running(p, "a", "b")
        await p.w.scripts.detach(["a.0"], 1, 60_000)
        await p.w.scripts.detach(["b.0"], 1, 0)
        await service.scan()
        assert await p.states("a.0", "b.0") == ["placed", "done"]
        assert (await outcome(p.w, "b.0")).code == "client_gone"
        p.clock.now += 1000  # Redis' clock counts, not the scheduler's
        await service.scan()
        assert await p.states("a.0") == ["placed"]


async def test_orphans_in_the_queue_are_cancelled_too(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        await p.w.admit("big", 12)
        await p.settle()
        assert len(service.core.queue) == 3
        await killed(p.w)  # type: ignore[misc]
        for _ in range(2):
            await service.scan()
            p.clock.now += ORPHAN_GRACE_S + 1
        assert set(await p.states(*(f"big.{i}" for i in range(12)))) == {"done"}
        await p.settle()
        assert not service.core.queue and await p.w.queue() == []


async def test_who_has_come_back_elsewhere_is_no_orphan(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await running(p, "a", "b")
        await killed(p.w)  # type: ignore[misc]
        await service.scan()
        await p.w.gateway("g2")
        await p.w.scripts.attach("a", "g2")
        p.clock.now += ORPHAN_GRACE_S + 1
        await service.scan()
        assert await p.states("a.0", "b.0") == ["placed", "done"]


async def test_who_comes_back_during_the_look_is_no_orphan(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pipeline_at(redis_url) as p:
        service = await running(p, "a")
        await killed(p.w)  # type: ignore[misc]
        await service.scan()
        p.clock.now += ORPHAN_GRACE_S + 1
        alive = service.records.alive

        async def attach_meanwhile(kind: str, ids: set[str]) -> set[str]:
            found = await alive(kind, ids)  # type: ignore[arg-type]
            await p.w.scripts.attach("a", "g2")
            return found

        monkeypatch.setattr(service.records, "alive", attach_meanwhile)
        await service.scan()
        assert await p.states("a.0") == ["placed"]


async def test_a_gateway_that_is_alive_has_no_orphans(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await running(p, "a")
        await killed(p.w)  # type: ignore[misc]
        await service.scan()
        await p.w.gateway("g")  # only its lease had been late
        p.clock.now += ORPHAN_GRACE_S + 1
        await service.scan()
        await killed(p.w)  # type: ignore[misc]
        await service.scan()
        p.clock.now += ORPHAN_GRACE_S / 2
        await service.scan()
        assert await p.states("a.0") == ["placed"]  # the grace time begins anew


async def test_no_gateway_is_dead_while_leases_are_not_trusted(redis_url: str) -> None:
    async with pipeline_at(redis_url) as p:
        service = await running(p, "a")
        await killed(p.w)  # type: ignore[misc]
        service.fleet.distrust_leases()
        for seconds in (LEASE_S - 0.1, 0.2, ORPHAN_GRACE_S - 0.1):
            await service.scan()
            p.clock.now += seconds
        await service.scan()  # noticed 9.9 s ago
        assert await p.states("a.0") == ["placed"]
        p.clock.now += 0.2
        await service.scan()
        assert await p.states("a.0") == ["done"]


async def test_each_scheduler_cancels_its_own(redis_url: str) -> None:
    """Also when the other one was the first to notice, and has forgotten the gateway."""
    async with pipeline_at(redis_url) as p:
        first = await running(p, "a")
        other = await p.scheduler("s2")
        await killed(p.w)  # type: ignore[misc]
        await other.scan()
        assert "g" not in await p.w.records.members()
        for _ in range(2):
            await first.scan()
            p.clock.now += ORPHAN_GRACE_S + 1
        assert await p.states("a.0") == ["done"]


async def test_more_sequences_than_one_look_takes(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "MAX_READERS", 3)
    async with pipeline_at(redis_url) as p:
        service = await p.up()
        await p.w.admit("big", 10)
        await p.settle()
        await killed(p.w)  # type: ignore[misc]
        await service.scan()
        p.clock.now += ORPHAN_GRACE_S + 1
        for _ in range(4):
            await service.scan()
        assert set(await p.states(*(f"big.{i}" for i in range(10)))) == {"done"}
