"""Two gateways, schedulers, stores and workers on a real Redis, driven command by command by Hypothesis.

Any step may be cut short, repeated, delayed, or lose its reply; anybody may pause or die between two commands, lose a
lease or a stream, and come back when another has taken its place. See `machine/world.py` for what is checked after
every step and in the end. `make test` runs a few examples, always the same; `make test-slow` searches for new ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shared import scripted_vocab as vocab
from shared.protocol import SamplingParams
from tests.e2e.machine.actors import Actor
from tests.e2e.machine.oracle import Shape
from tests.e2e.machine.wire import Fault
from tests.e2e.machine.world import Config, World, running_world

PREFIXES = (b"the mill wheel turns while water comes down", b"the mill pond is full, and the wheel turns on")
BOTH = settings(deadline=None, suppress_health_check=list(HealthCheck), report_multiple_bugs=False, database=None)
QUICK = settings(BOTH, max_examples=25, stateful_step_count=25, derandomize=True)
LONG = settings(BOTH, max_examples=1500, stateful_step_count=50)

MAX_STORY_LINES = 1500

shapes = st.builds(
    Shape, num_blocks=st.sampled_from([8, 12, 16, 24]), block_size=st.sampled_from([2, 4]),
    max_model_len=st.sampled_from([40, 256]),
)  # fmt: skip
configs = st.builds(
    Config, shape=shapes, max_num_seqs=st.integers(2, 4), max_num_batched_tokens=st.sampled_from([4, 8, 16]),
    prefix_caching=st.sampled_from([True, True, True, False]), max_strikes=st.sampled_from([1, 2, 8]),
    speculates=st.booleans(),
)  # fmt: skip
prompts = st.builds(
    lambda prefix, length, end: (*prefix[:length], *end),
    st.sampled_from(PREFIXES), st.integers(1, 24), st.sampled_from([b"", b"", b"!", b"?"]),
)  # fmt: skip
scripts = st.builds(
    lambda prompt, answer: (*prompt, vocab.SCRIPT, *answer), prompts, st.sampled_from([b"", b"so it is"])
)
samplings = st.builds(
    SamplingParams, max_tokens=st.sampled_from([0, 1, 4, 9, 20, 40]), min_tokens=st.sampled_from([0, 0, 3]),
    temperature=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 2), logprobs=st.sampled_from([None, None, 2]),
    stop_token_ids=st.sampled_from([(vocab.EOS,), (vocab.EOS, ord(" ")), ()]),
)  # fmt: skip
places = st.integers(0, 7)
faults = st.sampled_from([Fault.NONE, *Fault])
rates = st.sampled_from([0, 0.02, 0.1, 0.3])
commands = st.sampled_from(
    ["admit", "assign", "plan", "commit", "requeue", "finish", "cancel_if", "attach", "take_lease", "drop_lease",
     "join", "refresh", "send", "gone", "bury", "HMGET", "XREAD", "XREADGROUP"]
)  # fmt: skip
misfortunes = st.sampled_from(
    ["dies", "dies, and that is said", "stops in order", "pauses", "loses its lease", "loses a lease on a worker",
     "loses its stream", "is not known to Redis"]
)  # fmt: skip


class PipelineMachine(RuleBasedStateMachine):
    redis_url: ClassVar[str]

    @initialize(config=configs, num_rounds=st.integers(0, 4))
    def start(self, config: Config, num_rounds: int) -> None:
        self.stack = contextlib.ExitStack()
        self.world = self.stack.enter_context(running_world(self.redis_url, config))
        self.is_over = False
        with self.told():
            self.world.round(num_rounds)

    @contextlib.contextmanager
    def told(self) -> Iterator[World]:
        """What went before a failure is told with it; nothing more is checked after it."""
        try:
            yield self.world
        except BaseException:
            self.is_over = True
            note(self.world.story(last=MAX_STORY_LINES))
            raise

    def alive(self, place: int) -> Actor | None:
        actor = self.world.actors[place]
        return actor if actor.alive else None

    # --- clients -----------------------------------------------------------------------------------------------------

    @rule(
        gateway=st.integers(0, 1), prompt=st.one_of(prompts, prompts, scripts),
        num_choices=st.sampled_from([1, 1, 2, 3]), sampling=samplings,
        stop_after=st.sampled_from([None, None, None, 3, 7]),
    )  # fmt: skip
    def submit(
        self, gateway: int, prompt: tuple[int, ...], num_choices: int, sampling: SamplingParams, stop_after: int | None
    ) -> None:
        with self.told() as world:
            world.submit(gateway, prompt, num_choices, sampling, stop_after)

    @rule(gateway=st.integers(0, 1), length=st.integers(4, 20), num=st.integers(2, 4), max_tokens=st.integers(5, 30))
    def submit_several(self, gateway: int, length: int, num: int, max_tokens: int) -> None:
        """More than fit at once, with a common beginning."""
        with self.told() as world:
            for i in range(num):
                sampling = SamplingParams(max_tokens=max_tokens, seed=i)
                world.submit((gateway + i) % 2, (*PREFIXES[0][:length], ord("0") + i % 2), 1, sampling)

    @precondition(lambda self: self.world.clients)
    @rule(
        number=st.integers(0, 99), gateway=st.integers(0, 1),
        what=st.sampled_from(["hangs up", "attaches elsewhere", "comes back", "comes back", "has been forgotten"]),
    )  # fmt: skip
    def client(self, number: int, gateway: int, what: str) -> None:
        rids = sorted(self.world.clients)
        rid = rids[number % len(rids)]
        with self.told() as world:
            match what:
                case "hangs up":
                    world.hang_up(rid)
                case "comes back":
                    world.come_back(rid, gateway)
                case "attaches elsewhere":
                    world.attach_elsewhere(rid)
                case _:
                    world.forget_request(rid)

    # --- steps -------------------------------------------------------------------------------------------------------

    @rule(num_rounds=st.integers(1, 4))
    def rounds(self, num_rounds: int) -> None:
        with self.told() as world:
            world.round(num_rounds)

    @rule(
        seed=st.integers(0, 1 << 30), num_actions=st.integers(1, 120), fault_rate=st.sampled_from([0, 0.02, 0.1, 0.3])
    )
    def storm(self, seed: int, num_actions: int, fault_rate: float) -> None:
        with self.told() as world:
            world.storm(seed, num_actions, fault_rate)

    @rule(place=places, loop=st.integers(0, 9), num_commands=st.integers(0, 4), fault=faults)
    def step(self, place: int, loop: int, num_commands: int, fault: Fault) -> None:
        actor = self.alive(place)
        if actor is not None and not actor.paused:
            loops = list(actor.loops()) if actor.started else ["start"]
            with self.told() as world:
                world.step(actor, loops[loop % len(loops)], num_commands, fault)

    @rule(
        script=commands, whole=st.booleans(), leases=st.booleans(), num_rounds=st.integers(1, 4),
        meanwhile=st.one_of(st.none(), st.tuples(misfortunes, places)),
    )  # fmt: skip
    def strand(
        self, script: str, whole: bool, leases: bool, num_rounds: int, meanwhile: tuple[str, int] | None
    ) -> None:
        """At its most delicate moment somebody stops, and much happens before it goes on."""
        with self.told() as world:
            world.strand(script, whole, lambda: meanwhile and self.befall(*meanwhile), num_rounds, leases)

    @rule(seconds=st.sampled_from([0.1, 0.6, 2.5, 7.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        with self.told() as world:
            world.pass_time(seconds)

    @precondition(lambda self: self.world.wire.late)
    @rule(number=st.integers(0, 99))
    def late_command_arrives(self, number: int) -> None:
        with self.told() as world:
            world.wire.deliver_late(number % len(world.wire.late))

    # --- misfortunes -------------------------------------------------------------------------------------------------

    @rule(what=misfortunes, place=places)
    def misfortune(self, what: str, place: int) -> None:
        with self.told():
            self.befall(what, place)

    def befall(self, what: str, place: int) -> None:
        world, actor = self.world, self.world.actors[place]
        if not actor.alive:
            return
        match what:
            case "dies":
                world.kill(actor, announced=False)
            case "dies, and that is said":
                world.kill(actor, announced=True)
            case "stops in order":
                world.leave(actor)
            case "pauses":
                actor.paused = True
            case "loses its lease":
                world.expire_member(actor)
            case "loses a lease on a worker":
                world.expire_lease("pool" if place % 2 else "run", world.workers[place // 2 % 2].incarnation)
            case "loses its stream":
                world.lose_stream(actor)
            case "is not known to Redis":
                world.flush_scripts()

    @precondition(lambda self: any(a.paused or not a.alive for a in self.world.actors))
    @rule()
    def recovery(self) -> None:
        """The dead are replaced, the paused go on."""
        with self.told() as world:
            for actor in list(world.actors):
                actor.paused = False
                if not actor.alive:
                    world.replace(actor)

    # --- what must be true -------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost_repeated_or_shared(self) -> None:
        with self.told() as world:
            world.check()

    def teardown(self) -> None:
        if not hasattr(self, "stack"):
            return
        with self.stack:
            if not self.is_over:
                with self.told() as world:
                    world.quiesce()


def search(url: str, profile: settings) -> None:
    class Machine(PipelineMachine):
        redis_url = url

    run_state_machine_as_test(Machine, settings=profile)  # type: ignore[no-untyped-call]


@pytest.mark.timeout(300)
def test_the_pipeline_keeps_its_promises(redis_url: str) -> None:
    search(redis_url, QUICK)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_the_pipeline_keeps_its_promises_for_long(redis_url: str) -> None:
    search(redis_url, LONG)
