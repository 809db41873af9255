"""The services as objects that are driven step by step: which loops each has, and what a loop does in one turn.

Each step of a loop is a task whose commands wait for their turns (`wire`); a loop has one step under way at a time, as
in the real process, and the loops of an actor run beside each other. What a service's own `run` does around its loops
(what is done after a lost connection, how it stops) is repeated here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from services.cache_store.service import StoreService
from services.gateway.inflight import Inflight
from services.gpu_worker.batch import Drawn
from services.gpu_worker.composer import Budget
from services.gpu_worker.scripted_engine import KVCorruption, ScriptedEngine, validate
from services.gpu_worker.service import WorkerService
from services.scheduler.service import SchedulerService
from shared.bus import LOST
from shared.protocol import MemberKind
from shared.records import Records
from shared.scripts import Scripts
from tests.e2e.machine.clients import Client
from tests.e2e.machine.wire import Command, Fault, Step, Turn, WiredRedis
from tests.gpu_worker.guesser import Guesser

if TYPE_CHECKING:
    from tests.e2e.machine.world import World

RETENTION_MS = 3_600_000
MAX_QUEUED_REQUESTS, MAX_QUEUED_TOKENS = 12, 240
STEP_S = 0.01


class Actor:
    """One process. A dead one is never revived: another takes its place."""

    kind: MemberKind

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.started = False
        self.paused = False
        self.steps: dict[str, Step] = {}
        self.redis = WiredRedis(world.pool, world.wire)

    # --- to be said by each kind -------------------------------------------------------------------------------------

    def loops(self) -> dict[str, Callable[[], Awaitable[Any]]]:
        raise NotImplementedError

    async def start(self) -> None:
        raise NotImplementedError

    async def leave(self) -> None:
        raise NotImplementedError

    @property
    def incarnation(self) -> str:
        """The name under which it lives now."""
        raise NotImplementedError

    def on_lost(self, loop: str) -> None:
        """The connection broke in this loop's step."""

    def check(self) -> None:
        """AssertionError when it contradicts itself."""

    # --- driving -----------------------------------------------------------------------------------------------------

    def begin(self, loop: str) -> Step | None:
        """The loop's step that is under way, or a new one; None if that ended without a command."""
        if not self.started:
            loop, work = "start", self.start
        elif loop not in self.loops():
            return None
        else:
            work = self.loops()[loop]
        if loop not in self.steps:
            self.steps[loop] = self.world.wire.begin(f"{self.name}.{loop}", work())
            self.reap()
        return self.steps.get(loop)

    def waiting(self) -> list[Turn]:
        """Commands that wait for their turn."""
        return [turn for step in self.steps.values() for turn in step.turns]

    def advance(self, step: Step, fault: Fault = Fault.NONE) -> None:
        self.world.wire.advance(step, fault)
        self.reap()

    def run(self, loop: str, stop_at: Callable[[Command], bool] = lambda command: False) -> Step | None:
        """One step, to its end; the step, if it is about to send such a command."""
        step = self.begin(loop)
        if step is None or step.held:
            return None
        stopped = self.world.wire.run(step, stop_at)
        self.reap()
        return step if stopped else None

    def finish_steps(self) -> None:
        """Whatever is under way goes on to its end."""
        for step in self.steps.values():
            step.held = False
        for _ in range(100):
            waiting = [s for s in self.steps.values() if s.turns]
            if not waiting:
                return
            for step in waiting:
                self.world.wire.run(step)
            self.reap()
        raise AssertionError(f"{self.name} does not come to an end")

    def reap(self) -> None:
        """Looks at the steps that have ended; raises what no loop survives."""
        for loop, step in list(self.steps.items()):
            if self.steps.get(loop) is not step or not step.done:
                continue
            del self.steps[loop]
            error = step.error
            if error is None:
                self.started = self.started or loop == "start"
            elif not isinstance(error, LOST):
                raise error
            elif loop in ("start", "leave"):
                self.die()  # there is no loop around these: the process ends
            else:
                self.on_lost(loop)
            if loop == "leave" and self.alive:
                self.die()

    def begin_leaving(self) -> None:
        self.cancel_steps()
        if self.alive:
            self.steps["leave"] = self.world.wire.begin(f"{self.name}.leave", self.leave())
            self.reap()

    def cancel_steps(self) -> None:
        for step in self.steps.values():
            for task in step.tasks:
                task.cancel()
        self.world.loop.run_until_quiet()
        self.steps.clear()

    def die(self) -> None:
        self.alive = False
        self.cancel_steps()


