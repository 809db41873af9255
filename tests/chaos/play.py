"""Plays a scenario on a stack of its own, checks everything after it, and plays its twin with a rule cut out.

A scenario is an async function of a `Run`. `Play.play` must find every invariant kept; `Play.objects` plays the same on
a product without a rule (`sabotage.py`) and must find one broken, and the right one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shared.protocol import MemberKind
from tests.chaos import checker
from tests.chaos.link import Link
from tests.chaos.sabotage import Cut, sabotaged_tree
from tests.e2e.clients import TIMEOUT_S, Answer, Client, longest_pause_s
from tests.e2e.load import SLOW, mixed
from tests.e2e.own_redis import OwnRedis
from tests.e2e.process import Process
from tests.e2e.stack import Stack
from tests.e2e.state import Sequence
from tests.figures import note
from tests.helpers import wait_until

log = logging.getLogger(__name__)

TWIN_TIMEOUT_S = 10.0  # of its clients: what never comes need not be waited for as long


class ChaosStack(Stack):
    """Every process reaches Redis over a link of its own, where links are wanted; its code may have been cut."""

    def __init__(self, *args: Any, with_links: bool = False, cuts: tuple[Cut, ...] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self.links: dict[tuple[MemberKind, int], Link] = {}
        self._with_links = with_links
        self._cuts = cuts
        self._open_links = contextlib.AsyncExitStack()

    async def __aenter__(self) -> ChaosStack:
        if self._cuts:
            self.tree = sabotaged_tree(self.folder / "sabotaged", self._cuts)
        if self._with_links:
            for kind, number in self.numbers.items():
                for index in range(number):
                    self.links[kind, index] = await self._open_links.enter_async_context(Link(self.redis_url))
        try:
            await super().__aenter__()
        except BaseException:
            await self._open_links.aclose()
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for link in self.links.values():
            link.heal()
        try:
            await super().__aexit__(kind, error, traceback)
        finally:
            await self._open_links.aclose()

    def own_settings(self, kind: MemberKind, index: int) -> dict[str, object]:
        link = self.links.get((kind, index))
        return super().own_settings(kind, index) | ({"redis_url": link.url} if link else {})

    def link(self, process: Process) -> Link:
        return self.links[process.kind, process.index]


@dataclass
class Run:
    """What a scenario has: a stack, clients, the load and what it is answered where nothing happens."""

    stack: ChaosStack
    undisturbed: list[Answer]
    rest: checker.Rest
    server: OwnRedis | None = None  # where it has one of its own
    timeout_s: float = TIMEOUT_S  # of a client
    figures: dict[str, float] = field(default_factory=dict)
    clients: list[Client] = field(default_factory=list)

    def client(self, gateway: int = 0) -> Client:
        client = Client(self.stack.url_of(gateway), self.timeout_s)
        self.clients.append(client)
        return client

    async def decoding(self, gateway: int = 0, at_least: int = 10) -> Loaded:
        """The load, sent, and its sequences once most that are streamed have tokens."""
        client = self.client(gateway)
        known = {s.sid for s in self.stack.state.sequences()}
        answering = client.begin_all(mixed("load"))

        def running() -> list[Sequence]:
            return [s for s in self.stack.state.running() if s.num_tokens > 0 and s.sid not in known]

        await wait_until(lambda: len(running()) >= at_least)
        return Loaded(answering, running(), self.undisturbed, self.figures)

    def victim(self, kind: MemberKind, running: list[Sequence]) -> Process:
        """Who has most of these in its hands: the worker that runs them, the scheduler or store that leads that one."""
        places = [s.worker for s in running]
        worker = max(places, key=places.count)
        if kind == "gateway":
            return self.stack.by_incarnation(running[0].gateway)
        owner = {"worker": worker, "scheduler": self.stack.state.owner("run", worker)}
        return self.stack.by_incarnation(owner.get(kind) or self.stack.state.owner("pool", worker))

    async def detected(self, lost: list[Sequence], since: float) -> None:
        """Notes how long it takes until one of the lost has another place."""

        def moved() -> bool:
            now = [self.stack.state.sequence(s.sid) for s in lost]
            return any(n is not None and n.epoch > s.epoch for n, s in zip(now, lost, strict=True))

        with checker.invariant("I1"):
            await wait_until(moved, self.timeout_s, every=0.005)
        self.figures["detected_s"] = time.perf_counter() - since


@dataclass
class Loaded:
    """A load under way."""

    answering: asyncio.Future[list[Answer]]
    running: list[Sequence]
    undisturbed: list[Answer]
    figures: dict[str, float]

    def on(self, worker: Process) -> list[Sequence]:
        return [s for s in self.running if s.worker == worker.incarnation]

    async def judged(self, since: float = 0.0) -> list[Answer]:
        """Whole, and as undisturbed; notes the longest pause of a client since then."""
        answers = await self.answering
        checker.judge_all(answers, self.undisturbed)
        self.figures["pause_s"] = max(self.figures.get("pause_s", 0.0), longest_pause_s(answers, since))
        return answers


def _name(scenario: Scenario) -> str:
    if isinstance(scenario, functools.partial):
        return " ".join(map(str, [scenario.func.__name__, *scenario.keywords.values()]))
    return str(getattr(scenario, "__name__", scenario))


Scenario = Callable[[Run], Awaitable[None]]


class Play:
    def __init__(self, undisturbed: list[Answer], redis_url: str, folder: Path) -> None:
        self._undisturbed = undisturbed
        self._redis_url = redis_url
        self._folder = folder
        self._numbers = itertools.count()

    async def play(self, scenario: Scenario, *, allowed: tuple[str, ...] = (), **options: Any) -> Run:
        """options: of the stack; own_redis: it has a server of its own. allowed: log lines."""
        async with self._run(allowed, **options) as run:
            await scenario(run)
            await run.rest.check()
            checker.check_logs(run.stack)
        note(**run.figures)
        return run

    async def objects(self, scenario: Scenario, number: str, *cuts: Cut, **options: Any) -> None:
        """Without the rules that are cut out, this invariant (a pattern of numbers) is found broken."""
        assert cuts
        with pytest.raises(checker.Violation, match=f"^(?:{number}):") as objection:
            await self.play(scenario, cuts=cuts, **{"timeout_s": TWIN_TIMEOUT_S} | options)
        log.info("the twin of %s: %s", _name(scenario), str(objection.value)[:200])

    @contextlib.asynccontextmanager
    async def _run(
        self, allowed: tuple[str, ...], *, own_redis: bool = False, timeout_s: float = TIMEOUT_S, **options: Any
    ) -> AsyncIterator[Run]:
        folder = self._folder / f"play-{next(self._numbers)}"
        with contextlib.ExitStack() as servers:
            server = servers.enter_context(OwnRedis(folder / "redis")) if own_redis else None
            options = {"env": SLOW} | options
            url = server.url if server else self._redis_url
            async with ChaosStack(url, folder / "stack", **options) as stack:
                stack.allowed += allowed
                run = Run(stack, self._undisturbed, checker.Rest.of(stack), server, timeout_s)
                try:
                    yield run
                finally:
                    for client in run.clients:
                        await client.close()
