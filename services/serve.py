"""`headrace serve`: the whole stack on one machine, as child processes over an embedded Redis.

Decides what runs, with which environment, and what people see; how processes are kept running is `supervisor.py`'s.
Everything that can be known to fail is checked before anything is started, and said in one sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from redis.exceptions import RedisError

from services import modules
from services.banner import banner, until_ready
from services.console import Console, NamedStream
from services.model_download import fetch_model
from services.supervisor import Child, Program, Supervisor
from shared import bus, logs
from shared.cores import give_way, num_cores
from shared.embedded_redis import (
    RedisUnavailable,
    Server,
    StateFolder,
    find_server,
    log_tail,
    server_command,
    socket_path,
)
from shared.leases import new_incarnation
from shared.model_source import ModelSourceError
from shared.protocol import MemberKind
from shared.records import Records
from shared.runtime import START_TIMEOUT_S
from shared.scripts import Scripts
from shared.settings import (
    SCRIPTED_MODEL,
    CommonSettings,
    DeviceSettings,
    GatewaySettings,
    LimitSettings,
    SchedulerSettings,
    ScriptedSettings,
    ServeSettings,
    WorkerSettings,
    child_environ,
    load,
    secret_values,
    unknown_variables,
    variable,
)

log = logging.getLogger("serve")

SERVICE_KINDS: dict[str, MemberKind] = {
    "gateway": "gateway", "scheduler": "scheduler", "gpu_worker": "worker", "cache_store": "store",
}  # fmt: skip
STAGES = {service: stage for stage, service in enumerate(SERVICE_KINDS)}  # no new work first, state last
REDIS_STAGE = len(STAGES)
REDIS_START_TIMEOUT_S = 60.0


class CannotServe(Exception):
    """Why nothing was started; the text is one sentence for people."""


@dataclass(frozen=True)
class Plan:
    """What to run, from settings alone."""

    common: CommonSettings
    gateway: GatewaySettings
    worker: WorkerSettings
    device: DeviceSettings
    counts: ServeSettings
    environ: Mapping[str, str]

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> Plan:
        """SettingsError for any service's settings, before any of them is started."""
        for section in (LimitSettings, SchedulerSettings, ScriptedSettings):
            load(section, environ)
        if load(WorkerSettings, environ).engine == "scripted" and not environ.get(variable("model")):
            environ = {**environ, variable("model"): SCRIPTED_MODEL}  # it speaks no other vocabulary
        return cls(
            load(CommonSettings, environ), load(GatewaySettings, environ), load(WorkerSettings, environ),
            load(DeviceSettings, environ), load(ServeSettings, environ), dict(environ),
        )  # fmt: skip

    @property
    def embedded_redis(self) -> bool:
        return not self.environ.get(variable("redis_url"))

    @property
    def ports(self) -> list[int]:
        return [self.gateway.port + i for i in range(self.counts.gateways)]

    def with_environ(self, **fields: str) -> Plan:
        environ = {**self.environ, **{variable(field): value for field, value in fields.items()}}
        return replace(self, common=load(CommonSettings, environ), environ=environ)


def programs(plan: Plan) -> Iterator[Program]:
    """One program a service process, those first that others wait for."""
    numbers = {
        "cache_store": plan.counts.cache_stores, "gpu_worker": plan.counts.workers,
        "scheduler": plan.counts.schedulers, "gateway": plan.counts.gateways,
    }  # fmt: skip
    for service, number in numbers.items():
        for i in range(number):
            name = service.replace("gpu_", "").replace("_", "-")
            yield Program(
                name=f"{name}-{i}" if number > 1 else name,
                argv=tuple(modules.command(f"services.{service}")),
                stage=STAGES[service],
                environ=_environ_of(plan, service, i),
                new_incarnation=_incarnations(SERVICE_KINDS[service]),
            )


def _incarnations(kind: MemberKind) -> Callable[[], str]:
    return lambda: new_incarnation(kind)


