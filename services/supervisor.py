"""Keeps programs running: starts, restarts with growing delays, forwards their lines, stops them in order.

Knows nothing of Redis or of what the programs do, except that some exit statuses mean "restarting will not help": then
everything stops. A child runs in a session of its own, so that Ctrl-C reaches the supervisor alone, and dies with the
supervisor, however that ends (`shared/launcher.py`). Every life of a child has a fresh incarnation; when it ends, that
is reported at once, so that nobody waits for its lease to run out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from shared import launcher, logs
from shared.runtime import EXIT_LAPSED, EXIT_MEANINGS, FINAL_EXITS

log = logging.getLogger("serve")

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 30.0
LONG_LIFE_S = 10.0  # after that, the next death is taken for a new trouble
REPORT_TIMEOUT_S = 2.0
MAX_LINE_BYTES = 16 << 10
KILLED_PIPE_TIMEOUT_S = 1.0


def restart_delay_s(num_short_lives: int) -> float:
    """How long to wait after that many short lives in a row."""
    return min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(num_short_lives, 20))


@dataclass(frozen=True)
class Program:
    """What to keep running. Stages stop one after the other, the lowest first."""

    name: str
    argv: tuple[str, ...]
    stage: int
    environ: Callable[[str], Mapping[str, str]]  # of an incarnation
    new_incarnation: Callable[[], str] = lambda: ""
    at_parent_death: signal.Signals = signal.SIGKILL
    pass_fds: tuple[int, ...] = ()


Report = Callable[[Program, str], Awaitable[None]]
Forward = Callable[[str, str], None]


@dataclass
class Child:
    """One program and its current process."""

    program: Program
    process: asyncio.subprocess.Process | None = None
    incarnation: str = ""
    num_exits: int = 0
    num_short_lives: int = 0
    last_line: str = ""
    wanted: bool = True
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class Supervisor:
    """`forward(name, line)` shows a line; `report(program, incarnation)` tells others that a life has ended."""

    def __init__(self, forward: Forward, report: Report, stop_timeout_s: float) -> None:
        self._forward = forward
        self._report = report
        self._stop_timeout_s = stop_timeout_s
        self._children: list[Child] = []
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self.status = 0

    def start(self, program: Program) -> Child:
        child = Child(program)
        child.task = asyncio.create_task(self._keep_running(child), name=program.name)
        child.task.add_done_callback(self._check_ended)
        self._children.append(child)
        return child

    def stop(self) -> None:
        """The first call asks for an ordered stop, a second one for a quick one."""
        (self._hurry if self._stop.is_set() else self._stop).set()

    async def wait_for_stop(self) -> None:
        """Returns when a stop is asked for, by a caller or by a child that can never run (then its status is ours)."""
        await self._stop.wait()

    async def stop_all(self) -> None:
        """Stops stage after stage; when it returns, no child is left."""
        for stage in sorted({child.program.stage for child in self._children}):
            members = [child for child in self._children if child.program.stage == stage]
            await asyncio.gather(*(self._stop_child(child) for child in members))

    async def _stop_child(self, child: Child) -> None:
        child.wanted = False
        task = child.task
        assert task
        if child.process is None:
            task.cancel()  # between two lives, or in the middle of a start, which then ends its process
        else:
            _signal(child.process, signal.SIGTERM)
            if not await self._ends_in_time(task):
                log.warning("%s does not stop and is killed", child.program.name)
                _signal_group(child.process, signal.SIGKILL)
        await asyncio.gather(task, return_exceptions=True)

    async def _ends_in_time(self, task: asyncio.Task[None]) -> bool:
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait([task, hurry], timeout=self._stop_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        return task.done()

    async def _keep_running(self, child: Child) -> None:
        while child.wanted:
            began = time.monotonic()
            status = await self._live(child)
            child.num_exits += 1
            if status in FINAL_EXITS and child.wanted:
                self.status = status
                log.error("%s cannot run, %s: %s", child.program.name, EXIT_MEANINGS[status], child.last_line)
                self._stop.set()
                return
            await self._settle(child, status, time.monotonic() - began)

    def _check_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            log.error("the supervision of %s failed", task.get_name(), exc_info=error)
            self.status = 1
            self._stop.set()

    async def _live(self, child: Child) -> int:
        """One life, from start to end; the exit status."""
        child.incarnation = child.program.new_incarnation()
        try:
            process = await self._spawn(child)
        except OSError as e:  # no process or memory left: as passing as a crash
            child.last_line = f"cannot be started: {e.strerror}"
            return os.EX_OSERR
        assert process.stdout
        pump = asyncio.create_task(self._pump(child, process.stdout))
        try:
            status = await process.wait()
            await asyncio.wait([pump], timeout=KILLED_PIPE_TIMEOUT_S)  # a process of its own may keep the pipe open
            return status
        finally:
            child.process = None
            pump.cancel()

    async def _spawn(self, child: Child) -> asyncio.subprocess.Process:
        program = child.program
        child.process = await asyncio.create_subprocess_exec(
            *launcher.command(program.argv, program.at_parent_death),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env=dict(program.environ(child.incarnation)), pass_fds=program.pass_fds, start_new_session=True,
        )  # fmt: skip
        log.debug("%s started as process %s %s", program.name, child.process.pid, child.incarnation)
        return child.process

    async def _pump(self, child: Child, stream: asyncio.StreamReader) -> None:
        rest = b""
        while data := await stream.read(MAX_LINE_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._show(child, line)
        self._show(child, rest)

    def _show(self, child: Child, line: bytes) -> None:
        text = logs.escape(line.decode("utf-8", "replace").rstrip())
        if text:
            child.last_line = text
            self._forward(child.program.name, text)

    async def _settle(self, child: Child, status: int, lived_s: float) -> None:
        """Tells others of the end, and waits before the next life."""
        program = child.program
        report = asyncio.create_task(self._report_safely(program, child.incarnation))
        if child.wanted:
            short = lived_s < LONG_LIFE_S and status != EXIT_LAPSED
            delay = restart_delay_s(child.num_short_lives if short else 0)
            child.num_short_lives = child.num_short_lives + 1 if short else 0
            log.warning("%s %s; next start in %.1f s", program.name, describe_exit(status), delay)
            await asyncio.sleep(delay)
        await report

    async def _report_safely(self, program: Program, incarnation: str) -> None:
        try:
            await asyncio.wait_for(self._report(program, incarnation), REPORT_TIMEOUT_S)
        except Exception as e:  # its lease runs out, which tells the others too, only later
            log.warning("the end of %s could not be reported: %s", program.name, str(e) or type(e).__name__)


def describe_exit(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    meaning = EXIT_MEANINGS.get(status)
    return f"ended with status {status}" + (f" ({meaning})" if meaning else "")


def _signal(process: asyncio.subprocess.Process, sig: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
        process.send_signal(sig)


def _signal_group(process: asyncio.subprocess.Process, sig: signal.Signals) -> None:
    """The child leads a session, so its own children are ended with it."""
    with contextlib.suppress(ProcessLookupError):
        if process.returncode is None:
            os.killpg(process.pid, sig)
