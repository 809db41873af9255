"""Replicas share leases fairly, whatever the order in which they look."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from shared.sharing import Changes, is_member_dead, share_leases
from tests.shared.script_world import HOUR_MS, World, world_at


class Replica:
    """Looks at Redis in one step, as a scheduler or a store does in its scan."""

    def __init__(self, w: World, name: str, workers: list[str]) -> None:
        self.w = w
        self.name = name
        self.workers = workers
        self.terms: dict[str, int] = {}
        self.last = Changes()

    async def turn(
        self, num_replicas: int, dead: tuple[str, ...] = (), may_drop: Callable[[str], bool] = lambda worker: True
    ) -> None:
        owners = {w: run for w, (run, _, _) in (await self.w.records.leases(self.workers)).items()}
        self.last = await share_leases(
            self.w.scripts, "run", self.name, mine=self.terms, owners=owners, num_replicas=num_replicas,
            is_dead=lambda owner: owner in dead, may_drop=may_drop,
        )  # fmt: skip
        for worker in self.last.lost:
            self.terms.pop(worker, None)
        self.terms |= self.last.gained


async def current(w: World, workers: list[str]) -> dict[str, tuple[str, int]]:
    owners = await w.records.leases(workers)
    terms = await w.redis.hgetall(w.key("term"))
    return {x: (owners[x][0], int(terms.get(b"run:" + x.encode(), 0))) for x in workers}


@pytest.mark.parametrize("seed", range(30))
async def test_all_leases_are_held_and_shared_fairly(redis_url: str, seed: int) -> None:
    rng = random.Random(seed)
    num_replicas, workers = rng.randint(1, 4), [f"w{i}" for i in range(rng.randint(0, 7))]
    async with world_at(redis_url) as w:
        replicas = [Replica(w, f"s{i}", workers) for i in range(num_replicas)]
        for _ in range(rng.randint(0, 10)):  # they come one after another, and do not know of all others at first
            await rng.choice(replicas).turn(rng.randint(1, num_replicas))
        for _ in range(3):
            for replica in rng.sample(replicas, num_replicas):
                await replica.turn(num_replicas)
        held = {worker: (r.name, term) for r in replicas for worker, term in r.terms.items()}
        assert held == await current(w, workers) and sum(len(r.terms) for r in replicas) == len(workers)
        assert all(len(r.terms) <= math.ceil(len(workers) / num_replicas) for r in replicas)
        for replica in replicas:  # and it stays like that
            await replica.turn(num_replicas)
            assert replica.last == Changes()


async def test_a_dead_replicas_leases_are_taken_with_higher_terms(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        a, b = Replica(w, "a", ["w0", "w1"]), Replica(w, "b", ["w0", "w1"])
        await a.turn(1)
        await b.turn(1)
        assert b.terms == {}  # not known to be dead
        await b.turn(1, dead=("a",))
        assert b.terms == {"w0": 2, "w1": 2}
        await a.turn(2)
        assert a.terms == {} and sorted(a.last.lost) == ["w0", "w1"]


async def test_leases_that_ran_out_are_taken_by_whoever_comes(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        a, b = Replica(w, "a", ["w0"]), Replica(w, "b", ["w0"])
        await a.turn(1)
        await w.redis.delete(w.key("lease:run:w0"))
        await b.turn(1)
        assert b.terms == {"w0": 2}
        await a.turn(1)
        assert a.terms == {} and a.last.lost == ["w0"]


async def test_a_holder_whose_lease_ran_out_gets_a_new_term(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        a = Replica(w, "a", ["w0"])
        await a.turn(1)
        await w.redis.delete(w.key("lease:run:w0"))
        await a.turn(1)
        assert a.last.lost == ["w0"] and a.last.gained == {"w0": 2} and a.terms == {"w0": 2}


async def test_what_may_not_be_dropped_is_kept_alive_until_it_may(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        a, b = Replica(w, "a", ["w0", "w1"]), Replica(w, "b", ["w0", "w1"])
        await a.turn(1)
        for name in ("lease:run:w0", "lease:run:w1"):
            await w.redis.pexpire(w.key(name), HOUR_MS)
        await a.turn(2, may_drop=lambda worker: False)
        assert a.terms == {"w0": 1, "w1": 1} and a.last.surplus == ["w1"] and a.last.lost == []
        assert await w.redis.pttl(w.key("lease:run:w1")) < HOUR_MS / 2  # refreshed with its own time
        await b.turn(2)
        assert b.terms == {}
        await a.turn(2)
        await b.turn(2)
        assert (a.terms, b.terms) == ({"w0": 1}, {"w1": 2})


async def test_a_surplus_that_another_has_taken_is_lost(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        a = Replica(w, "a", ["w0", "w1"])
        await a.turn(1)
        await w.scripts.drop_lease("run", "w1", "a")
        await w.scripts.take_lease("run", "w1", "b", HOUR_MS)
        await a.turn(2, may_drop=lambda worker: False)
        assert a.terms == {"w0": 1} and a.last.surplus == [] and a.last.lost == ["w1"]


async def test_a_worker_that_is_gone_is_lost(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        a = Replica(w, "a", ["w0", "w1"])
        await a.turn(1)
        a.workers = ["w1"]
        await a.turn(1)
        assert a.terms == {"w1": 1} and a.last.lost == ["w0"]


def test_who_is_dead() -> None:
    dead = is_member_dead(alive={"a"}, said_gone={"gone"}, leases_trusted=True)
    assert not dead("a") and dead("missing") and dead("gone")
    unsure = is_member_dead(alive={"a"}, said_gone={"gone"}, leases_trusted=False)
    assert not unsure("a") and not unsure("missing") and unsure("gone")