def _environ_of(plan: Plan, service: str, index: int) -> Callable[[str], Mapping[str, str]]:
    fixed = {}
    if service == "gateway":
        fixed[variable("port")] = str(plan.ports[index])
    if service == "gpu_worker" and plan.worker.threads == 0:
        fixed[variable("threads")] = str(max(1, num_cores() // plan.counts.workers))

    def environ(incarnation: str) -> Mapping[str, str]:
        own = child_environ(plan.environ, service, fixed | {variable("incarnation"): incarnation})
        return modules.environ(own)

    return environ


def redis_program(plan: Plan, server: Server, state: StateFolder) -> Program:
    """It keeps the state folder locked while it runs, and ends in an orderly way when its parent dies."""
    return Program(
        name="redis",
        argv=tuple(
            server_command(
                server,
                state.folder,
                socket_path(state.folder),
                plan.counts.redis_maxmemory,
                append_only=not plan.common.volatile,
            )
        ),
        stage=REDIS_STAGE,
        environ=lambda _: child_environ(plan.environ, "redis", {}),
        at_parent_death=signal.SIGTERM,
        pass_fds=(state.lock_fd,),
    )


def check_ports(host: str, ports: list[int]) -> None:
    for port in ports:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as e:
            raise CannotServe(
                f"Cannot listen on {host}:{port} ({e.strerror}); choose others with --host, --port."
            ) from e


def serve(environ: Mapping[str, str]) -> int:
    """Runs until stopped; the exit status. SettingsError if a setting is wrong."""
    plan = Plan.load(environ)
    with contextlib.ExitStack() as stack:
        try:
            check_ports(plan.gateway.host, plan.ports)
            redis = None
            if plan.embedded_redis:
                server, state = find_server(), StateFolder(plan.common.state_dir)
                stack.callback(state.close)
                secret = plan.common.secret or state.secret()
                plan = plan.with_environ(redis_url=f"unix://{socket_path(state.folder)}", secret=secret)
                redis = redis_program(plan, server, state)
            if plan.common.model != SCRIPTED_MODEL:
                fetch_model(plan.common.model, plan.common.cache_dir)
        except (CannotServe, RedisUnavailable, ModelSourceError) as e:
            sys.stderr.write(f"headrace: {e}\n")
            return 1
        give_way()
        return asyncio.run(_Serving(plan, redis).run())


class _Serving:
    """One run of `serve`, after all checks."""

    def __init__(self, plan: Plan, redis: Program | None) -> None:
        self.plan = plan
        self.redis = redis
        self.programs = list(programs(plan))
        as_json = plan.common.log_format == "json"
        names = ["serve", *(p.name for p in [*([redis] if redis else []), *self.programs])]
        colour = sys.stdout.isatty() and not as_json and "NO_COLOR" not in plan.environ
        self.console = Console(sys.stdout.fileno(), names, colour, prefixed=not as_json)
        self.client = bus.connect(plan.common.redis_address)
        self.scripts = Scripts(self.client, plan.common.served_name)
        self.supervisor = Supervisor(self.console.line, self._report_exit, plan.counts.stop_timeout_s)

    async def run(self) -> int:
        common = self.plan.common
        stream = NamedStream(self.console, "serve")
        logs.set_up("serve", common.log_level, common.log_format, secret_values(common, self.plan.gateway), stream)
        for name in unknown_variables(self.plan.environ):
            log.warning("%s sets nothing; is it misspelt?", name)
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sig, self.supervisor.stop)
        log.info(
            "starting %s; the state is in %s", common.served_name, common.state_dir if self.redis else "the given Redis"
        )
        try:
            await self._until_stopped()
            log.info("stopping; a second signal ends everything at once")
        except CannotServe as e:
            log.error("%s", e)
            self.supervisor.status = 1
        await self.supervisor.stop_all()
        await self.client.aclose()
        self.console.close()
        return self.supervisor.status

    async def _until_stopped(self) -> None:
        """Starts everything and returns when a stop is asked for, also in the middle of starting."""
        starting = asyncio.create_task(self._start())
        stopping = asyncio.create_task(self.supervisor.wait_for_stop())
        try:
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                await stopping
        finally:
            starting.cancel()
            stopping.cancel()
            await asyncio.gather(starting, stopping, return_exceptions=True)

    async def _start(self) -> None:
        if self.redis:
            await self._redis_answers(self.supervisor.start(self.redis))
        else:
            await self._redis_is_fit()
        for program in self.programs:
            self.supervisor.start(program)
        gateway = self.plan.gateway
        await until_ready(gateway.host, gateway.port)
        device = await self._device()
        self.console.plain(
            banner(self.plan.common.served_name, device, gateway.host, self.plan.ports, bool(gateway.keys))
        )

    async def _redis_answers(self, child: Child) -> None:
        deadline = asyncio.get_running_loop().time() + REDIS_START_TIMEOUT_S
        while True:
            with contextlib.suppress(*bus.LOST):
                await self.client.ping()
                return
            if child.num_exits or asyncio.get_running_loop().time() > deadline:
                why = child.last_line or log_tail(self.plan.common.state_dir)
                raise CannotServe(f"The embedded Redis does not start: {why}")
            await asyncio.sleep(0.02)

    async def _redis_is_fit(self) -> None:
        """Asked before anything is started, since every service would refuse the same."""
        try:
            await bus.wait_for_redis(self.client, START_TIMEOUT_S)
            await bus.check_keeps(self.client, self.plan.common.volatile)
        except (bus.NoRedis, bus.UnfitRedis) as e:
            raise CannotServe(f"{e}.") from e

    async def _device(self) -> str:
        try:
            members = await Records(self.client, self.scripts.prefix).members()
        except (RedisError, OSError):
            return self.plan.device.device
        return ", ".join(sorted({m.device for m, alive in members.values() if m.kind == "worker" and alive}))

    async def _report_exit(self, program: Program, incarnation: str) -> None:
        if incarnation:
            kind = next(SERVICE_KINDS[service] for service, stage in STAGES.items() if stage == program.stage)
            await self.scripts.gone(kind, incarnation)
