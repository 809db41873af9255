"""Work that no bound holds but a process' end: a few child processes, started when needed, killed when they hang.

What takes too long costs its own child and its own request. Owns the children; what they do is their module's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable
from pathlib import Path

from services.gateway.admission import unavailable
from services.gateway.child_process import HEADER_BYTES, Frame, encode_frame
from services.gateway.errors import BadRequest
from shared import launcher
from shared.runtime import wait_for_event

log = logging.getLogger(__name__)

NUM_CHILDREN = 2  # so that one that hangs does not hold up the others
START_AFTER_S = 0.05  # an ordinary answer is there sooner than another child has started
MAX_CPU_S = 1.0  # of one answer; an ordinary one takes far below a millisecond
ANSWER_TIMEOUT_S = 10.0  # on a machine where the child gets no processor; its own time is limited by the kernel before
WAIT_TIMEOUT_S = 10.0  # for a child that has nothing to do
TREE = Path(__file__).parents[2]


class _Died(Exception):
    """A child has ended for another reason than its time."""


class ChildPool:
    """Children of one kind, each of which was given the same first frame. A child lives as long as it answers."""

    def __init__(
        self, module: str, first: Frame, *, what: str, max_answer_chars: int, error: Callable[[str], BadRequest],
        failed: str, too_slow: str, too_long: str, timeout_s: float = ANSWER_TIMEOUT_S, max_cpu_s: float = MAX_CPU_S,
    ) -> None:  # fmt: skip
        """what: they are for, in words. failed, too_slow, too_long: what `error` says of a call whose child died, or
        took too long, or answered too much."""
        self._module = module
        self._first = encode_frame(first | {"max_cpu_s": max_cpu_s})
        self._what = what
        self._error = error
        self._failed, self._too_slow, self._too_long = failed, too_slow, too_long
        self._max_frame_bytes = 6 * max_answer_chars + 1024  # a character is at most six bytes of JSON
        self._timeout_s = timeout_s
        self._idle: list[Process] = []
        self._all: set[Process] = set()
        self._returned = asyncio.Event()  # some child has done its work
        self._free = asyncio.Semaphore(NUM_CHILDREN)
        self._tasks: set[asyncio.Task[bytes]] = set()

    async def start_one(self) -> bytes:
        """The first child, so that no request waits for it; its answer to the first frame."""
        async with self._free:
            child, opened = await self._new_child()
            self._idle.append(child)
            return opened

    async def ask(self, call: bytes) -> bytes:
        """From frame to frame; `too_slow` when the time is over, TryLater while all children are busy.

        A caller that is cancelled leaves work that goes on to its end or its limit: half an answer in a pipe would be
        the next caller's."""
        try:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                await self._free.acquire()
        except TimeoutError:
            raise unavailable(f"all processes for {self._what} are busy", "busy") from None
        task = asyncio.ensure_future(self._work(call))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[bytes]) -> None:
        self._tasks.discard(task)
        self._free.release()
        if not task.cancelled():
            task.exception()  # its caller may be gone

    async def _work(self, call: bytes) -> bytes:
        """By a child that is there, unless it has died meanwhile (memory may be short); else by a new one."""
        await self._wait_for_idle(START_AFTER_S)
        while True:
            while self._idle:
                with contextlib.suppress(_Died):
                    return await self._answer_of(self._idle.pop(), call)
            try:
                child, _ = await self._new_child()
            except OSError as e:  # there is no descriptor, no memory or no process left for it
                log.warning("no other process for %s can be started: %s", self._what, e)
                await self._wait_for_idle(self._timeout_s)
                if not self._idle:
                    raise unavailable(f"no process for {self._what} can be started now", "busy") from None
                continue
            except _Died as e:
                raise self._error(self._failed) from e
            try:
                return await self._answer_of(child, call)
            except _Died as e:
                raise self._error(self._failed) from e

    async def _wait_for_idle(self, timeout_s: float) -> None:
        """For a child that works, if there is one and no other."""
        if not self._idle and self._all:
            self._returned.clear()
            await wait_for_event(self._returned, timeout_s)

    async def _answer_of(self, child: Process, call: bytes) -> bytes:
        try:
            answer = await self._exchange(child, call)
        except BaseException:
            await self._kill(child)
            raise
        self._idle.append(child)
        self._returned.set()
        return answer

    async def _new_child(self) -> tuple[Process, bytes]:
        argv = launcher.command([sys.executable, "-m", self._module], signal.SIGKILL)
        environ = {"PYTHONPATH": str(TREE), "PYTHONSAFEPATH": "1"}  # and nothing of this process' own
        # its errors would quote what clients have sent
        child = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environ)
        self._all.add(child)
        try:
            opened = await self._exchange(child, self._first)
        except BaseException:
            await self._kill(child)
            raise
        return child, opened

    async def _exchange(self, child: Process, frame: bytes) -> bytes:
        assert child.stdin is not None and child.stdout is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                child.stdin.write(frame)
                await child.stdin.drain()
                size = int.from_bytes(await child.stdout.readexactly(HEADER_BYTES))
                if size > self._max_frame_bytes:
                    raise self._error(self._too_long)
                return await child.stdout.readexactly(size)
        except TimeoutError as e:
            raise self._slow() from e
        except (asyncio.IncompleteReadError, ConnectionError) as e:
            if await child.wait() == -signal.SIGPROF:
                raise self._slow() from e
            raise _Died from e

    def _slow(self) -> BadRequest:
        log.warning("a process for %s took too long, and is ended", self._what)
        return self._error(self._too_slow)

    async def _kill(self, child: Process) -> None:
        self._all.discard(child)
        if child.returncode is None:
            child.kill()
        await child.wait()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for child in list(self._all):
            await self._kill(child)
