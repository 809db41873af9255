"""Faults at random, from a seed, under constant load: every answer is the one it always is.

Two of each service and a Redis of its own; the workers speculate. Clients of both gateways ask for everything that
`load.mixed` has, some hang up, and what they are answered is judged (`checker.judge`). In the end the stack must be at
rest, and nobody may have ended but those who were made to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import redis

from tests.chaos import checker
from tests.chaos.faults import Faults
from tests.chaos.play import ChaosStack
from tests.chaos.schedule import Fault, faults
from tests.e2e.balanced import BalancedClient
from tests.e2e.clients import Answer, Client, Json
from tests.e2e.load import SLOW, SPECULATIVE, mixed
from tests.e2e.own_redis import OwnRedis
from tests.e2e.process import Process

log = logging.getLogger(__name__)

# Of a client: what hangs for good is found by any limit. Where a process takes ten seconds to start, since others use
# the machine, faults that come every second leave an answer little time in which everybody it needs is there.
ANSWER_TIMEOUT_S = 300.0
REMARKABLE_S = 30.0  # a pause that is worth looking for in the logs
AGAIN_S = 0.5  # after a round in which nobody was answered: it is not the clients that are to be busy
NAMES = ("load one", "load two")
# what a fault makes a service say, and no failure: it names who is away, or why somebody ends
ALLOWED = (
    "Redis is away", "is gone; \\d+ sequences", "out of memory", "OOM command", "Too many open files",
    "the records of .* cannot be read", "socket.accept", "MISCONF", "is over",
)  # fmt: skip
# many die here, none by a request's fault
ENV: dict[str, object] = SLOW | {"max_strikes": 10, "drain_timeout_s": 5} | SPECULATIVE


@dataclass
class Report:
    name: str
    seed: int
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    longest_pause_s: float = 0.0
    redis_memory: checker.Growth = field(default_factory=checker.Growth)

    @property
    def num_faults(self) -> int:
        return sum(self.faults.values())

    def lines(self) -> Iterator[str]:
        yield f"{self.name}, seed {self.seed}: {self.num_faults} faults in {self.seconds:.0f} s"
        yield "faults: " + ", ".join(f"{number} {what}" for what, number in self.faults.most_common())
        yield "answers: " + ", ".join(f"{number} {what}" for what, number in self.answers.most_common())
        yield f"longest pause of a client that was answered whole: {self.longest_pause_s:.1f} s"
        yield f"memory of Redis: {self.redis_memory.per_minute() / 1024:+.0f} KiB a minute"


@contextlib.asynccontextmanager
async def closing(client: Client) -> AsyncIterator[Client]:
    try:
        yield client
    finally:
        await client.close()


class RandomRun:
    """num_tokens: of the answers. pace: by how much longer the time between two faults is than the schedule says.
    options: of the stack."""

    def __init__(
        self, folder: Path, seed: int, *, num_tokens: int = 48, pace: float = 1.0, name: str = "scripted",
        **options: Any,
    ) -> None:  # fmt: skip
        self.report = Report(name, seed)
        self.folder = folder
        self._num_tokens = num_tokens
        self._pace = pace
        self._options: dict[str, Any] = {
            "gateways": 2,
            "schedulers": 2,
            "stores": 2,
            "workers": 2,
            "env": ENV,
        } | options
        self._end = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._errors: list[BaseException] = []

    async def run(self, seconds: float, most: int | None = None) -> Report:
        """Faults for so long, or so many; Violation if something is wrong."""
        with OwnRedis(self.folder / "redis") as server:
            stack = ChaosStack(server.url, self.folder / "stack", with_links=True, **self._options)
            stack.allowed += ALLOWED
            async with stack:
                await self._run(stack, server, seconds, most)
        return self.report

    async def _run(self, stack: ChaosStack, server: OwnRedis, seconds: float, most: int | None) -> None:
        undisturbed = {name: await self._undisturbed(stack, name) for name in NAMES}
        rest, started = checker.Rest.of(stack), time.monotonic()
        self._end = started + seconds
        async with stack.supervised():
            working = [self._ask(stack, place, undisturbed) for place in range(4)]
            await asyncio.gather(self._disturb(Faults(stack, server), most), *working, self._watch(stack, started))
        self.report.seconds = time.monotonic() - started
        if self._errors:
            raise self._errors[0]
        await rest.check()
        checker.check_logs(stack)
        with checker.invariant("I9"):
            assert not stack.ended_unasked, stack.ended_unasked

    async def _undisturbed(self, stack: ChaosStack, name: str) -> list[Answer]:
        async with closing(Client(stack.url_of(0), ANSWER_TIMEOUT_S)) as client:
            answers = await client.ask_all(mixed(name, self._num_tokens))
        for answer in answers:
            answer.check()
        return answers

    # --- faults ------------------------------------------------------------------------------------------------------

    async def _disturb(self, library: Faults, most: int | None) -> None:
        for number, fault in enumerate(islice(faults(self.report.seed), most)):
            await asyncio.sleep(self._pace * fault.gap_s)
            if time.monotonic() > self._end:
                break
            log.info("%d: %s", number, fault)
            self.report.faults[f"{fault.kind} {fault.what}"] += 1
            self._begin(library, fault)
        self._end = min(self._end, time.monotonic())
        while self._tasks:
            await asyncio.gather(*self._tasks)

    def _begin(self, library: Faults, fault: Fault) -> None:
        task = asyncio.create_task(library.carry_out(fault))
        self._tasks.add(task)
        task.add_done_callback(self._fault_ended)

    def _fault_ended(self, task: asyncio.Task[None]) -> None:
        """A fault that could not be carried out is the harness' own failure."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._errors.append(error)

    async def _watch(self, stack: ChaosStack, started: float) -> None:
        while time.monotonic() < self._end:
            with contextlib.suppress(Exception):  # Redis may be away
                used = await asyncio.to_thread(lambda: stack.state.redis.info("memory")["used_memory"])
                self.report.redis_memory.add(time.monotonic() - started, used)
            await asyncio.sleep(1.0)

    # --- load --------------------------------------------------------------------------------------------------------

    async def _ask(self, stack: ChaosStack, place: int, undisturbed: dict[str, list[Answer]]) -> None:
        """One client of a gateway, again and again; of sixteen requests it hangs up on one."""
        rng = random.Random(self.report.seed * 10 + place)
        while time.monotonic() < self._end:
            gateway = stack.process("gateway", place % 2)
            if not gateway.port:
                await asyncio.sleep(0.05)  # it does not listen yet
                continue
            name = rng.choice(NAMES)
            async with closing(Client(f"http://127.0.0.1:{gateway.port}", ANSWER_TIMEOUT_S)) as client:
                requests = zip(mixed(name, self._num_tokens), undisturbed[name], strict=True)
                asking = [self._judged(client, gateway, body, same, stack, place) for body, same in requests]
                leaver = client.begin(mixed(name, 10 * self._num_tokens)[0])
                asyncio.get_running_loop().call_later(rng.uniform(0, 1.0), leaver.cancel)
                verdicts = await asyncio.gather(*asking)
            self.report.answers.update(verdicts)
            if not any(verdict.startswith("whole") for verdict in verdicts):
                await asyncio.sleep(AGAIN_S)

    async def _judged(
        self, client: Client, gateway: Process, body: Json, same: Answer, stack: ChaosStack, place: int
    ) -> str:
        """Half of the clients come back at any gateway, and must get all; the others lose what their gateway had."""
        comes_back = place >= 2
        with checker.invariant("I2"):
            answer = await (
                BalancedClient(client, lambda: listening(stack)).ask(body) if comes_back else client.ask(body)
            )
        if answer.broken:
            await asyncio.sleep(0.1)  # until its end is seen
        ended = gateway.expected_to_end or gateway.popen.poll() is not None
        try:
            if answer.status == 0:
                return "not connected"  # nothing was promised
            verdict = checker.judge(answer, same, may_break=ended and not comes_back, may_be_refused=True)
            if verdict == "whole":
                pause_s = answer.longest_pause_s()
                self.report.longest_pause_s = max(self.report.longest_pause_s, pause_s)
                if pause_s > REMARKABLE_S:
                    log.info("%s was answered whole after a pause of %.1f s", answer.rid, pause_s)
                with contextlib.suppress(redis.RedisError):  # it may be away
                    await asyncio.to_thread(checker.check_record, stack, answer)
        except AssertionError as e:
            e.add_note(f"gateway {gateway.log.name}, request {body}, answer {answer}")
            raise
        return verdict + (", with gateways that come and go" if comes_back else "")


def listening(stack: ChaosStack) -> list[str]:
    living = [g for g in stack.processes("gateway") if g.popen.poll() is None and g.port]
    return [f"http://127.0.0.1:{g.port}" for g in living]
