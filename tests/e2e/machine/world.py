"""All actors on one Redis, what can happen to them, and what must be true of them all the time and in the end.

Knows nothing of Hypothesis: a test calls what happens, one after the other, and the same calls do the same again.
Leases and streams end when a test says so, not by real time; the services' own timers follow the virtual clock.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import redis

from shared import bus
from shared.leases import IDLE_LEASE_MS
from shared.protocol import Member, MemberKind, SamplingParams
from shared.scripts import Scripts
from tests.e2e.machine import rest, trace
from tests.e2e.machine.actors import Actor, GatewayActor, SchedulerActor, StoreActor, WorkerActor
from tests.e2e.machine.clients import Client
from tests.e2e.machine.oracle import LogWatch, Shape, Wanted
from tests.e2e.machine.rest import ELSEWHERE
from tests.e2e.machine.rulebook import Check, Rulebook
from tests.e2e.machine.virtual_loop import Clock, VirtualLoop
from tests.e2e.machine.wire import Command, Fault, Step, Wire, WiredRedis

KINDS: dict[MemberKind, type[Actor]] = {
    "scheduler": SchedulerActor, "store": StoreActor, "worker": WorkerActor, "gateway": GatewayActor,
}  # fmt: skip
NUM_OF_EACH = 2
LONG_MS = 3_600_000
LEASE_ARGUMENT = {"join": 2, "refresh": 2, "commit": 1, "take_lease": 3}
LEASE_OF: dict[str, Callable[..., str]] = {
    "join": lambda kind, id, *_: f"{kind}:{id}", "refresh": lambda kind, id, *_: f"{kind}:{id}",
    "take_lease": lambda kind, id, *_: f"{kind}:{id}", "commit": lambda worker, *_: f"worker:{worker}",
}  # fmt: skip
ROUND_S = 0.3
MAX_ROUNDS = 600


@dataclass(frozen=True)
class Config:
    shape: Shape
    max_num_seqs: int = 3
    max_num_batched_tokens: int = 16
    prefix_caching: bool = True
    max_strikes: int = 2
    speculates: bool = False


class World:
    def __init__(self, url: str, config: Config) -> None:
        self.config = config
        self.model = "scripted"
        self.clock = Clock()
        self.loop = VirtualLoop(self.clock)
        self.wire = Wire(self.loop)
        self.pool = bus.connect(url).connection_pool
        self.bystander = redis.Redis.from_url(url)
        self.bystander.flushall()
        self.bystander.script_flush()
        self.scripts = Scripts(WiredRedis(self.pool, self.wire), self.model)
        self._script_names = trace.names_of(self.scripts)
        self.watch = LogWatch(self.bystander, self.scripts.prefix)
        self.rulebook = Rulebook(self.bystander, self.scripts.prefix)
        self.wire.audit = self._audit
        self.requests: dict[str, Wanted] = {}
        self.clients: dict[str, Client] = {}
        self.elsewhere: dict[str, int] = {}  # rid -> attach number of those that ELSEWHERE reads
        self.returned: set[str] = set()  # those whose client has come back
        self.num_faults = 0
        self._refreshed: dict[str, float] = {}  # lease -> when it was last taken or kept
        self._lives: dict[str, int] = {}
        self.actors = [self._new(kind, i) for kind in KINDS for i in range(NUM_OF_EACH)]
        self.wire.ask(self.scripts.join(Member(kind="gateway", incarnation=ELSEWHERE), LONG_MS, [f"out:{ELSEWHERE}"]))

    def _new(self, kind: MemberKind, index: int) -> Actor:
        place = f"{kind}{index}"
        self._lives[place] = self._lives.get(place, 0) + 1
        return KINDS[kind](self, f"{place}.{self._lives[place]}")

    def _script_of(self, command: Command) -> str:
        """Or the command, where it is none."""
        return self._script_names[command[1]] if command[0] == "EVALSHA" else command[0]

    def _audit(self, command: Command) -> Check:
        if command[0] != "EVALSHA":
            return lambda reply: None
        script, words = self._script_of(command), command[4:]
        check = self.rulebook.before(script, words)

        def audited(reply: Any) -> None:
            if script in LEASE_OF and not (script == "take_lease" and reply[0] == 0):
                self._refreshed[LEASE_OF[script](*words)] = self.clock.now
            check(reply)

        return audited

    def close(self) -> None:
        for actor in self.actors:
            actor.die()
        for step in self.wire.left_over():
            step.cancel()
        self.loop.run_until_quiet()
        self.wire.ask(self.pool.disconnect())
        self.bystander.close()
        self.loop.close()

    # --- what happens ------------------------------------------------------------------------------------------------

    def submit(
        self, gateway: int, prompt: tuple[int, ...], num_choices: int, sampling: SamplingParams,
        stop_after: int | None = None,
    ) -> str | None:  # fmt: skip
        """The new request's id; None where no gateway listens."""
        actor = self.gateways[gateway]
        if not (actor.alive and actor.started and "leave" not in actor.steps):
            return None
        rid = f"r{len(self.requests):03}"
        wanted = Wanted(
            rid, prompt, num_choices, sampling, self.config.shape, stop_after, max_strikes=self.config.max_strikes
        )
        self.requests[rid] = wanted
        self.clients[rid] = client = Client(wanted, actor.inflight)
        actor.submit(client)
        return rid

    def hang_up(self, rid: str) -> None:
        for gateway in self.gateways:
            if rid in gateway.clients:
                gateway.hang_up(rid)
        self.clients[rid].leave()

    def attach_elsewhere(self, rid: str) -> None:
        """The client comes back at a gateway that reads records and logs."""
        attached = self.wire.ask(self.scripts.attach(rid, ELSEWHERE))
        if attached.status == "ok":
            self.elsewhere[rid] = attached.choices[0][1]

    def come_back(self, rid: str, gateway: int) -> None:
        """The client asks for all of its answer again, at this gateway."""
        actor = self.gateways[gateway]
        if not (actor.alive and actor.started and "leave" not in actor.steps) or f"attach {rid}" in actor.steps:
            return
        self.returned.add(rid)
        self.elsewhere.pop(rid, None)
        self.clients[rid] = client = Client(self.requests[rid], actor.inflight)
        actor.come_back(client)

    def step(self, actor: Actor, loop: str, num_commands: int, fault: Fault) -> None:
        """So many commands of a loop; the last of them meets the fault. 0: to its end."""
        step = actor.begin(loop) if actor.alive else None
        if step is None:
            return
        if num_commands == 0:
            actor.run(loop)
            return
        for i in range(num_commands):
            if step.turns and not step.held:
                self._advance(actor, step, fault if i == num_commands - 1 else Fault.NONE)

    def _advance(self, actor: Actor, step: Step, fault: Fault) -> None:
        self.num_faults += fault is not Fault.NONE
        actor.advance(step, fault)

    def round(self, num_rounds: int = 1, seconds: float = 0.05) -> None:
        """Every actor that runs takes each of its loops one step on, one after the other, without faults."""
        for _ in range(num_rounds):
            for actor in list(self.actors):
                self._round_of(actor)
            self.pass_time(seconds)

    def _round_of(self, actor: Actor, stop_at: Callable[[Command], bool] = lambda command: False) -> Step | None:
        """The step that is about to send such a command, if one comes to that."""
        for loop in [*actor.steps] + list(actor.loops() if actor.started else ["start"]):
            if not actor.alive or actor.paused:
                return None
            step = actor.run(loop, stop_at)
            if step is not None:
                return step
        return None

    def storm(self, seed: int, num_actions: int, fault_rate: float) -> None:
        """Loops of all actors side by side, command by command; what is under way in the end stays under way."""
        rng = random.Random(seed)
        for _ in range(num_actions):
            actors = [a for a in self.actors if a.alive and not a.paused]
            if not actors:
                return
            actor = rng.choice(actors)
            waiting = [s for s in actor.steps.values() if s.turns and not s.held]
            if waiting and rng.random() < 0.6:
                step: Step | None = rng.choice(waiting)
            else:
                step = actor.begin(rng.choice(list(actor.loops()) if actor.started else ["start"]))
            for _ in range(rng.choice((1, 1, 2, 4, 50))):
                if step is None or step.held or not step.turns or not actor.alive:
                    break
                fault = rng.choice(list(Fault)[1:]) if rng.random() < fault_rate else Fault.NONE
                self._advance(actor, step, fault)
            if rng.random() < 0.1:
                self.pass_time(0.1)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.loop.run_until_quiet()
        for actor in self.actors:
            actor.reap()

    def kill(self, actor: Actor, announced: bool) -> None:
        """announced: its supervisor has seen it."""
        incarnation = actor.incarnation
        actor.die()
        if announced:
            self.wire.ask(self.scripts.gone(actor.kind, incarnation))
        self._excuse(actor)

    def leave(self, actor: Actor) -> None:
        """It stops in order, its last words being steps like others."""
        if actor.started and "leave" not in actor.steps:
            actor.begin_leaving()

    def replace(self, actor: Actor) -> None:
        assert not actor.alive
        self.actors[self.actors.index(actor)] = self._new(actor.kind, int(actor.name.split(".")[0][-1]))

    def expire_member(self, actor: Actor) -> None:
        """Its lease runs out; it may be well, and only slow."""
        if self.bystander.delete(self.scripts.key(f"lease:{actor.kind}:{actor.incarnation}")):
            self._excuse(actor)

    def expire_lease(self, kind: str, worker: str) -> None:
        self.bystander.delete(self.scripts.key(f"lease:{kind}:{worker}"))

    def lose_stream(self, actor: Actor) -> None:
        name = {"scheduler": "inbox", "store": "cache", "worker": "plan", "gateway": "out"}[actor.kind]
        self.bystander.delete(self.scripts.key(f"{name}:{actor.incarnation}"))

    def strand(self, script: str, whole: bool, meanwhile: Callable[[], None], num_rounds: int, leases: bool) -> None:
        """Somebody who is about to run this script stops there, in this step alone or as a whole, while the others go
        on and take over; then it goes on where it was."""
        found = self._run_until(lambda command: self._script_of(command) == script)
        if found is None:
            return
        actor, step = found
        step.held, actor.paused = True, whole
        if leases:
            self.expire_member(actor)
            for worker in self.workers:
                for kind in ("run", "pool"):
                    key = self.scripts.key(f"lease:{kind}:{worker.incarnation}")
                    if self.bystander.get(key) == actor.incarnation.encode():
                        self.bystander.delete(key)
        self.round(num_rounds)
        meanwhile()
        self.round(num_rounds)
        step.held = actor.paused = False

    def _run_until(self, stop_at: Callable[[Command], bool], max_rounds: int = 3) -> tuple[Actor, Step] | None:
        for _ in range(max_rounds):
            for actor in list(self.actors):
                step = self._round_of(actor, stop_at)
                if step is not None:
                    return actor, step
            self.pass_time(0.1)
        return None

    def forget_request(self, rid: str) -> None:
        """The retention of a request that is over and whose client has gone runs out. No admission takes so long."""
        sids = [f"{rid}.{i}" for i in range(self.requests[rid].num_choices)]
        is_over = self.clients[rid].end and all(sid in self.watch.outcomes for sid in sids)
        admissions = [c for c, _ in self.wire.late] + [t.command for g in self.gateways for t in g.waiting()]
        if is_over and not any(rid in command for command in admissions):
            names = [f"r:{rid}", *(f"s:{sid}" for sid in sids), *(f"s:{sid}:log" for sid in sids)]
            self.bystander.delete(*map(self.scripts.key, names))
            self.watch.forget(sids)

    def flush_scripts(self) -> None:
        self.bystander.script_flush()

    def _excuse(self, actor: Actor) -> None:
        """What a lost lease may do to requests that are there now."""
        for rid, wanted in self.requests.items():
            if actor.kind == "worker":
                wanted.num_deaths += 1
            elif actor.kind == "gateway" and self.clients[rid].inflight is getattr(actor, "inflight", None):
                wanted.may_be_cancelled = wanted.may_be_cancelled or rid not in self.elsewhere

    # --- what is there -----------------------------------------------------------------------------------------------

    @property
    def gateways(self) -> list[GatewayActor]:
        return [a for a in self.actors if isinstance(a, GatewayActor)]

    @property
    def workers(self) -> list[WorkerActor]:
        return [a for a in self.actors if isinstance(a, WorkerActor)]

    @property
    def schedulers(self) -> list[SchedulerActor]:
        return [a for a in self.actors if isinstance(a, SchedulerActor)]

    @property
    def stores(self) -> list[StoreActor]:
        return [a for a in self.actors if isinstance(a, StoreActor)]

    def check(self) -> None:
        """What must be true at any time."""
        for error in self.wire.broken:
            raise error
        self.watch.look(self.requests)
        for actor in self.actors:
            if actor.alive:
                actor.check()

    # --- the end -----------------------------------------------------------------------------------------------------

    def quiesce(self) -> None:
        """No more faults, all timers run: every request has its end, and nothing is held or remembered."""
        while self.wire.late:
            self.wire.deliver_late(0)
        for actor in list(self.actors):
            actor.paused = False
            actor.finish_steps()
            if not actor.alive:
                self.replace(actor)
        for num_rounds in itertools.count():
            self.expire_leases()
            self.round(seconds=ROUND_S)
            self.check()
            if num_rounds > 10 and self.is_quiet():
                break
            assert num_rounds < MAX_ROUNDS, f"not quiet after {num_rounds} rounds: {self.what_is_open()}"
        self.round(3, seconds=15.0)
        self.round(12, seconds=ROUND_S)
        self.check()
        rest.check(self)

    def expire_leases(self) -> None:
        """Those of the dead, and those that nobody has kept: as time would."""
        alive = {a.incarnation for a in self.actors if a.alive} | {ELSEWHERE}
        for key in self.bystander.keys(self.scripts.key("lease:*")):
            name, owner = key.decode().removeprefix(self.scripts.key("lease:")), self.bystander.get(key).decode()
            forgotten = self._refreshed.get(name, 0.0) < self.clock.now - IDLE_LEASE_MS / 1000
            if owner not in alive or (forgotten and owner != ELSEWHERE):
                self.bystander.delete(key)

    def is_quiet(self) -> bool:
        return not self.what_is_open()

    def what_is_open(self) -> list[str]:
        states = {sid: self.watch.fields_of(sid) for sid in self.watch.epochs if sid not in self.watch.outcomes}
        opened = [f"{sid}: {f}" for sid, f in states.items()]
        opened += [f"client {rid}" for rid, c in self.clients.items() if not c.end]
        opened += [f"queued by {s.name}: {list(s.service.core.queue)}" for s in self.schedulers if s.service.core.queue]
        return opened

    def story(self, last: int = 0) -> str:
        """The commands that have travelled, or the last of them, for people."""
        return trace.text(self.wire.trace[-last:], self.scripts)


@contextlib.contextmanager
def running_world(url: str, config: Config) -> Iterator[World]:
    """Real time and chance are kept out: names are counted, real leases do not run out, entries wait for no claim, and
    Redis' own time rises by a millisecond whenever a script asks for it."""
    names = itertools.count()

    def token_hex(num_bytes: int) -> str:
        return f"{next(names):012}"

    run, source = Scripts._run, Scripts.source

    def source_without_time(self: Scripts, name: str) -> str:
        return source(self, name).replace("redis.call('TIME')", "{0, redis.call('INCR', 'ticks') * 1000}")

    async def run_with_long_leases(self: Scripts, name: str, *args: Any) -> Any:
        at = LEASE_ARGUMENT.get(name)
        return await run(self, name, *(LONG_MS if i == at else a for i, a in enumerate(args)))

    with (
        mock.patch.object(Scripts, "_run", run_with_long_leases),
        mock.patch("shared.leases.secrets.token_hex", token_hex),
        mock.patch("services.scheduler.service.CLAIM_IDLE_MS", 0),
        mock.patch.object(Scripts, "source", source_without_time),
    ):
        world = World(url, config)
        try:
            yield world
        except BaseException as e:
            e.add_note(world.story())
            raise
        finally:
            world.close()