class SchedulerActor(Actor):
    kind: MemberKind = "scheduler"

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.service = SchedulerService(
            self.redis, world.model, incarnation=name, prefix_caching=world.config.prefix_caching,
            max_strikes=world.config.max_strikes, clock=world.clock,
        )  # fmt: skip

    def loops(self) -> dict[str, Callable[[], Awaitable[Any]]]:
        service = self.service
        return {
            "queue": lambda: service.read_queue(0), "inbox": lambda: service.read_inbox(0), "tick": self._tick,
            "scan": service.scan, "heartbeat": service.heartbeat,
        }  # fmt: skip

    async def _tick(self) -> None:
        await self.service.pump()
        await self.service.claim()

    async def start(self) -> None:
        await self.service.start()

    async def leave(self) -> None:
        for worker in list(self.service.core.workers):
            await self.service.scripts.drop_lease("run", worker, self.service.incarnation)
        await self.service.membership.leave()

    @property
    def incarnation(self) -> str:
        return self.service.incarnation if self.started else self.name

    def on_lost(self, loop: str) -> None:
        if loop == "inbox":
            self.service.on_redis_lost()


class StoreActor(Actor):
    kind: MemberKind = "store"

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.service = StoreService(self.redis, world.model, incarnation=name, clock=world.clock)

    def loops(self) -> dict[str, Callable[[], Awaitable[Any]]]:
        service = self.service
        return {"calls": lambda: service.read(0), "scan": service.scan, "heartbeat": service.heartbeat}

    async def start(self) -> None:
        await self.service.start()

    async def leave(self) -> None:
        for worker in list(self.service._terms):
            await self.service.scripts.drop_lease("pool", worker, self.service.incarnation)
        await self.service.membership.leave()

    @property
    def incarnation(self) -> str:
        return self.service.incarnation if self.started else self.name

    def on_lost(self, loop: str) -> None:
        if loop == "calls":
            self.service.distrust_leases()

    def check(self) -> None:
        if self.started:
            self.service.core.check_invariants()


class WatchedEngine(ScriptedEngine):
    """Remembers what its loop survives: a sequence whose KV is not where its table says ends with an error."""

    corruptions: list[str]

    def step(self, chunks: Any) -> list[Drawn]:
        try:
            return super().step(chunks)
        except KVCorruption as e:
            self.corruptions.append(str(e))
            raise


