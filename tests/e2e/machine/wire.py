"""The way to Redis as a test controls it: every command of every actor waits here for its turn.

One command travels at a time, so a run is the same whenever the same turns are given. A turn may be given with a fault:
the command is dropped, its reply is lost, or it arrives late (after its sender has been told that the connection broke,
and perhaps after the sender's death). Knows no actor.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import ConnectionError, RedisError

from tests.e2e.machine.virtual_loop import VirtualLoop

Call = Callable[[], Awaitable[Any]]


class Fault(Enum):
    NONE = auto()
    DROPPED = auto()  # before it reaches Redis
    REPLY_LOST = auto()
    LATE = auto()


Command = tuple[Any, ...]


@dataclass(eq=False)
class Turn:
    command: Command
    go: asyncio.Future[Fault]


@dataclass(eq=False)
class Step:
    """One step of an actor: a task, those that it has begun, and their commands that wait for their turn.

    held: it gets no turn until it is let go.
    """

    name: str
    held: bool = False
    turns: deque[Turn] = field(default_factory=deque)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Some tasks outlast the first: an admission does, when its client hangs up."""
        return all(task.done() for task in self.tasks)

    @property
    def error(self) -> BaseException | None:
        return None if self.tasks[0].cancelled() else self.tasks[0].exception()


_current: ContextVar[Step] = ContextVar("step")


def _new_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
    step = _current.get(None)
    if step is not None:
        step.tasks.append(task)
    return task


class Wire:
    """late: commands that their senders gave up, and that may still arrive. trace: whose command travelled, and how.

    audit: called with a command that is about to run; returns what is called with its reply, and raises AssertionError
    if that cannot be: kept in `broken`.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self.late: list[tuple[Command, Call]] = []
        self.trace: list[tuple[str, Command, str]] = []
        self.audit: Callable[[Command], Callable[[Any], None]] = lambda command: lambda reply: None
        self.broken: list[AssertionError] = []
        self._loop = loop
        loop.set_task_factory(_new_task)

    def begin(self, name: str, work: Awaitable[Any]) -> Step:
        """A step that has run up to its first command."""
        step = Step(name)
        token = _current.set(step)
        self._loop.create_task(_as_coroutine(work))
        _current.reset(token)
        self._loop.run_until_quiet()
        return step

    def advance(self, step: Step, fault: Fault = Fault.NONE) -> None:
        """Lets its next command travel; then the step has run up to the one after it, or to its end."""
        turn = step.turns.popleft()
        self.trace.append((step.name, turn.command, "" if fault is Fault.NONE else fault.name))
        turn.go.set_result(fault)
        self._loop.run_until_quiet()

    def run(self, step: Step, stop_at: Callable[[Command], bool] = lambda command: False) -> bool:
        """To its end, or to where it waits for somebody else; True if to where it is about to send such a command."""
        while step.turns and not step.held:
            if stop_at(step.turns[0].command):
                return True
            self.advance(step)
        return False

    def deliver_late(self, index: int) -> None:
        """A command whose sender gave it up reaches Redis."""
        command, call = self.late.pop(index)
        self.trace.append(("late", command, ""))
        self.ask(self._ignoring_errors(command, call))

    async def _ignoring_errors(self, command: Command, call: Call) -> None:
        with contextlib.suppress(RedisError):
            await self._answer(command, call)

    def ask(self, work: Awaitable[Any]) -> Any:
        """The result of something that waits for no turn."""
        task = self._loop.create_task(_as_coroutine(work))
        self._loop.run_until_quiet()
        return task.result()

    def left_over(self) -> list[asyncio.Task[Any]]:
        """Tasks that have not ended."""
        return list(asyncio.all_tasks(self._loop))

    async def carry(self, command: Command, call: Call) -> Any:
        step = _current.get(None)
        if step is None:
            return await self._answer(command, call)
        turn = Turn(command, self._loop.create_future())
        step.turns.append(turn)
        try:
            fault = await turn.go
        except asyncio.CancelledError:
            if turn in step.turns:
                step.turns.remove(turn)
            raise
        if fault is Fault.LATE:
            self.late.append((command, call))
        if fault in (Fault.DROPPED, Fault.LATE):
            raise ConnectionError("the connection broke")
        try:
            return await self._answer(command, call)
        finally:
            if fault is Fault.REPLY_LOST:
                raise ConnectionError("the reply was lost")

    async def _answer(self, command: Command, call: Call) -> Any:
        selector, check = self._loop.quiet_selector, self.audit(command)
        selector.num_awaited += 1
        try:
            reply = await call()
        finally:
            selector.num_awaited -= 1
        try:
            check(reply)
        except AssertionError as e:
            self.broken.append(e)  # not raised here: the caller may survive it, or may never get a reply
        return reply


async def _as_coroutine(work: Awaitable[Any]) -> Any:
    return await work


class WiredRedis(Redis):
    """All actors share one connection, as no two commands travel at a time."""

    def __init__(self, pool: ConnectionPool, wire: Wire) -> None:
        super().__init__(connection_pool=pool)
        self.wire = wire

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        return await self.wire.carry(args, partial(super().execute_command, *args, **options))

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        return _WiredPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint, wire=self.wire)


class _WiredPipeline(Pipeline):
    def __init__(self, *args: Any, wire: Wire) -> None:
        super().__init__(*args)
        self._wire = wire

    async def execute(self, raise_on_error: bool = True) -> Any:
        return await self._wire.carry(("PIPELINE",), partial(super().execute, raise_on_error))
