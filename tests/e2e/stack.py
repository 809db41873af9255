"""A whole deployment of real processes on a real Redis, for tests that watch it, kill parts of it, and bring them back.

Owns the processes and their logs. Nobody supervises them: what dies stays dead until a test restarts it, and unless a
test `report`s a death, others learn of it when the lease runs out. At its end every stack must be at rest, must have
logged no error that the test did not announce, and must stop in order. Several stacks share a Redis: each has a model
name of its own. Each service has only the rights of its own Redis user.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import re
import secrets
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import redis

from services import modules
from shared import launcher
from shared.bus import LOST, connect
from shared.leases import new_incarnation
from shared.protocol import MemberKind
from shared.scripts import Scripts
from shared.settings import child_environ, current_environ, variable
from tests import helpers
from tests.e2e.process import Process
from tests.e2e.state import State
from tests.helpers import wait_until

SERVICES: dict[MemberKind, str] = {
    "gateway": "gateway", "scheduler": "scheduler", "store": "cache_store", "worker": "gpu_worker",
}  # fmt: skip
REDIS_USERS: dict[MemberKind, str] = {
    "gateway": "gateway", "scheduler": "scheduler", "store": "cache-store", "worker": "worker",
}  # fmt: skip
START_TIMEOUT_S = 40.0
STOP_TIMEOUT_S = 10.0
REPORT_TIMEOUT_S = 2.0
MAX_STOP_S = 5.0  # of a service that has nothing to do; on a machine of its own it takes a tenth of that
REST_TIMEOUT_S = 12.0  # metrics are published every 2 s; a cancelled orphan has its grace time before
NUM_TAIL_LINES = 15
ERROR_LINE = re.compile(r"^\S+ (?:ERROR|CRITICAL) .*|^Traceback \(most recent call last\)|^.*Warning: .*", re.MULTILINE)


class Stack:
    """`env` holds settings by field name, for all services; api_key: for the stack's own requests. `allowed`: regular
    expressions of log lines that are no failure of the test."""

    def __init__(
        self, redis_url: str, folder: Path, *, model: str = "scripted", gateways: int = 1, schedulers: int = 1,
        stores: int = 1, workers: int = 1, env: Mapping[str, object] | None = None, api_key: str = "",
    ) -> None:  # fmt: skip
        self.redis_url = redis_url
        self.folder = folder
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.served_name = f"e2e-{secrets.token_hex(4)}"
        self.numbers: dict[MemberKind, int] = {
            "store": stores, "worker": workers, "scheduler": schedulers, "gateway": gateways,
        }  # fmt: skip
        settings: dict[str, object] = {
            "redis_url": redis_url, "model": model, "served_model_name": self.served_name, "retention_s": 60,
            "engine": "scripted" if model == "scripted" else "auto", "drain_timeout_s": 1,
        }  # fmt: skip
        self.environ = {variable(k): str(v) for k, v in (settings | dict(env or {})).items()}
        self.state = State(redis_url, self.served_name)
        self.lives: list[Process] = []  # all that ever were
        self.allowed: list[str] = []
        self.stop_s: dict[str, float] = {}
        self.tree: Path | None = None  # whose code runs, if not this one's
        self.ended_unasked: list[str] = []  # of those that were brought back
        self.next_life: dict[tuple[MemberKind, int], dict[str, object]] = {}  # settings of that life alone
        self._numbers = itertools.count()
        self.restless = False  # set by a test that leaves work behind on purpose

    # --- life --------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Stack:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            for kind, number in self.numbers.items():
                for index in range(number):
                    self._start(kind, index)
            await self.ready()
        except BaseException:
            self.kill_all()
            raise
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            if error is None:
                await self.check_at_rest()
                await self.stop()
                self.check_logs()
        except BaseException as e:
            error = e
            raise
        finally:
            if error is not None:
                error.add_note("\n".join(self._tails()))
            self.kill_all()
            self.state.close()

    def own_settings(self, kind: MemberKind, index: int) -> dict[str, object]:
        """What this process alone is started with, in all of its lives."""
        return {"port": 0} if kind == "gateway" else {}

    def _start(self, kind: MemberKind, index: int, **settings: object) -> Process:
        """settings: of this life alone."""
        service = SERVICES[kind]
        incarnation = new_incarnation(kind)
        settings = self.own_settings(kind, index) | {"incarnation": incarnation} | settings
        redis_url = str(settings.get("redis_url", self.redis_url))
        settings["redis_url"] = helpers.url_as(redis_url, REDIS_USERS[kind])
        own = {variable(k): str(v) for k, v in settings.items()}
        environ = modules.environ(child_environ(current_environ() | self.environ, service, own))
        if self.tree is not None:
            environ["PYTHONPATH"] = str(self.tree)
        log = self.folder / f"{kind}-{index}.{next(self._numbers)}.log"
        file = log.open("wb")
        popen = subprocess.Popen(
            launcher.command(modules.command(f"services.{service}"), signal.SIGKILL), env=environ, cwd=self.folder,
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        process = Process(kind, index, incarnation, popen, log, file, may_crash="crash_at" in settings)
        self.lives.append(process)
        return process

    async def ready(self) -> None:
        """Every process is announced, every worker is leased, and a request is answered through every gateway."""
        await wait_until(self._is_announced, START_TIMEOUT_S, every=0.03)
        async with aiohttp.ClientSession(headers=self.headers) as session:
            for gateway in self.processes("gateway"):
                await wait_until(functools.partial(_answers, session, gateway), START_TIMEOUT_S, every=0.03)

    def _is_announced(self) -> bool:
        self.check_alive()
        with contextlib.suppress(redis.ConnectionError):
            alive = Counter(member.kind for member in self.state.members().values())
            return alive == Counter(self.numbers) and self.state.all_leased()
        return False

    def check_alive(self) -> None:
        for process in self.processes():
            if process.popen.poll() is not None and not process.expected_to_end:
                raise AssertionError(f"{process.name} ended with {process.popen.returncode}:\n{process.text()}")

    def _tails(self) -> Iterator[str]:
        """The ends of all logs, for the report of a test that has failed."""
        for process in self.lives:
            yield f"--- {process.log.name} ({process.incarnation}, status {process.popen.poll()})"
            yield from process.text().splitlines()[-NUM_TAIL_LINES:]

    def kill_all(self) -> None:
        for process in self.lives:
            if process.popen.poll() is None:
                process.popen.kill()
            process.popen.wait(STOP_TIMEOUT_S)
            process.file.close()

    # --- what is there -----------------------------------------------------------------------------------------------

    def processes(self, kind: MemberKind | None = None) -> list[Process]:
        """The latest life of each."""
        latest = {(p.kind, p.index): p for p in self.lives}
        return [p for p in latest.values() if kind in (None, p.kind)]

    def process(self, kind: MemberKind, index: int = 0) -> Process:
        return next(p for p in self.processes(kind) if p.index == index)

    def by_incarnation(self, incarnation: str) -> Process:
        return next(p for p in self.lives if p.incarnation == incarnation)

    @property
    def url(self) -> str:
        return self.url_of(0)

    def url_of(self, gateway: int) -> str:
        return f"http://127.0.0.1:{self.process('gateway', gateway).port}"

    # --- faults ------------------------------------------------------------------------------------------------------

    def kill(self, process: Process, sig: signal.Signals = signal.SIGKILL) -> float:
        """When it was sent. A process that gets SIGSTOP or SIGCONT lives on."""
        process.expected_to_end = sig not in (signal.SIGSTOP, signal.SIGCONT)
        at = time.perf_counter()
        process.popen.send_signal(sig)
        return at

    @contextlib.asynccontextmanager
    async def paused(self, process: Process) -> AsyncIterator[None]:
        self.kill(process, signal.SIGSTOP)
        try:
            yield
        finally:
            self.kill(process, signal.SIGCONT)

    async def report(self, process: Process) -> None:
        """What a supervisor does when a child has ended."""
        await asyncio.to_thread(process.popen.wait, STOP_TIMEOUT_S)
        client = connect(self.redis_url)
        try:
            await Scripts(client, self.served_name).gone(process.kind, process.incarnation)
        finally:
            await client.aclose()

    async def restart(self, process: Process, *, wait: bool = True, **settings: object) -> Process:
        """Another life of one that has ended; settings: of that life alone."""
        await asyncio.to_thread(process.popen.wait, STOP_TIMEOUT_S)
        process.file.close()
        successor = self._start(process.kind, process.index, **settings)
        if wait:
            await wait_until(lambda: successor.incarnation in self.state.members(), START_TIMEOUT_S)
        return successor

    @contextlib.asynccontextmanager
    async def supervised(self) -> AsyncIterator[None]:
        """For the time of the block what ends is reported and started again, as `serve` would."""

        async def look() -> None:
            while True:
                for process in self.processes():
                    if process.popen.poll() is not None:
                        await self._bring_back(process)
                await asyncio.sleep(0.02)

        def complete() -> bool:
            return all(p.popen.poll() is None for p in self.processes()) and self._is_announced()

        looking = asyncio.create_task(look())
        try:
            yield
            await wait_until(complete, START_TIMEOUT_S)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def _bring_back(self, process: Process) -> None:
        if not process.expected_to_end and not (process.may_crash and process.popen.returncode == -signal.SIGKILL):
            self.ended_unasked.append(f"{process.log.name} with {process.popen.returncode}")
            process.expected_to_end = True
        with contextlib.suppress(*LOST):  # Redis may be away: then leases tell
            await asyncio.wait_for(self.report(process), REPORT_TIMEOUT_S)
        await self.restart(process, wait=False, **self.next_life.pop((process.kind, process.index), {}))

    # --- the end -----------------------------------------------------------------------------------------------------

    async def check_at_rest(self) -> None:
        """Invariants 1, 6, 7 and 9: all work has ended once, nothing is held, and nobody died unasked."""
        self.check_alive()
        if self.restless:
            return
        try:
            await wait_until(lambda: not self.state.unrest(), REST_TIMEOUT_S, every=0.05)
        except TimeoutError:
            raise AssertionError("not at rest: " + "; ".join(self.state.unrest())) from None

    async def stop(self) -> None:
        """In order, as `serve` does; every process must end by itself, with status 0, and leave nothing behind."""
        for kind in ("gateway", "scheduler", "worker", "store"):
            living = [p for p in self.processes(kind) if p.popen.poll() is None]
            started = time.perf_counter()
            for process in living:
                process.popen.send_signal(signal.SIGTERM)
            for process in living:
                try:
                    await asyncio.to_thread(process.popen.wait, STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    raise AssertionError(f"{process.name} does not stop:\n{process.text()}") from None
                self.stop_s[process.name] = time.perf_counter() - started
                assert self.stop_s[process.name] < MAX_STOP_S, f"{process.name}:\n{process.text()}"
                assert process.popen.returncode == 0, f"{process.name}: {process.popen.returncode}\n{process.text()}"
        assert self.state.members() == {}, "somebody left without saying so"

    def check_logs(self) -> None:
        """Invariant 10."""
        found = []
        for process in self.lives:
            text = process.text()
            for line in ERROR_LINE.finditer(text):
                if not any(re.search(pattern, line[0]) for pattern in self.allowed):
                    found.append(f"{process.log.name}: {text[line.start() : line.start() + 2000]}")
        assert not found, "\n".join(found)


async def _answers(session: aiohttp.ClientSession, gateway: Process) -> bool:
    body: dict[str, Any] = {"prompt": [65], "max_tokens": 1, "temperature": 0}
    if not gateway.port:
        return False
    with contextlib.suppress(aiohttp.ClientError):
        async with session.post(f"http://127.0.0.1:{gateway.port}/v1/completions", json=body) as response:
            return response.status == 200
    return False


NewStack = Callable[..., Stack]  # the fixture `new_stack`
