"""The fault library: carries out what a schedule says, on a stack with links and a Redis of its own.

Each fault ends by itself after its time; several may be under way. A fault that meets somebody who has just died does
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import psutil
import redis

from shared.protocol import MemberKind
from tests.chaos.link import DOWN, UP, Mode
from tests.chaos.play import ChaosStack
from tests.chaos.schedule import Fault
from tests.e2e.own_redis import OwnRedis
from tests.e2e.process import Process

BROKEN = {
    "is cut off": (Mode.SWALLOW, (UP, DOWN)), "is mute": (Mode.SWALLOW, (UP,)), "is deaf": (Mode.SWALLOW, (DOWN,)),
    "is delayed": (Mode.HOLD, (UP, DOWN)),
}  # fmt: skip
AWAY_S = 0.3  # of a Redis that is killed
MAX_MEMORY_BYTES = 1 << 30


class Faults:
    def __init__(self, stack: ChaosStack, server: OwnRedis) -> None:
        self.stack = stack
        self.server = server
        self._redis_lock = asyncio.Lock()

    async def carry_out(self, fault: Fault) -> None:
        if fault.kind == "redis":
            await self._on_redis(fault)
            return
        process = self.stack.process(cast(MemberKind, fault.kind), fault.index)
        if process.popen.poll() is None:
            await self._on_process(fault, process)

    async def _on_process(self, fault: Fault, process: Process) -> None:
        match fault.what:
            case "is killed":
                self.stack.kill(process)
            case "is told to stop":
                self.stack.kill(process, signal.SIGTERM)
            case "crashes":
                self.stack.next_life[process.kind, process.index] = {"crash_at": fault.detail}
                self.stack.kill(process)
            case "stands still":
                await self._stand_still(process, fault.length_s)
            case "loses its connections":
                self.stack.link(process).reset()
            case "has no files left":
                if process.port:  # one that still starts needs files to read its code
                    with no_more_files(process):
                        await asyncio.sleep(fault.length_s)
            case _:
                mode, directions = BROKEN[fault.what]
                async with self.stack.link(process).broken(mode, directions):
                    await asyncio.sleep(fault.length_s)

    async def _stand_still(self, process: Process, length_s: float) -> None:
        process.popen.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(length_s)
        finally:
            process.popen.send_signal(signal.SIGCONT)

    # --- Redis -------------------------------------------------------------------------------------------------------

    async def _on_redis(self, fault: Fault) -> None:
        async with self._redis_lock:  # a full one is not killed meanwhile: it would come back with its old setting
            match fault.what:
                case "is killed":
                    self.server.kill()
                    await asyncio.sleep(AWAY_S)
                    await asyncio.to_thread(self.server.start)
                case "drops all clients":
                    self._command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                case "pauses":
                    self._command("CLIENT", "PAUSE", int(1000 * fault.length_s))
                    await asyncio.sleep(fault.length_s)
                case "forgets scripts":
                    self._command("SCRIPT", "FLUSH")
                case "is full":
                    async with self.full():
                        await asyncio.sleep(fault.length_s)

    @contextlib.asynccontextmanager
    async def full(self) -> AsyncIterator[None]:
        self.server.limit_memory(1)
        try:
            yield
        finally:
            self.server.limit_memory(MAX_MEMORY_BYTES)

    def _command(self, *words: Any) -> Any:
        with redis.Redis.from_url(self.server.url) as client:
            return client.execute_command(*words)


@contextlib.contextmanager
def no_more_files(process: Process, spare: int = 0) -> Iterator[None]:
    """The process can open so many files more, for the time of the block."""
    _, most = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    number = psutil.Process(process.pid).num_fds() + spare
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (number, most))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most, most))