class WorkerActor(Actor):
    kind: MemberKind = "worker"

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        config = world.config
        self.engine = WatchedEngine(
            num_blocks=config.shape.num_blocks, block_size=config.shape.block_size, step_s=STEP_S,
            max_model_len=config.shape.max_model_len, sleep=world.clock.advance,
        )  # fmt: skip
        self.engine.corruptions = []
        self.service = WorkerService(
            self.redis, world.model, self.engine, validate=validate, incarnation=name,
            capacity=Budget(config.max_num_batched_tokens, config.max_num_seqs, config.max_num_batched_tokens),
            enable_prefix_caching=config.prefix_caching, clock=world.clock,
            drafter=Guesser(num_drafts=2, wrong_every=3) if config.speculates else None,
        )  # fmt: skip

    def loops(self) -> dict[str, Callable[[], Awaitable[Any]]]:
        service = self.service
        return {
            "plan": lambda: service.read_plan(0), "engine": self._step, "commit": self._flush,
            "heartbeat": service.heartbeat,
        }  # fmt: skip

    async def _step(self) -> None:
        self.service.step()

    async def _flush(self) -> None:
        """Urgent things go alone, if an engine step has brought some: as when the regular flush is not due yet."""
        await self.service.flush(urgent_only=self.service.urgent and self.service.engine_loop.num_steps % 2 == 1)

    async def start(self) -> None:
        await self.service.start()

    async def leave(self) -> None:
        await self.service.leave()

    @property
    def incarnation(self) -> str:
        return self.service.incarnation

    def check(self) -> None:
        assert not self.engine.corruptions, self.engine.corruptions
        running, writers = self.service.running, dict[int, str]()
        for seq in running.sequences.values():
            assert len(set(seq.block_ids)) == len(seq.block_ids), f"{seq.sid} has a block twice"
            for block_id in seq.block_ids[seq.num_sealed :]:
                assert block_id not in writers, f"block {block_id}: {seq.sid} and {writers[block_id]}"
                assert block_id not in running.blocks.spares, f"block {block_id} of {seq.sid} is spare"
                writers[block_id] = seq.sid
        for seq in running.sequences.values():
            for block_id in seq.block_ids[: seq.num_sealed]:
                assert writers.get(block_id, seq.sid) == seq.sid, f"{seq.sid} reads what {writers[block_id]} writes"


class GatewayActor(Actor):
    kind: MemberKind = "gateway"

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        scripts = Scripts(self.redis, world.model)
        self.inflight = Inflight(
            self.redis, scripts, Records(self.redis, scripts.prefix), incarnation=name,
            max_requests=MAX_QUEUED_REQUESTS, max_tokens=MAX_QUEUED_TOKENS, retention_ms=RETENTION_MS,
            clock=world.clock,
        )  # fmt: skip
        self.clients: dict[str, Client] = {}

    def loops(self) -> dict[str, Callable[[], Awaitable[Any]]]:
        inflight = self.inflight
        loops: dict[str, Callable[[], Awaitable[Any]]] = {
            "stream": lambda: inflight.read(0), "refresh": inflight.refresh, "settle": inflight.settle,
        }  # fmt: skip
        return loops | {f"take {rid}": client.take for rid, client in self.clients.items() if client.can_take}

    async def start(self) -> None:
        await self.inflight.refresh()

    async def leave(self) -> None:
        await self.inflight.leave()

    def submit(self, client: Client) -> None:
        rid = client.wanted.rid
        self.clients[rid] = client
        self.steps[f"submit {rid}"] = self.world.wire.begin(f"{self.name}.submit {rid}", client.submit())
        self.reap()

    def come_back(self, client: Client) -> None:
        """Whatever this gateway knew of an earlier client of the request, it now answers this one."""
        rid = client.wanted.rid
        if rid in self.clients:
            self.hang_up(rid)
        self.clients[rid] = client
        self.steps[f"attach {rid}"] = self.world.wire.begin(f"{self.name}.attach {rid}", client.come_back())
        self.reap()

    def hang_up(self, rid: str) -> None:
        """The client's connection ends; its response's task is cancelled wherever it is."""
        self.clients[rid].leave()
        for name in (f"submit {rid}", f"attach {rid}", f"take {rid}"):
            step = self.steps.get(name)
            if step is not None:
                step.tasks[0].cancel()
        self.world.loop.run_until_quiet()
        self.reap()

    @property
    def incarnation(self) -> str:
        return self.inflight.incarnation

    def begin_leaving(self) -> None:
        self._let_clients_go()
        super().begin_leaving()

    def die(self) -> None:
        super().die()
        self._let_clients_go()

    def _let_clients_go(self) -> None:
        for client in self.clients.values():
            client.wanted.may_be_cancelled |= not client.end
            client.end = client.end or "gone"
