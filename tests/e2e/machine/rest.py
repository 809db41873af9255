"""What must be true when all is over and all timers have run: nothing is held, owed, waited for or remembered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.scripts import SCHEDULER_GROUP
from tests.e2e.machine.actors import SchedulerActor, StoreActor, WorkerActor

if TYPE_CHECKING:
    from tests.e2e.machine.world import World

ELSEWHERE = "gateway-elsewhere"  # whoever reads there reads records and logs
LASTING = {"ticks", "requests", "queue", "events", "members", "term", "dead", "secret", "absent"}


def check(world: World) -> None:
    """AssertionError naming what is left."""
    for rid, client in world.clients.items():
        assert client.end, f"the client of {rid} waits"
        assert client.end != "moved" or rid in world.elsewhere or rid in world.returned, f"{rid}: nobody took it"
    _check_queue(world)
    for worker in world.workers:
        name = worker.incarnation
        stores = [s for s in world.stores if name in s.service.core.pools]
        schedulers = [s for s in world.schedulers if name in s.service.core.workers]
        assert len(stores) == 1, f"the pool of {name} is led by {[s.name for s in stores]}"
        assert len(schedulers) == 1, f"{name} is led by {[s.name for s in schedulers]}"
        assert world.bystander.scard(world.scripts.key(f"on:{name}")) == 0
        _check_worker(worker)
        _check_pool(worker, stores[0], schedulers[0])
    for gateway in world.gateways:
        assert not gateway.inflight.requests, gateway.inflight.requests
    _check_keys(world)


def _check_queue(world: World) -> None:
    redis, key = world.bystander, world.scripts.key
    assert redis.xlen(key("requests")) == 0
    assert redis.xpending(key("requests"), SCHEDULER_GROUP)["pending"] == 0
    assert int(redis.hget(key("queue"), "tokens") or 0) == 0
    for scheduler in world.schedulers:
        core = scheduler.service.core
        assert not core.queue, f"{scheduler.name} still queues {core.queue}"
        assert not len(core.calls), f"{scheduler.name} still waits for {core.calls._pending}"


def _check_worker(worker: WorkerActor) -> None:
    running = worker.service.running
    assert not running.sequences and not running.has_work, f"{worker.name} runs {list(running.sequences)}"
    assert not running.blocks.num_held, f"{worker.name} holds blocks for nobody"


def _check_pool(worker: WorkerActor, store: StoreActor, scheduler: SchedulerActor) -> None:
    """All blocks are free or spare, the three agree about the spare ones, and what can be hit is at the worker."""
    running, pool = worker.service.running, store.service.core.pools[worker.incarnation]
    view, manager = scheduler.service.core.workers[worker.incarnation], pool.manager
    assert pool.state == "ready" and view.phase.name == "READY", f"{worker.name}: {pool.state}, {view.phase}"
    assert not manager.holds, f"{store.name} holds blocks for {list(manager.holds)}"
    assert manager.num_free + len(manager.spares) == manager.num_blocks
    assert set(manager.spares) == running.blocks.spares == view.spares, (
        f"spare blocks: {set(manager.spares)} at the store, {running.blocks.spares} at the worker, {view.spares}"
    )
    assert not view.running and not view.placing and not view.granting, f"{scheduler.name} about {worker.name}: {view}"
    sealed = {e.block_id: e.key for e in running.sealed.entries()}
    for block_id in range(manager.num_blocks):
        entry = manager.index.entry(block_id)
        assert entry is None or entry.key == sealed.get(block_id), f"{store.name}: block {block_id} is not that"


def _check_keys(world: World) -> None:
    """Nothing is left of the dead but what expires by itself."""
    redis, prefix = world.bystander, world.scripts.prefix
    alive = {a.incarnation for a in world.actors} | {ELSEWHERE}
    members = {m.decode() for m in redis.hkeys(f"{prefix}members")}
    assert members <= alive, f"the dead are remembered: {members - alive}"
    lasting = {k.decode().removeprefix(prefix) for k in redis.keys("*") if redis.ttl(k) == -1}
    left = {k for k in lasting - LASTING if k.partition(":")[2] not in alive}
    assert not left, f"keys without an end: {left}"
